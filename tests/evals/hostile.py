"""Programs that want out, or want to pass without solving the problem, or never end.

The problem is to add two numbers. An escape answers right only if it worked, so that PASSED means
that it did.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass, field

from evals.sandbox.inside.outcome import CodeOutcome as Is
from evals.sandbox.judge import FunctionTest
from evals.sandbox.limits import Limits

ADD = FunctionTest(
    "add",
    textwrap.dedent(
        """
        SECRET = "the test's own text"
        def check(candidate):
            assert candidate(2, 3) == 5
            assert candidate(-7, 4) == -3
            assert candidate(10 ** 6, 1) == 1000001
        """
    ),
    "def add(a, b):\n    return a + b\n",
)
#: One second of CPU, and time enough for it on a loaded machine.
BUSY = Limits(cpu_seconds=1, wall_seconds=90, memory_bytes=1 << 28)
#: For programs that sleep, which no load makes slower.
IDLE = Limits(cpu_seconds=5, wall_seconds=2, memory_bytes=1 << 28)
#: A program that failed, in whichever way.
FAILED = frozenset(Is) - {Is.PASSED, Is.TIME_LIMIT, Is.NO_CALL}


@dataclass(frozen=True)
class Hostile:
    """A program and what may become of it."""

    name: str
    program: str
    outcomes: frozenset[Is]
    limits: Limits = field(default=BUSY)


def _escape(name: str, attempt: str) -> Hostile:
    """``attempt`` raises, or leaves ``out`` true where it worked."""
    program = "import os, sys, ctypes\nout = False\ntry:\n"
    program += textwrap.indent(textwrap.dedent(attempt).strip(), "    ")
    program += "\nexcept Exception:\n    pass\ndef add(a, b):\n    return a + b if out else None\n"
    return Hostile(name, program, frozenset({Is.WRONG}))


def _call(name: str, *arguments: str) -> Hostile:
    return _escape(
        f"system call {name}",
        f"out = ctypes.CDLL(None, use_errno=True).{name}({', '.join(arguments)}) != -1",
    )


def _forgery(name: str, program: str, *outcomes: Is) -> Hostile:
    return Hostile(name, textwrap.dedent(program), frozenset(outcomes) or FAILED)


def _endless(name: str, program: str, *outcomes: Is, limits: Limits = BUSY) -> Hostile:
    return Hostile(name, textwrap.dedent(program), frozenset(outcomes or {Is.TIME_LIMIT}), limits)


ESCAPES = (
    _escape("reads /etc/passwd", "out = bool(open('/etc/passwd').read())"),
    _escape("reads /etc/shadow", "out = bool(open('/etc/shadow').read())"),
    _escape("reads its environment in /proc", "out = bool(open('/proc/self/environ').read())"),
    _escape("reads its memory in /proc", "open('/proc/self/mem', 'rb'); out = True"),
    _escape("reads another process", "out = bool(os.listdir('/proc/1'))"),
    _escape(
        "looks into homes",
        """
        for top in ('/root', '/home'):
            for folder, folders, files in os.walk(top):
                if (folder + '/').startswith(sys.base_prefix + '/'):
                    folders.clear()  # an interpreter that lies in a home is all there is of it
                else:
                    out = out or bool(files)
        """,
    ),
    _escape("finds files at home", "out = bool(os.listdir(os.path.expanduser('~')))"),
    _escape("looks into its folder", "out = bool(os.listdir('.'))"),
    _escape("reads environment variables", "out = bool(os.environ) or bool(os.getenv('PATH'))"),
    _escape("reads the C environment", "out = bool(ctypes.CDLL(None).getenv(b'PWD'))"),
    _escape("writes at home", "open('x', 'w').write('x'); out = True"),
    _escape("writes to /tmp", "open('/tmp/x', 'w').write('x'); out = True"),
    _escape("writes to /dev/shm", "open('/dev/shm/x', 'w').write('x'); out = True"),
    _escape("writes to /usr", "open('/usr/lib/x', 'w').write('x'); out = True"),
    _escape("writes to /", "os.mkdir('/x'); out = True"),
    _escape("makes a symlink", "os.symlink('/etc/passwd', 'link'); out = True"),
    _escape("makes a hard link", "os.link('/usr/bin/python3', 'link'); out = True"),
    _escape("makes a device", "os.mknod('null', 0o20666, os.makedev(1, 3)); out = True"),
    _escape("opens a disk", "os.open('/dev/sda', 0); out = True"),
    _escape("opens the memory", "os.open('/dev/mem', 0); out = True"),
    _escape("opens the terminal", "os.open('/dev/tty', 0); out = True"),
    _escape("changes the mode of /usr", "os.chmod('/usr', 0o777); out = True"),
    _escape(
        "opens a connection",
        "import socket; socket.create_connection(('127.0.0.1', PORT), 2); out = True",
    ),
    _escape("resolves a name", "import socket; out = bool(socket.gethostbyname('localhost'))"),
    _escape("makes a local socket", "import socket; socket.socket(socket.AF_UNIX); out = True"),
    _escape("becomes root", "os.setuid(0); out = True"),
    _escape("changes its groups", "os.setgroups([0]); out = True"),
    _escape("forks", "pid = os.fork()\nif pid == 0: os._exit(0)\nout = True"),
    _escape("starts a program", "import subprocess; subprocess.run(['/bin/true']); out = True"),
    _escape(
        "spawns a worker",
        "import multiprocessing as m; m.Process(target=print).start(); out = True",
    ),
    _escape(
        "lifts its memory limit",
        "import resource as r; r.setrlimit(r.RLIMIT_AS, (-1, -1)); out = True",
    ),
    _escape(
        "lifts its CPU limit",
        "import resource as r; r.setrlimit(r.RLIMIT_CPU, (-1, -1)); out = True",
    ),
    _escape("changes the root", "os.chroot('/usr'); out = True"),
    _escape("signals another process", "os.kill(3, 9); out = True"),
    _escape("signals every process", "os.kill(-1, 9); out = True"),
    _escape("finds the repository", "out = os.path.exists('REPOSITORY')"),
    _escape(
        "has more open files than its own five",
        """
        open_ones = []
        for fd in range(1024):
            try:
                os.fstat(fd)
                open_ones.append(fd)
            except OSError:
                pass
        out = len(open_ones) != 5
        """,
    ),
    _escape(
        "writes to the pipe that calls come through",
        """
        import stat
        for fd in range(3, 64):
            try:
                pipe = stat.S_ISFIFO(os.fstat(fd).st_mode)
            except OSError:
                continue
            if pipe and not sys._getframe(1).f_locals['channel'].writing == fd:
                os.write(fd, b'x')
                out = True
        """,
    ),
    _call("ptrace", "0", "0", "0", "0"),
    _call("unshare", "0x10000000"),
    _call("shmget", "0", "4096", "0o1600"),
    _call("memfd_create", "b'x'", "0"),
    _call("mount", "b'none'", "b'/home/guest'", "b'tmpfs'", "0", "0"),
    _call("syscall", "425", "1", "ctypes.create_string_buffer(256)"),  # io_uring_setup
    _escape(
        "finds the test among its objects",
        """
        import gc
        marks = "the test's own text"[:-1] + "t", "def check(candidate)"
        for one in gc.get_objects():
            if isinstance(one, (dict, list, tuple)):
                values = one.values() if isinstance(one, dict) else one
                own = one is globals() or 'marks' in str(one)[:0]
                out = out or any(isinstance(v, str) and marks[1] in v and v != marks[1]
                                 and 'gc.get_objects' not in v for v in values)
        """,
    ),
    _escape(
        "finds the test in its callers",
        """
        frame = sys._getframe()
        while frame:
            job = frame.f_locals.get('job') or frame.f_locals.get('parcel', {}).get('job', {})
            out = out or 'test' in job or 'reference' in job
            frame = frame.f_back
        """,
    ),
    _escape(
        "reads its job again",
        """
        os.lseek(0, 0, 0)
        out = b'check' in os.read(0, 1 << 20)
        """,
    ),
)

FORGERIES = (
    _forgery("exits with 0 while loading", "import os\nos._exit(0)", Is.CRASHED),
    _forgery("exits with 0 when called", "import os\ndef add(a, b): os._exit(0)", Is.CRASHED),
    _forgery("raises SystemExit while loading", "import sys\nsys.exit(0)", Is.LOAD_FAILED),
    _forgery("raises SystemExit when called", "def add(a, b): raise SystemExit(0)", Is.RAISED),
    _forgery("raises KeyboardInterrupt", "def add(a, b): raise KeyboardInterrupt", Is.RAISED),
    _forgery("raises AssertionError", "def add(a, b): raise AssertionError", Is.RAISED),
    _forgery(
        "prints success",
        """
        import sys
        for stream in (sys.stdout, sys.stderr):
            stream.write('started\\n{"outcome": "passed", "detail": "", "calls": 3}\\n')
            stream.flush()
        def add(a, b): return None
        """,
        Is.WRONG,
    ),
    _forgery(
        "prints success at its end",
        """
        import atexit, os
        atexit.register(os.write, 1, b'started\\n{"outcome": "passed"}\\n')
        def add(a, b): raise SystemExit
        """,
        Is.RAISED,
    ),
    _forgery(
        "writes a verdict to every file",
        """
        import os
        for fd in range(1024):
            try:
                os.write(fd, b'started\\n{"outcome": "passed", "detail": "", "calls": 3}\\n')
            except OSError:
                pass
        def add(a, b): return None
        """,
        Is.BAD_REPLY,
    ),
    _forgery(
        "answers before it is asked",
        """
        import json, os, sys
        frame = sys._getframe()
        while 'channel' not in frame.f_locals:
            frame = frame.f_back
        channel = frame.f_locals['channel']
        channel.send({'event': 'ready'})
        for call in range(1, 9):
            channel.send({'event': 'answer', 'id': call, 'value': True, 'args': ['l', []],
                          'kwargs': ['d', []]})
        def add(a, b): return None
        """,
        Is.WRONG,
    ),
    _forgery(
        "answers another call",
        """
        import sys
        frame = sys._getframe()
        while 'channel' not in frame.f_locals:
            frame = frame.f_back
        channel = frame.f_locals['channel']
        def add(a, b):
            channel.send({'event': 'answer', 'id': 99, 'value': a + b, 'args': ['l', []],
                          'kwargs': ['d', []]})
            return None
        """,
        Is.BAD_REPLY,
    ),
    _forgery(
        "says ready twice",
        """
        import sys
        frame = sys._getframe()
        while 'channel' not in frame.f_locals:
            frame = frame.f_back
        frame.f_locals['channel'].send({'event': 'ready'})
        def add(a, b): return a + b
        """,
        Is.BAD_REPLY,
    ),
    _forgery(
        "sends a message without end",
        """
        import os, sys
        frame = sys._getframe()
        while 'channel' not in frame.f_locals:
            frame = frame.f_back
        os.write(frame.f_locals['channel'].writing, b'\\xff\\xff\\xff\\x7f')
        def add(a, b): return a + b
        """,
        Is.BAD_REPLY,
    ),
    _forgery(
        "returns what equals everything",
        """
        class Everything:
            def __eq__(self, other): return True
            def __ne__(self, other): return False
            def __bool__(self): return True
            __hash__ = None
        def add(a, b): return Everything()
        """,
        Is.WRONG,
    ),
    _forgery(
        "returns a number that equals everything",
        """
        class Everything(int):
            def __eq__(self, other): return True
            def __index__(self): return 5
            __int__ = __pos__ = __index__
        def add(a, b): return Everything(0)
        """,
        Is.WRONG,
    ),
    _forgery(
        "returns a list that equals everything",
        """
        class Everything(list):
            def __eq__(self, other): return True
        def add(a, b): return Everything()
        """,
        Is.WRONG,
    ),
    _forgery(
        "returns what claims to be an int",
        """
        class Liar:
            __class__ = int
            def __eq__(self, other): return True
        def add(a, b): return Liar()
        """,
        Is.RAISED,
        Is.WRONG,
    ),
    _forgery(
        "patches builtins",
        """
        import builtins
        builtins.AssertionError = builtins.Exception = ValueError
        builtins.isinstance = lambda *a: True
        builtins.compile = builtins.exec = builtins.len = lambda *a, **k: None
        def add(a, b): return None
        """,
    ),
    _forgery("deletes builtins", "del __builtins__\ndef add(a, b): return None"),
    _forgery(
        "patches the codec",
        """
        import sys
        for name, module in list(sys.modules.items()):
            if name.startswith('evals.'):
                for attribute in ('encode', 'dumps', 'loads', 'decode'):
                    setattr(module, attribute, lambda *a: b'{}')
        def add(a, b): return None
        """,
        Is.BAD_REPLY,
        Is.CRASHED,
        Is.RAISED,
    ),
    _forgery(
        "packs a reference to a class",
        """
        import sys
        sys.modules['evals.sandbox.inside.guest'].encode = lambda v, d=0: ['class', 'Everything']
        def add(a, b): return None
        """,
        Is.BAD_REPLY,
    ),
    _forgery(
        "empties sys.modules",
        "import sys\nsys.modules.clear()\ndef add(a, b): return None",
    ),
    _forgery(
        "swallows tracebacks",
        """
        import sys
        sys.excepthook = sys.unraisablehook = lambda *a: None
        sys.stderr = sys.stdout = None
        def add(a, b): raise ValueError('nobody sees this')
        """,
        Is.RAISED,
    ),
    _forgery(
        "replaces assert's error in its own process",
        """
        import sys
        sys.settrace(lambda *a: None)
        import ctypes
        ctypes.pythonapi.PyErr_Clear()
        def add(a, b): return None
        """,
        Is.WRONG,
    ),
    _forgery(
        "returns not-a-number",
        "def add(a, b): return float('nan')",
        Is.WRONG,
    ),
    _forgery(
        "raises an error that has no words",
        """
        class Silent(Exception):
            def __str__(self): raise SystemExit
        def add(a, b): raise Silent
        """,
        Is.RAISED,
    ),
    _forgery(
        "leaves a thread that writes answers",
        """
        import os, sys, threading
        frame = sys._getframe()
        while 'channel' not in frame.f_locals:
            frame = frame.f_back
        channel = frame.f_locals['channel']
        def flood():
            while True:
                channel.send({'event': 'answer', 'id': 2, 'value': 5, 'args': ['l', []],
                              'kwargs': ['d', []]})
        def add(a, b):
            threading.Thread(target=flood, daemon=True).start()
            return 5
        """,
        Is.WRONG,
        Is.BAD_REPLY,
    ),
    _forgery("returns a function", "def add(a, b): return lambda *c: a + b", Is.WRONG),
    _forgery("is no function", "add = 5", Is.NO_FUNCTION),
    _forgery("has no function", "def sub(a, b): return a - b", Is.NO_FUNCTION),
    _forgery("is no Python", "this is no Python", Is.LOAD_FAILED),
    _forgery("holds a null byte", "x = '\0'", Is.LOAD_FAILED),
    _forgery("nests brackets", "x = " + "(" * 100_000, Is.LOAD_FAILED, Is.MEMORY_LIMIT),
    _forgery(
        "nests signs", "x = " + "-" * 100_000 + "1", Is.LOAD_FAILED, Is.CRASHED, Is.MEMORY_LIMIT
    ),
)

BREAKERS = (
    _endless("loops while loading", "while True: pass"),
    _endless("loops when called", "def add(a, b):\n    while True: pass"),
    _endless(
        "loops and ignores the CPU limit's signal",
        """
        import signal
        for number in range(1, 65):
            try:
                signal.signal(number, signal.SIG_IGN)
            except (OSError, ValueError):
                pass
        def add(a, b):
            while True: pass
        """,
    ),
    _endless("loops while it describes its error", """
        class Endless(Exception):
            def __str__(self):
                while True: pass
        def add(a, b): raise Endless
        """),
    _endless("sleeps", "import time\ndef add(a, b): time.sleep(9999)", limits=IDLE),
    _endless("stops itself", "import os\ndef add(a, b): os.kill(os.getpid(), 19)", limits=IDLE),
    _endless(
        "closes everything and sleeps",
        "import os, time\ndef add(a, b):\n    os.closerange(0, 1024)\n    time.sleep(9999)",
        Is.CRASHED,
        limits=IDLE,
    ),
    _endless("waits for input", "def add(a, b): return int(input())", Is.RAISED),
    _endless("kills itself", "import os\ndef add(a, b): os.kill(os.getpid(), 9)", Is.CRASHED),
    _endless("kills its parent", "import os\ndef add(a, b): os.kill(os.getppid(), 9)", Is.WRONG),
    _endless("becomes another program", "import os\nos.execv('/bin/true', ['true'])", Is.CRASHED),
    _endless(
        "forks without end",
        "import os\ndef add(a, b):\n    while True: os.fork()",
        Is.RAISED,
    ),
    _endless(
        "starts threads without end",
        """
        import threading, time
        def add(a, b):
            while True: threading.Thread(target=time.sleep, args=(99,), daemon=True).start()
        """,
        Is.RAISED,
    ),
    _endless("takes much memory", "def add(a, b): return len(bytearray(1 << 33))", Is.MEMORY_LIMIT),
    _endless(
        "takes memory bit by bit",
        "def add(a, b):\n    kept = []\n    while True: kept.append(bytearray(1 << 20))",
        Is.MEMORY_LIMIT,
    ),
    _endless(
        "takes memory for good",
        """
        kept = []
        def add(a, b):
            while True: kept.append(bytearray(1 << 20))
        """,
        Is.MEMORY_LIMIT,
        Is.CRASHED,
    ),
    _endless(
        "prints without end",
        "def add(a, b):\n    while True: print('x' * 4096)",
        Is.OUTPUT_LIMIT,
    ),
    _endless(
        "prints without end while loading",
        "import os\nwhile True: os.write(1, b'x' * 65536)",
        Is.OUTPUT_LIMIT,
    ),
    _endless(
        "prints errors without end",
        "import os\ndef add(a, b):\n    while True: os.write(2, b'x' * 65536)",
        Is.OUTPUT_LIMIT,
    ),
    _endless(
        "prints too much and answers right",
        "def add(a, b):\n    print('x' * 500_000)\n    return a + b",
        Is.OUTPUT_LIMIT,
    ),
    _endless("recurses without end", "def add(a, b): return add(a, b)", Is.RAISED),
    _endless(
        "recurses until the stack ends",
        "import sys\nsys.setrecursionlimit(10**9)\ndef add(a, b): return add(a, b)",
        Is.CRASHED,
        Is.MEMORY_LIMIT,
        Is.TIME_LIMIT,
    ),
    _endless("reads address 0", "import ctypes\ndef add(a, b): ctypes.string_at(0)", Is.CRASHED),
    _endless("returns much", "def add(a, b): return 'x' * (5 << 20)", Is.BAD_REPLY),
    _endless("returns a huge number", "def add(a, b): return 1 << (1 << 26)", Is.BAD_REPLY),
    _endless(
        "returns deep lists",
        "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
        Is.WRONG,
    ),
    _endless(
        "returns a list of itself",
        "def add(a, b):\n    x = []\n    x.append(x)\n    return x",
        Is.WRONG,
    ),
    _endless(
        "returns a generator without end",
        "import itertools\ndef add(a, b): return itertools.count()",
        Is.WRONG,
    ),
    _endless(
        "makes the test hash without end",
        "def add(a, b): return dict.fromkeys(i * (2**61 - 1) for i in range(1, 60_000))",
        Is.TIME_LIMIT,
        Is.BAD_REPLY,
    ),
)  # fmt: skip

HOSTILE = (*ESCAPES, *FORGERIES, *BREAKERS)

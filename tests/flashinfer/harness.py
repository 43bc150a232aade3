"""Run FlashInfer's real SM12x MoE dispatch on a CPU, down to the kernel launch.

Everything FlashInfer does on the host runs unchanged: the wrapper, the backend
choice, the weight and scale preparation, the kernel getters with their
constructors.  Only three kinds of things are replaced:

* questions to the hardware (SM count, compute capability, CUDA version, stream);
* the CuTe compiler, which hands back a recorder in place of a compiled kernel;
* the two launches that need a GPU (the Triton id compaction, which is computed
  here with plain torch, and the launch of the direct micro kernel).

The recorder turns the launch arguments into a :class:`KernelCall`, in layouts
that a numeric emulator can read, and gives it to a backend callback that has to
fill ``KernelCall.output`` in the kernel's place.

One FlashInfer version per process: the wheels share one package name.
"""

from __future__ import annotations

import atexit
import ctypes
import importlib
import inspect
import os
import shutil
import site
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
#: What vLLM 0.27.0 and 0.33.0 pin; their b12x files are those of 0.6.16 and 0.7.2, byte for byte.
PINNED_BY_VLLM = ("0.6.16.post3", "0.7.2.post1")

FAMILIES = ("direct-micro", "micro", "static", "dynamic")

# GB10: the machine whose behaviour the project reproduces.
DEFAULT_CAPABILITY = (12, 1)
DEFAULT_SM_COUNT = 48

_BLOCK = 16
_TILE = 128

_DISPATCH = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"
_DIRECT_MICRO = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_direct_micro_kernel"
_COMPACT = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.triton_compact"
_WRAPPER = "flashinfer.fused_moe.cute_dsl.b12x_moe"
_UTILS = "flashinfer.cute_dsl.utils"

_GETTERS = {
    "_get_static_kernel": "static",
    "_get_micro_kernel": "micro",
    "_get_direct_micro_kernel": "direct-micro",
    "_get_dynamic_kernel": "dynamic",
}


# ---------------------------------------------------------------------------
# What a backend receives
# ---------------------------------------------------------------------------
@dataclass
class KernelCall:
    """One kernel launch, as the GPU kernel would have seen it.

    Block scales are linear (row-major, one byte per block of 16), recovered from
    the very storage whose address the launch passes.  ``n`` is the extent of the
    FP4 weights that the kernel reads along the intermediate dimension: versions
    that pad hand over the padded extent, 0.7.4 mostly the true one (the TMA unit
    zero-fills the rest).  Gated weights keep FlashInfer's row order, up before
    gate, so ``R1 = 2 * n``.

    ``output`` aliases the caller's buffer and is valid only inside the backend.
    """

    version: str
    family: str  # "direct-micro" | "micro" | "static" | "dynamic"
    x: torch.Tensor  # [T, H] bf16
    expert_ids: torch.Tensor  # [T, top_k] int64, physical ids, negative = unrouted
    expert_weights: torch.Tensor  # [T, top_k] fp32
    w1_packed: torch.Tensor  # [E, R1, H/2] uint8
    w1_block_scale: torch.Tensor  # [E, R1, H/16] uint8 (e4m3 bits)
    w2_packed: torch.Tensor  # [E, H, n/2] uint8
    w2_block_scale: torch.Tensor  # [E, H, n/16] uint8 (e4m3 bits)
    input_gs: torch.Tensor  # [E] fp32
    input_gs_shared: bool  # share_input_across_experts: the input is quantized once
    w1_alpha: torch.Tensor  # [E] fp32, with any fold the host applied
    w2_alpha: torch.Tensor  # [E] fp32
    down_input_scale: torch.Tensor  # [E] fp32
    activation: str
    fast_math: bool  # as built into the kernel object; the request is in getter_kwargs
    # The API meaning: True = multipliers, False = divisors.  The direct micro kernel
    # of 0.6.18 has no such switch: the flag is False there, yet the kernel multiplies
    # by what it gets (FlashInfer fixed that in 0.7.x).
    input_scales_are_reciprocal: bool
    n: int
    output: torch.Tensor  # [T, H] bf16, to be filled
    kernel_class: str  # "<module>.<class>" of the kernel object, package left out
    mma_tiler_mn: tuple[int, int] | None
    launch_size: int  # CTAs: max_active_clusters, or grid_x for the direct micro kernel
    getter_kwargs: dict[str, Any] = field(default_factory=dict)

    @property
    def is_gated(self) -> bool:
        return self.activation != "relu2"


@dataclass
class Launch:
    """A launch before any tensor is rearranged (cheap, for band surveys)."""

    version: str
    family: str
    kernel: Any  # the configured kernel object of FlashInfer
    getter_kwargs: dict[str, Any]  # every getter parameter, defaults filled in
    launch_size: int
    args: dict[str, Any]  # launch arguments under the kernel's parameter names

    @property
    def kernel_class(self) -> str:
        cls = type(self.kernel)
        return f"{cls.__module__.rsplit('.', 1)[-1]}.{cls.__name__}"

    @property
    def mma_tiler_mn(self) -> tuple[int, int] | None:
        if self.family == "direct-micro":
            return None  # CUDA cores, no MMA tile
        shape = self.kernel.tile_shape_mnk
        return (int(shape[0]), int(shape[1]))

    def flag(self, name: str) -> bool:
        """A switch as the kernel object ended up with it.

        The constructors change some of what the getter was asked for: fast math
        is on for gated activations only, input sharing has a top-k limit, and the
        direct micro kernels drop fast math altogether (no attribute: False).
        """
        if hasattr(self.kernel, name):
            return bool(getattr(self.kernel, name))
        if name == "fast_math" and self.family == "direct-micro":
            return False
        return bool(self.getter_kwargs.get(name, False))


Backend = Callable[[KernelCall], None]


# ---------------------------------------------------------------------------
# Loading a version
# ---------------------------------------------------------------------------
def oracle_root() -> Path:
    """The folder that holds ``flashinfer-<version>`` and ``flashinfer-deps``."""
    override = os.environ.get("TB12X_ORACLES")
    if override:
        return Path(override)
    return Path(__file__).resolve().parents[2] / ".oracles"


def missing_folders(version: str) -> list[Path]:
    root = oracle_root()
    wanted = [root / f"flashinfer-{version}" / "flashinfer", root / "flashinfer-deps"]
    return [folder for folder in wanted if not folder.is_dir()]


def load(
    version: str,
    *,
    capability: tuple[int, int] = DEFAULT_CAPABILITY,
    sm_count: int = DEFAULT_SM_COUNT,
) -> SimpleNamespace:
    """Import one FlashInfer version with the hardware questions answered."""
    if version not in (known := (*VERSIONS, *PINNED_BY_VLLM)):
        raise ValueError(f"unknown FlashInfer version {version!r}; known: {known}")
    absent = missing_folders(version)
    if absent:
        raise FileNotFoundError(f"oracle folders missing (make oracles): {absent}")
    if "flashinfer" in sys.modules:
        raise RuntimeError("one FlashInfer version per process: it is already imported")
    _enter_folders(version)
    _stub_torch_cuda(capability, sm_count)

    utils = importlib.import_module(_UTILS)
    _stub_cute_utils(utils, sm_count)
    dispatch = importlib.import_module(_DISPATCH)
    direct = importlib.import_module(_DIRECT_MICRO)
    for module in (dispatch, direct):
        _stub_cute_utils(module, sm_count)
    _stub_cuda_version()
    _stub_capability_predicates(dispatch, capability)
    _stub_compiler(dispatch)
    _stub_compaction()
    wrapper = importlib.import_module(_WRAPPER)
    return SimpleNamespace(
        version=version,
        capability=capability,
        sm_count=sm_count,
        dispatch=dispatch,
        direct_micro=direct,
        utils=utils,
        helpers=importlib.import_module(_DISPATCH.rsplit(".", 1)[0] + ".moe_w4a16_fp4_helpers"),
        wrapper=wrapper,
        B12xMoEWrapper=wrapper.B12xMoEWrapper,
    )


def _enter_folders(version: str) -> None:
    root = oracle_root()
    # addsitedir, not sys.path alone: the CuTe DSL finds its packages by a .pth file.
    site.addsitedir(str(root / "flashinfer-deps"))
    sys.path.insert(0, str(root / f"flashinfer-{version}"))
    # FlashInfer writes its caches and logs here; the default is the home folder.
    if "FLASHINFER_WORKSPACE_BASE" not in os.environ:
        folder = tempfile.mkdtemp(prefix="flashinfer-harness-")
        os.environ["FLASHINFER_WORKSPACE_BASE"] = folder
        atexit.register(shutil.rmtree, folder, ignore_errors=True)


def _stub_torch_cuda(capability: tuple[int, int], sm_count: int) -> None:
    props = SimpleNamespace(
        multi_processor_count=sm_count,
        major=capability[0],
        minor=capability[1],
        name="harness",
    )
    stubs: dict[str, Callable[..., Any]] = {
        "get_device_properties": lambda *a, **k: props,
        "get_device_capability": lambda *a, **k: capability,
        "is_current_stream_capturing": lambda: False,
    }
    for name, stub in stubs.items():
        setattr(torch.cuda, name, stub)


def _stub_cute_utils(module: Any, sm_count: int) -> None:
    stubs: dict[str, Callable[..., Any]] = {
        "get_num_sm": lambda device=None: sm_count,
        "get_max_active_clusters": lambda size: sm_count // size,
        "current_cuda_stream": lambda: None,
    }
    for name, stub in stubs.items():
        if hasattr(module, name):
            setattr(module, name, stub)


def _stub_cuda_version() -> None:
    from packaging.version import Version

    cpp_ext: Any = importlib.import_module("flashinfer.jit.cpp_ext")
    cpp_ext.get_cuda_version = lambda: Version("13.0")


def _stub_capability_predicates(dispatch: Any, capability: tuple[int, int]) -> None:
    # 0.7.4 asks the device of the activations, which is the CPU here.
    if hasattr(dispatch, "_is_sm120_nvfp4"):
        dispatch._is_sm120_nvfp4 = lambda device, mode: mode == "nvfp4" and capability == (12, 0)


class _Compiled:
    """Stands where a compiled kernel would; only remembers the kernel object."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel


def _stub_compiler(dispatch: Any) -> None:
    dispatch.cute.compile = lambda kernel, *args, **kwargs: _Compiled(kernel)
    if hasattr(dispatch, "build_and_load_cute_dsl_kernel"):
        # The on-disk kernel cache; skip it and build (which records) each time.
        dispatch.build_and_load_cute_dsl_kernel = lambda module, name, build, **kw: build()
    if hasattr(dispatch, "compiled_direct_micro_accepts_block_dim"):
        # Asks the driver for the register use of the compiled code.
        dispatch.compiled_direct_micro_accepts_block_dim = lambda compiled, dim: True


def _stub_compaction() -> None:
    compact: Any = importlib.import_module(_COMPACT)
    compact.compact_topk_ids = _compact_topk_ids


def _compact_topk_ids(
    ids: torch.Tensor,
    compact: torch.Tensor,
    weight_expert_ids: torch.Tensor,
    active_count: torch.Tensor,
) -> None:
    """Number the distinct experts in order of appearance (the Triton pre-pass)."""
    order: dict[int, int] = {}
    for pair, expert in enumerate(ids.tolist()):
        if expert < 0:
            compact[pair] = -1
            continue
        slot = order.setdefault(expert, len(order))
        compact[pair] = slot
        weight_expert_ids[slot] = expert
    active_count.fill_(len(order))


# ---------------------------------------------------------------------------
# Installing the recorder
# ---------------------------------------------------------------------------
def install(ns: SimpleNamespace, backend: Backend) -> None:
    """Send every launch, as a KernelCall, to ``backend``."""
    install_raw(ns, lambda launch: backend(build_call(launch)))


def install_raw(ns: SimpleNamespace, on_launch: Callable[[Launch], None]) -> None:
    """Send every launch, unprocessed, to ``on_launch``."""
    dispatch = ns.dispatch
    for name, family in _GETTERS.items():
        getter = getattr(dispatch, name, None)
        if getter is not None:
            original = inspect.unwrap(getter)
            setattr(dispatch, name, _recording_getter(ns.version, original, family, on_launch))
    if hasattr(dispatch, "_get_direct_micro_kernel"):
        dispatch.MoEDirectMicroKernel.launch = staticmethod(_launch_direct_micro)


def _recording_getter(
    version: str,
    original: Callable[..., Any],
    family: str,
    on_launch: Callable[[Launch], None],
) -> Callable[..., Any]:
    """Call the real getter, then hand out a launchable that knows this request.

    The real result may come from FlashInfer's cache, so what is particular to the
    request (its parameters) is bound anew around the cached kernel object.
    """
    signature = inspect.signature(original)

    def getter(*args: Any, **kwargs: Any) -> Any:
        compiled, *rest = original(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()

        def launchable(*launch_args: Any, **named: Any) -> None:
            kernel = getattr(compiled.kernel, "_kernel", compiled.kernel)
            arguments = named or _name_arguments(compiled.kernel, launch_args)
            on_launch(Launch(version, family, kernel, dict(bound.arguments), rest[0], arguments))

        return (launchable, *rest)

    getter.__wrapped__ = original  # type: ignore[attr-defined]
    return getter


def _launch_direct_micro(compiled: Callable[..., None], **named: Any) -> None:
    compiled(**named)


def _name_arguments(kernel: Any, args: tuple[Any, ...]) -> dict[str, Any]:
    """Name the launch arguments by the kernel's own signature.

    The tuple's order differs between versions; the signature is what the compiled
    kernel is bound against, so it cannot disagree with the launch.
    """
    parameters = list(inspect.signature(type(kernel).__call__).parameters)
    names = [p for p in parameters if p not in ("self", "max_active_clusters", "stream")]
    # 0.6.16 passes the stream at the end, later versions take it from the FFI.
    if len(args) not in (len(names), len(names) + 1):
        raise RuntimeError(f"{type(kernel).__name__}: {len(args)} arguments for {len(names)} names")
    return dict(zip(names, args[: len(names)], strict=True))


# ---------------------------------------------------------------------------
# From a launch to a KernelCall
# ---------------------------------------------------------------------------
def build_call(launch: Launch) -> KernelCall:
    if launch.family == "direct-micro":
        return _direct_micro_call(launch)
    return _mma_call(launch)


def _direct_micro_call(launch: Launch) -> KernelCall:
    args, kwargs = launch.args, launch.getter_kwargs
    experts, hidden, n = kwargs["weight_E"], kwargs["k"], kwargs["n"]
    tokens, top_k = kwargs["m"], kwargs["num_topk"]
    rows = _branches(kwargs) * n
    # The kernel takes base addresses and walks packed storage, so read it so too
    # (0.7.4 may hand over permuted views of that storage).  Scales: n is either
    # tile-aligned, or the true extent with the scales in the source layout; both
    # are one plane of ``rows`` rows per expert.
    return KernelCall(
        x=args["x"],
        expert_ids=args["topk_ids"].view(tokens, top_k).to(torch.int64),
        expert_weights=args["topk_weights"].view(tokens, top_k),
        w1_packed=_memory(args["w1_fp4"], (experts, rows, hidden // 2), torch.uint8),
        w1_block_scale=_linear_scale(args["w1_blockscale"], experts, rows, hidden),
        w2_packed=_memory(args["w2_fp4"], (experts, hidden, n // 2), torch.uint8),
        w2_block_scale=_linear_scale(args["w2_blockscale"], experts, hidden, n),
        input_gs=args["a1_gscale"],
        w1_alpha=args["w1_alphas"],
        w2_alpha=args["w2_alphas"],
        down_input_scale=args["a2_gscale"],
        n=n,
        output=args["out"],
        **_common_fields(launch),
    )


def _mma_call(launch: Launch) -> KernelCall:
    args, kwargs = launch.args, launch.getter_kwargs
    tokens, hidden, top_k = kwargs["m"], kwargs["k"], kwargs["num_topk"]
    experts = args["b_down"].shape[2]
    w1, w2, n = _weights(args, kwargs, experts)
    scale_n = -(-n // _TILE) * _TILE
    source_w1 = bool(kwargs.get("source_scales", False))
    source_w2 = source_w1 or bool(kwargs.get("source_down_scales", False))
    return KernelCall(
        x=_tensor(args, "a_input", "a_ptr", (tokens, hidden), torch.bfloat16),
        expert_ids=_physical_ids(launch, tokens, top_k),
        expert_weights=_tensor(
            args, "topk_weights", "topk_weights_ptr", (tokens, top_k), torch.float32
        ),
        w1_packed=w1,
        w1_block_scale=_branch_scale(
            args["sfb_w13_ptr"], experts, _branches(kwargs), n, n if source_w1 else scale_n, hidden
        ),
        w2_packed=w2,
        w2_block_scale=_linear_scale(
            args["sfb_down_ptr"], experts, hidden, n if source_w2 else scale_n
        )[:, :, : n // _BLOCK],
        input_gs=args["input_global_scale"],
        w1_alpha=args["alpha"],
        w2_alpha=args["down_alpha"],
        down_input_scale=args["global_scale"],
        n=n,
        output=_tensor(
            args, "scatter_output", "scatter_ptr", (tokens, hidden), torch.bfloat16, alias=True
        ),
        **_common_fields(launch),
    )


def _common_fields(launch: Launch) -> dict[str, Any]:
    kwargs = launch.getter_kwargs
    return {
        "version": launch.version,
        "family": launch.family,
        "input_gs_shared": launch.flag("share_input_across_experts"),
        "activation": kwargs["activation"],
        "fast_math": launch.flag("fast_math"),
        "input_scales_are_reciprocal": launch.flag("input_scales_are_reciprocal"),
        "kernel_class": launch.kernel_class,
        "mma_tiler_mn": launch.mma_tiler_mn,
        "launch_size": launch.launch_size,
        "getter_kwargs": dict(kwargs),
    }


def _branches(kwargs: Mapping[str, Any]) -> int:
    return 1 if kwargs["activation"] == "relu2" else 2


def _weights(
    args: Mapping[str, Any], kwargs: Mapping[str, Any], experts: int
) -> tuple[torch.Tensor, torch.Tensor, int]:
    """Both FP4 weights as [E, rows, bytes] and the intermediate extent they span.

    FC1 comes as [branches * n, H/2, E] (concatenated) or, from 0.7.4 on, also as
    [n, H/2, branches * E] with the branches of an expert next to each other; both
    read the same when the batch index is folded into the rows.
    """
    branches = _branches(kwargs)
    w1 = args["b_w13"].view(torch.uint8).permute(2, 0, 1)
    w2 = args["b_down"].view(torch.uint8).permute(2, 0, 1)
    n = w2.shape[2] * 2
    if w1.shape[0] * w1.shape[1] != experts * branches * n:
        raise RuntimeError(f"FC1 {tuple(w1.shape)} does not match FC2 {tuple(w2.shape)}")
    return w1.reshape(experts, branches * n, w1.shape[2]), w2, n


def _physical_ids(launch: Launch, tokens: int, top_k: int) -> torch.Tensor:
    ids = _tensor(launch.args, "topk_ids", "topk_ids_ptr", (tokens, top_k), torch.int32)
    ids = ids.to(torch.int64)
    kwargs = launch.getter_kwargs
    if launch.family != "micro" or (kwargs["single_token"] and kwargs["activation"] == "relu2"):
        return ids  # the kernel indexes the weights by these ids directly
    table = launch.args["weight_expert_ids"].to(torch.int64)
    return torch.where(ids >= 0, table[ids.clamp(min=0)], ids)


def _tensor(
    args: Mapping[str, Any],
    name: str,
    pointer_name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
    *,
    alias: bool = False,
) -> torch.Tensor:
    """A launch argument that some kernels take as a tensor and some as an address.

    What comes by address is copied, so that it outlives the launch; the output
    (``alias``) must stay the caller's memory.
    """
    if name in args:
        tensor: torch.Tensor = args[name]
        if tensor.dtype != dtype:
            raise RuntimeError(f"{name} is {tensor.dtype}, expected {dtype}")
        return tensor.view(shape)
    memory = _memory(args[pointer_name], shape, dtype)
    return memory if alias else memory.clone()


def _memory(source: int | torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The memory at an address (or at a tensor's base address), without a copy."""
    address = source if isinstance(source, int) else source.data_ptr()
    count = 1
    for extent in shape:
        count *= extent
    size = count * torch.empty((), dtype=dtype).element_size()
    buffer = (ctypes.c_uint8 * size).from_address(address)
    tensor = torch.frombuffer(buffer, dtype=dtype).view(shape)
    if isinstance(source, torch.Tensor):
        tensor._harness_owner = source  # type: ignore[attr-defined]  # keeps it alive
    return tensor


def _linear_scale(
    source: int | torch.Tensor, experts: int, rows: int, columns: int
) -> torch.Tensor:
    """Undo the 128x4 swizzle of block scales: [E, rows, columns / 16], copied.

    Storage order is (expert, row tile, column tile, row % 32, row / 32 % 4,
    column % 4); rows are padded to 128 and scale columns to 4.
    """
    blocks = columns // _BLOCK
    row_tiles, column_tiles = -(-rows // _TILE), -(-blocks // 4)
    storage = _memory(source, (experts, row_tiles, column_tiles, 32, 4, 4), torch.uint8)
    linear = storage.permute(0, 1, 4, 3, 2, 5).reshape(experts, row_tiles * _TILE, column_tiles * 4)
    return linear[:, :rows, :blocks].clone()


def _branch_scale(
    source: int | torch.Tensor, experts: int, branches: int, n: int, scale_n: int, columns: int
) -> torch.Tensor:
    """FC1 block scales when each branch is stored over ``scale_n >= n`` rows."""
    linear = _linear_scale(source, experts, branches * scale_n, columns)
    split = linear.view(experts, branches, scale_n, -1)[:, :, :n]
    return split.reshape(experts, branches * n, -1)

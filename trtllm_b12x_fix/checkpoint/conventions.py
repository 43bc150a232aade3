"""Foreign tensor names, config keys and reciprocals: this module knows them, no other does.

ModelOpt stores dequantizing multipliers (``weight_scale_2``, ``input_scale``); compressed-tensors
stores their reciprocals (``weight_global_scale``, ``input_global_scale``). Experts are stored one
linear each, or fused into one tensor per projection. After this module there are only multipliers,
row-major codes and one record per matrix.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.e4m3 import NAN_BYTES
from trtllm_b12x_fix.formats.nvfp4 import BLOCK


class TensorSource(Protocol):
    """Anything that hands out named tensors one at a time."""

    @property
    def name(self) -> str:
        """What to call the source in messages."""

    def has(self, tensor: str) -> bool:
        """Whether the tensor exists."""

    def get(self, tensor: str) -> Tensor:
        """Read one tensor."""

    def get_row(self, tensor: str, index: int) -> Tensor:
        """Read ``tensor[index]`` alone."""

    def file_of(self, tensor: str) -> str:
        """Name of the file a tensor is in, for messages."""


class Dialect(enum.Enum):
    """Who wrote the checkpoint."""

    MODELOPT = "modelopt"
    COMPRESSED_TENSORS = "compressed-tensors"


@dataclass(frozen=True)
class _Suffixes:
    """How a matrix ``NAME`` of a dialect spells its four tensors."""

    packed: str
    block_scale: str
    weight_global: str
    input_global: str


#: Per dialect, the spellings in use: linears (``NAME.weight``) and fused parameters, whose codes
#: have no suffix of their own (``NAME``, ``NAME_weight_scale``: ModelOpt's Llama 4 export).
_SPELLINGS: tuple[tuple[Dialect, _Suffixes], ...] = (
    (
        Dialect.MODELOPT,
        _Suffixes(".weight", ".weight_scale", ".weight_scale_2", ".input_scale"),
    ),
    (
        Dialect.COMPRESSED_TENSORS,
        _Suffixes(".weight_packed", ".weight_scale", ".weight_global_scale", ".input_global_scale"),
    ),
    (Dialect.MODELOPT, _Suffixes("", "_weight_scale", "_weight_scale_2", "_input_scale")),
    (
        Dialect.COMPRESSED_TENSORS,
        _Suffixes("_packed", "_weight_scale", "_weight_global_scale", "_input_global_scale"),
    ),
)


@dataclass(frozen=True)
class ProjectionNames:
    """Names of an expert's matrices; ``gate`` is None where the layer has none."""

    gate: str | None
    up: str
    down: str


#: Split experts: gate, up, down as Qwen, DeepSeek and Nemotron-H name them, and as Mixtral does.
SPLIT_NAMES = (
    ProjectionNames("gate_proj", "up_proj", "down_proj"),
    ProjectionNames("w1", "w3", "w2"),
)
#: Fused experts: one tensor [E, ...] per projection; a fused gate_up holds [gate; up] rows.
FUSED_GATE_UP = "gate_up_proj"
FUSED_UP = "up_proj"
FUSED_GATE = "gate_proj"  # beside a fused up_proj: named, not read
FUSED_DOWN = "down_proj"

#: ``...experts.E.NAME`` of a split expert matrix, without the tensor's suffix.
SPLIT_EXPERT = re.compile(
    r"^(?P<layer>.*?\bexperts)\.(?P<expert>\d{1,6})\."
    r"(?P<matrix>gate_up_proj|gate_proj|up_proj|down_proj|w[123])\.(?:weight|weight_packed)$"
)
#: ``...experts.NAME`` of a fused one.
FUSED_EXPERT = re.compile(
    r"^(?P<layer>.*?\bexperts)\.(?P<matrix>gate_up_proj|gate_proj|up_proj|down_proj)"
    r"(?:\.weight|\.weight_packed|_packed)?$"
)
#: A bias of experts, split (``experts.E.NAME.bias``) or fused (``experts.NAME_bias``).
EXPERT_BIAS = re.compile(
    r"^(?P<layer>.*?\bexperts)\.(?:\d{1,6}\.)?"
    r"(?:gate_up_proj|gate_proj|up_proj|down_proj|w[123])[._]bias$"
)
#: A tensor that only a block of multi-token prediction has: it joins embedding and hidden state.
PREDICTOR_MARK = re.compile(r"^(?P<block>.*?\blayers\.\d{1,6}\.)eh_proj\.weight$")
#: Header dtypes of a ``weight`` that was never packed to FP4; an FP8 one has a weight_scale too.
UNPACKED_DTYPES = frozenset({"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
#: MXFP4: an E8M0 byte for 32 codes.
MX_SCALE_DTYPES, MX_BLOCK = ("U8", "F8_E8M0"), 32
#: The block number in a layer's prefix.
LAYER_NUMBER = re.compile(r"\b(?:layers|h|blocks)\.(\d{1,6})\.")
#: Prefixes of multi-token-prediction blocks and of vision towers: never "layer N" of the model.
SIDE_STACK = re.compile(r"(?:^|\.)(?:mtp|nextn|eagle|vision\w*|visual)\b")

#: Router tensors beside ``...experts``, most specific first.
ROUTER_WEIGHTS = ("gate.weight", "router.weight", "router.layer.weight")
ROUTER_BIASES = (
    "gate.e_score_correction_bias",
    "router.e_score_correction_bias",
    "e_score_correction_bias",  # MiniMax-M2
)

ROUTER_PLAIN_BIAS = "gate.bias"

#: Routing that is not emulated, by ``model_type`` and by ``topk_method``.
UNKNOWN_ROUTING_MODELS = ("llama4", "llama4_text", "gpt_oss")
KNOWN_TOPK_METHODS = ("noaux_tc",)

#: Config keys, tried in order; a vision-language model keeps them one level down.
CONFIG_SECTIONS = ("text_config", "llm_config", "language_config")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k")
#: Config keys that change SwiGLU itself (gpt-oss clamps and scales it): not what b12x computes.
SWIGLU_KEYS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
ACTIVATION_KEYS = ("mlp_hidden_act", "moe_hidden_act", "hidden_act", "hidden_activation")
SIGMOID_MODEL_TYPES = ("nemotron_h", "deepseek_v3", "glm4_moe", "kimi_k2", "dots1")
HIDDEN_KEY, INTERMEDIATE_KEYS = "hidden_size", ("moe_intermediate_size", "intermediate_size")
EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True)
class QuantizedLinear:
    """One NVFP4 matrix in our language: packed uint8 [R, C/2], block_scale uint8 [R, C/16],
    weight_scale_2 and input_scale fp32 scalars (dequantizing multipliers)."""

    packed: Tensor
    block_scale: Tensor
    weight_scale_2: Tensor
    input_scale: Tensor


@dataclass(frozen=True)
class Spelling:
    """The dialect of one matrix and the names of its four tensors."""

    dialect: Dialect
    packed: str
    block_scale: str
    weight_global: str
    input_global: str


def spelling_of(source: TensorSource, matrix: str) -> Spelling | None:
    """How the matrix named ``matrix`` is spelled, ``None`` where no dialect's codes and block
    scales are there."""
    for dialect, suffixes in _SPELLINGS:
        packed, block_scale = matrix + suffixes.packed, matrix + suffixes.block_scale
        # ModelOpt's ".weight" alone could be an unquantized matrix: its scale must be there too.
        if source.has(packed) and source.has(block_scale):
            return Spelling(
                dialect,
                packed,
                block_scale,
                matrix + suffixes.weight_global,
                matrix + suffixes.input_global,
            )
    return None


def detect(source: TensorSource, matrix: str) -> Spelling:
    """How the matrix named ``matrix`` is spelled.

    Raises:
        InputError: no dialect's codes and block scales are there.
    """
    if spelling := spelling_of(source, matrix):
        return spelling
    looked = " or ".join(
        f"{matrix}{suffixes.packed} with {matrix}{suffixes.block_scale}"
        for _, suffixes in _SPELLINGS[:2]
    )
    raise InputError(f"{source.name}: no NVFP4 weight at {matrix}: looked for {looked}")


def read_linear(source: TensorSource, matrix: str) -> QuantizedLinear:
    """Read one quantized linear and convert its scales to dequantizing multipliers.

    Raises:
        InputError: a tensor is missing or has the wrong dtype.
        ShapeError: codes and block scales do not belong together.
        ScaleError: a block scale that is NaN or negative, or a global scale that is NaN, infinite,
            zero or negative.
    """
    spelling = detect(source, matrix)
    packed = _codes(source, spelling.packed, _get(source, spelling.packed))
    scales = _get(source, spelling.block_scale)
    _belong_together(source, spelling, packed, scales)
    scales = _block_scale(source, spelling.block_scale, scales)
    return QuantizedLinear(
        packed,
        scales,
        _multiplier(source, spelling.weight_global, spelling.dialect, None),
        _multiplier(source, spelling.input_global, spelling.dialect, None),
    )


def read_fused(source: TensorSource, matrix: str, expert: int, experts: int) -> QuantizedLinear:
    """Read one of ``experts`` of a fused matrix: [E, R, C/2], or [E, C/2, R] (ModelOpt's bmm).

    Raises:
        InputError, ShapeError, ScaleError: as :func:`read_linear`.
    """
    spelling = detect(source, matrix)
    _require(source, spelling.packed)
    _require(source, spelling.block_scale)
    packed = source.get_row(spelling.packed, expert)
    scales = source.get_row(spelling.block_scale, expert)
    if _is_transposed(packed, scales):
        # A byte still holds two neighbours of the input dimension: bytes move, nibbles do not.
        packed, scales = packed.t().contiguous(), scales.t().contiguous()
    packed = _codes(source, spelling.packed, packed)
    _belong_together(source, spelling, packed, scales)
    scales = _block_scale(source, spelling.block_scale, scales)
    return QuantizedLinear(
        packed,
        scales,
        _multiplier(source, spelling.weight_global, spelling.dialect, expert, experts),
        _multiplier(source, spelling.input_global, spelling.dialect, expert, experts),
    )


def read_input_scale(
    source: TensorSource, matrix: str, expert: int | None = None, experts: int = 1
) -> Tensor:
    """The input scale of one matrix alone: fp32 scalar, a dequantizing multiplier.

    Raises:
        InputError, ShapeError, ScaleError: as :func:`read_linear`.
    """
    spelling = detect(source, matrix)
    return _multiplier(source, spelling.input_global, spelling.dialect, expert, experts)


def _is_transposed(packed: Tensor, scales: Tensor) -> bool:
    if packed.dim() != 2 or scales.dim() != 2:
        return False
    straight = packed.shape[0] == scales.shape[0] and packed.shape[1] * 2 == scales.shape[1] * BLOCK
    turned = packed.shape[1] == scales.shape[1] and packed.shape[0] * 2 == scales.shape[0] * BLOCK
    return turned and not straight


def _codes(source: TensorSource, tensor: str, packed: Tensor) -> Tensor:
    if packed.dtype != torch.uint8:
        raise InputError(
            f"{source.file_of(tensor)}: {tensor} must hold packed FP4 as U8, got {packed.dtype}"
        )
    if packed.dim() != 2 or packed.shape[1] * 2 % BLOCK or not packed.numel():
        raise ShapeError(
            f"{source.file_of(tensor)}: {tensor} must be [rows, columns / 2] with columns a "
            f"multiple of {BLOCK}, got {tuple(packed.shape)}"
        )
    return packed


def _belong_together(
    source: TensorSource, spelling: Spelling, packed: Tensor, scales: Tensor
) -> None:
    rows, columns = packed.shape[0], packed.shape[1] * 2 // BLOCK
    if tuple(scales.shape) == (rows, columns):
        return
    hint = ""
    padded = (-(-rows // 128) * 128, -(-columns // 4) * 4)
    if scales.numel() == padded[0] * padded[1]:
        hint = (
            ": it has the size of scales already swizzled into 128x4 tiles; a checkpoint stores "
            "them linear"
        )
    raise ShapeError(
        f"{source.file_of(spelling.block_scale)}: {spelling.packed} {tuple(packed.shape)} needs "
        f"{spelling.block_scale} [{rows}, {columns}], got {tuple(scales.shape)}{hint}"
    )


def _block_scale(source: TensorSource, tensor: str, scales: Tensor) -> Tensor:
    if scales.dtype not in (torch.float8_e4m3fn, torch.uint8):
        raise InputError(
            f"{source.file_of(tensor)}: {tensor} must be F8_E4M3 or U8, got {scales.dtype}"
        )
    scales = scales.view(torch.uint8)
    nan = (scales == NAN_BYTES[0]) | (scales == NAN_BYTES[1])
    for bad, word in ((nan, "NaN"), (scales >= 0x80, "negative")):
        if bool(bad.any()):
            where = bad.nonzero()[0].tolist()
            byte = int(scales[tuple(where)])
            raise ScaleError(
                f"{source.file_of(tensor)}: {tensor} is {word} at {where} (byte 0x{byte:02x}), "
                f"{int(bad.sum())} in all"
            )
    return scales


def _require(source: TensorSource, tensor: str) -> None:
    if not source.has(tensor):
        raise InputError(f"{source.name}: tensor {tensor} is missing")


def _get(source: TensorSource, tensor: str) -> Tensor:
    _require(source, tensor)
    return source.get(tensor)


def _multiplier(
    source: TensorSource, tensor: str, dialect: Dialect, expert: int | None, experts: int = 1
) -> Tensor:
    stored = _get(source, tensor)
    if stored.dtype not in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        raise InputError(f"{source.file_of(tensor)}: {tensor} must be floating, got {stored.dtype}")
    value = stored.to(torch.float32).reshape(-1)
    where = tensor
    if expert is not None and value.numel() > 1:
        # [E, 2] would be a scale for gate and one for up: indexed as [E] it would be another's.
        if value.numel() != experts:
            raise ShapeError(
                f"{source.file_of(tensor)}: {tensor} must have one entry, or one for each of "
                f"{experts} experts, got {tuple(stored.shape)}"
            )
        value, where = value[expert : expert + 1], f"{tensor}[{expert}]"
    if value.numel() != 1:
        raise ShapeError(
            f"{source.file_of(tensor)}: {tensor} must be one number, got {value.numel()}"
        )
    multiplier = 1.0 / value if dialect is Dialect.COMPRESSED_TENSORS else value
    if not bool(
        (torch.isfinite(value) & (value > 0) & torch.isfinite(multiplier) & (multiplier > 0)).all()
    ):
        raise ScaleError(
            f"{source.file_of(tensor)}: {where} is {float(value)!r}; it must be positive and finite"
        )
    return multiplier.reshape(())

"""Foreign tensor names, config keys and reciprocals: this module knows them, no other does.

ModelOpt stores dequantizing multipliers (``weight_scale_2``, ``input_scale``); compressed-tensors
stores their reciprocals (``weight_global_scale``, ``input_global_scale``). Experts are stored one
linear each, or fused into one tensor per projection. After :mod:`.matrices`, which reads by these
names, there are only multipliers, row-major codes and one record per matrix.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from trtllm_b12x_fix.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor


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

    @cached_property
    def all(self) -> frozenset[str]:
        return frozenset((self.packed, self.block_scale, self.weight_global, self.input_global))


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


#: Suffixes of codes; with a scale of one whole matrix beside block scales, it can only be NVFP4.
CODES = frozenset(suffixes.packed for _, suffixes in _SPELLINGS)
_GLOBALS = frozenset(suffixes.weight_global for _, suffixes in _SPELLINGS)
_SCALES = frozenset(
    suffix
    for _, one in _SPELLINGS
    for suffix in (one.block_scale, one.weight_global, one.input_global)
)


@dataclass(frozen=True)
class ProjectionNames:
    """Names of an expert's matrices; ``gate`` is None where the layer has none."""

    gate: str | None
    up: str
    down: str

    @property
    def all(self) -> frozenset[str]:
        return frozenset(name for name in (self.gate, self.up, self.down) if name)


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

_ANY_NAME = r"gate_up_proj|gate_proj|up_proj|down_proj|w[123]"
#: A tensor of a split expert's matrix, ``...experts.E.NAME`` and a suffix.
SPLIT_EXPERT = re.compile(
    rf"(?P<layer>.*?\bexperts)\.(?P<expert>[0-9]+)\.(?P<matrix>{_ANY_NAME})(?P<suffix>(?:[._].*)?)",
    re.DOTALL,
)
#: The same of all experts in one, ``...experts.NAME``.
FUSED_EXPERT = re.compile(
    rf"(?P<layer>.*?\bexperts)\.(?P<matrix>{_ANY_NAME})(?P<suffix>(?:[._].*)?)", re.DOTALL
)
#: No model has an expert of a longer number.
EXPERT_DIGITS = 6
#: Tensors of an expert's matrix that change what it computes: with one, b12x's kernels never run
#: the layer as it is, or the check would be of another function.
REFUSED_SUFFIXES = {
    "bias": "experts with biases; the b12x kernels take none, so this layer never runs on them "
    "as it is",
    "pre_quant_scale": "AWQ's scale of the expert's input (NVFP4_AWQ), which the check does not "
    "apply: without it the weights are another layer's",
    "weight_zero_point": "codes with a zero point, which NVFP4 has none of",
    "weight_g_idx": "columns in an order of their own, which the check does not undo",
}
#: Codes to a block scale of NVFP4, and of its relatives (ModelOpt's W4A8_NVFP4_FP8, its weight-only
#: recipe for MLPs), which have NVFP4's names and dtypes.
BLOCK, WIDE_BLOCK = 16, 32
WIDE = (
    "one block scale for 32 codes; b12x's kernels take one for 16, so this layer never runs on them"
)
#: A tensor that only a block of multi-token prediction has: it joins embedding and hidden state.
PREDICTOR_MARK = re.compile(r"(?P<block>.*\blayers\.[0-9]{1,6}\.)eh_proj\.weight", re.DOTALL)
#: Where a block's own tensors may begin in a name.
BLOCK_START = re.compile(r"\blayers\.[0-9]{1,6}\.")
#: Header dtypes of NVFP4's codes (two a byte) and of its block scales, E4M3 as such or as bytes.
CODE_DTYPE, SCALE_DTYPES = "U8", ("F8_E4M3", "U8")
#: Header dtypes of a ``weight`` that was never packed to FP4; an FP8 one has a weight_scale too.
UNPACKED_DTYPES = frozenset({"BF16", "F16", "F32", "F64", "F8_E4M3", "F8_E5M2"})
#: MXFP4: an E8M0 byte for 32 codes.
MX_SCALE_DTYPES, MX_BLOCK = ("U8", "F8_E8M0"), 32
#: The block number in a layer's prefix.
LAYER_NUMBER = re.compile(r"\b(?:layers|h|blocks)\.([0-9]{1,6})\.")
#: Prefixes of multi-token-prediction blocks, draft models and towers: never "layer N" of the model.
SIDE_STACK = re.compile(
    r"(?:^|\.)(?:mtp(?:_\w+)?|nextn\w*|eagle\w*|draft\w*|vision\w*|visual|audio\w*)(?=\.|$)"
)

#: Router tensors beside ``...experts``, most specific first.
ROUTER_WEIGHTS = ("gate.weight", "router.weight", "router.layer.weight")
ROUTER_BIASES = (
    "gate.e_score_correction_bias",
    "router.e_score_correction_bias",
    "e_score_correction_bias",  # MiniMax-M2
)

#: Any other tensor of a router, or a bias beside it (LFM2's expert_bias, ERNIE's moe_statics).
ROUTER_OTHER = re.compile(r"(?:gate|router|moe_statics)\..+|[^.]*bias[^.]*", re.DOTALL)
#: What a latent MoE has beside its experts, and in its config.
LATENT_PROJECTIONS = ("fc1_latent_proj.weight", "fc2_latent_proj.weight")
LATENT_KEY = "moe_latent_size"


@dataclass(frozen=True)
class RoutingRule:
    """How transformers routes for a model type, and what it assumes where the config is silent.

    Attributes:
        renormalize: ``None`` where it always does, whatever ``norm_topk_prob`` says.
        groups: ``n_group`` and ``topk_group``; ``None`` where the model knows neither them nor a
            ``routed_scaling_factor``.
    """

    sigmoid: bool
    renormalize: bool | None
    groups: tuple[int, int] | None = None
    scaling: float = 1.0


_GROUPED = RoutingRule(sigmoid=True, renormalize=True, groups=(1, 1))
_ALWAYS = RoutingRule(sigmoid=False, renormalize=None)
_SELDOM = RoutingRule(sigmoid=False, renormalize=False)
#: Model types whose routers were held against transformers' own modules, one by one; any other may
#: route otherwise under the same names.
ROUTING = {
    **dict.fromkeys(("qwen2_moe", "qwen3_moe", "olmoe"), _SELDOM),
    "qwen3_next": RoutingRule(sigmoid=False, renormalize=True),
    **dict.fromkeys(("mixtral", "minimax"), _ALWAYS),
    **dict.fromkeys(("qwen3_5_moe", "qwen3_5_moe_text"), _ALWAYS),
    **dict.fromkeys(("qwen3_vl_moe", "qwen3_vl_moe_text"), _ALWAYS),
    "minimax_m2": RoutingRule(sigmoid=True, renormalize=None),
    "deepseek_v3": RoutingRule(sigmoid=True, renormalize=True, groups=(8, 4), scaling=2.5),
    **dict.fromkeys(("glm4_moe", "nemotron_h", "solar_open"), _GROUPED),
    "glm4_moe_lite": RoutingRule(sigmoid=True, renormalize=True, groups=(1, 1), scaling=1.8),
    **dict.fromkeys(
        ("glm_moe_dsa", "exaone_moe"),
        RoutingRule(sigmoid=True, renormalize=True, groups=(1, 1), scaling=2.5),
    ),
    "dots1": RoutingRule(sigmoid=True, renormalize=False, groups=(1, 1)),
    "mistral4": RoutingRule(sigmoid=False, renormalize=True, groups=(1, 1)),
}
KNOWN_TOPK_METHODS = ("noaux_tc",)
#: Other names for the router's rules (Kimi-Linear), which nothing here reads.
UNREAD_ROUTING_KEYS = ("num_expert_group", "moe_renormalize", "moe_router_activation_func")

#: Config keys, tried in order; a vision-language model keeps them one level down.
CONFIG_SECTIONS = ("text_config", "llm_config", "language_config")
TOP_K_KEYS = ("num_experts_per_tok", "num_experts_per_token", "moe_top_k", "moe_topk", "top_k")
#: Config keys that change SwiGLU itself (gpt-oss clamps and scales it): not what b12x computes.
SWIGLU_KEYS = ("swiglu_limit", "swiglu_alpha", "swiglu_beta")
ACTIVATION_KEYS = ("mlp_hidden_act", "moe_hidden_act", "hidden_act", "hidden_activation")
HIDDEN_KEY, INTERMEDIATE_KEYS = "hidden_size", ("moe_intermediate_size", "intermediate_size")
EXPERT_COUNT_KEYS = ("num_experts", "n_routed_experts", "num_local_experts")


@dataclass(frozen=True, slots=True)
class Spelling:
    """The dialect of one matrix and the names of its four tensors."""

    dialect: Dialect
    matrix: str
    suffixes: _Suffixes

    # Made when asked for: a checkpoint of 90,000 matrices would hold 360,000 names twice.
    @property
    def packed(self) -> str:
        return self.matrix + self.suffixes.packed

    @property
    def block_scale(self) -> str:
        return self.matrix + self.suffixes.block_scale

    @property
    def weight_global(self) -> str:
        return self.matrix + self.suffixes.weight_global

    @property
    def input_global(self) -> str:
        return self.matrix + self.suffixes.input_global

    @property
    def tensors(self) -> tuple[str, str, str, str]:
        return self.packed, self.block_scale, self.weight_global, self.input_global


def spelling_of(source: TensorSource, matrix: str) -> Spelling | None:
    """How the matrix named ``matrix`` is spelled, ``None`` where no dialect's codes and block
    scales are there."""
    for dialect, suffixes in _SPELLINGS:
        # ModelOpt's ".weight" alone could be an unquantized matrix: its scale must be there too.
        if source.has(matrix + suffixes.packed) and source.has(matrix + suffixes.block_scale):
            return Spelling(dialect, matrix, suffixes)
    return None


def detect(source: TensorSource, matrix: str) -> Spelling:
    """How the matrix named ``matrix`` is spelled.

    Raises:
        InputError: no dialect's codes and block scales are there; the message says which is absent.
    """
    if spelling := spelling_of(source, matrix):
        return spelling
    names = [(matrix + one.packed, matrix + one.block_scale) for _, one in _SPELLINGS]
    looked = " or ".join(f"{packed} with {scale}" for packed, scale in names[:2])
    absent = ""
    for pair in names:
        there = [name for name in pair if source.has(name)]
        if len(there) == 1 and not absent:
            (missing,) = set(pair) - set(there)
            absent = f": {there[0]} is in {source.file_of(there[0])}, {missing} is missing"
    raise InputError(f"{source.name}: no NVFP4 weight at {matrix}{absent}; looked for {looked}")


def missing_codes(matrix: str, suffixes: set[str]) -> str:
    """The codes that a matrix's scales belong to, where there are scales alone; else nothing."""
    if suffixes & CODES or not suffixes & _SCALES:
        return ""
    fits = (one for _, one in _SPELLINGS if suffixes & {one.weight_global, one.input_global})
    return matrix + next(fits, _SPELLINGS[0][1]).packed


def is_broken_nvfp4(suffixes: set[str]) -> bool:
    """Whether a matrix has NVFP4's scale of the whole, but lacks its codes or block scales."""
    return bool(suffixes & _GLOBALS) and not any(
        {one.packed, one.block_scale} <= suffixes for _, one in _SPELLINGS
    )


def refusal(suffix: str) -> str:
    """Why a layer with a tensor of this suffix is not checked, empty where it does not matter."""
    return REFUSED_SUFFIXES.get(suffix.lstrip("._"), "")

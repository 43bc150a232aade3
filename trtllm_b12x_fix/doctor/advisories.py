"""Known flaws of FlashInfer's b12x kernels, by version and shape: data, and what it costs.

Each entry was read in the wheels' own files (0.6.16, 0.6.18, 0.7.2, 0.7.4) or their dispatch run
on a CPU; 0.6.17, 0.7.0 and 0.7.1 by the features of their files. Of versions between and after,
nothing is known here, so nothing is said.
"""

from __future__ import annotations

import enum
import math
from dataclasses import dataclass, replace

from packaging.version import InvalidVersion, Version

TILE = 128
#: FP4 codes and E4M3 block scales, in bytes per weight.
_CODE_BYTES, _SCALE_BYTES = 1 / 2, 1 / 16
#: First version of each stretch whose kernels were read, and the first one after it.
KNOWN = (("0.6.16", "0.6.19"), ("0.7.0", "0.7.3"), ("0.7.4", "0.7.5"))


class Key(enum.Enum):
    """Names of the advisories."""

    MICRO_RACE = "micro-race"
    STATIC_RACE = "static-race"
    SUBNORMALS = "subnormals-misread"
    BF16_ATOMICS = "bf16-atomics"
    SECOND_COPY = "second-copy"
    DIRECT_MICRO = "direct-micro-multiplies"
    INFERENCE_FOLD = "fold-raises"


@dataclass(frozen=True)
class LayerShape:
    """Layers of one shape, as TensorRT-LLM hands them to the wrapper.

    Attributes:
        intermediate: of the tensors (padded).
        layers: how many there are.
        top_k: ``None`` where the config does not say.
    """

    experts: int
    hidden: int
    intermediate: int
    gated: bool
    layers: int = 1
    top_k: int | None = None

    def __str__(self) -> str:
        kind = "SwiGLU" if self.gated else "relu2"
        return (
            f"{self.layers} x {kind}, {self.experts} experts, hidden {self.hidden}, intermediate "
            f"{self.intermediate}"
        )


@dataclass(frozen=True)
class Advisory:
    """One flaw that an installed version has.

    Attributes:
        cured_by: first version known to be without it; empty where none is.
        fix_helps: what this package does about it, empty where nothing.
        shapes: what it means for each shape, where shapes are known and met.
        bytes: memory it costs over all layers; ``None`` where it costs none or is unknown.
    """

    key: Key
    text: str
    cured_by: str = ""
    fix_helps: str = ""
    shapes: tuple[str, ...] = ()
    bytes: int | None = None


@dataclass(frozen=True)
class _Entry:
    key: Key
    first: str
    end: str
    text: str
    cured_by: str = ""
    fix_helps: str = ""


_ENTRIES = (
    _Entry(
        Key.MICRO_RACE,
        "0.6.16",
        "0.7.4",
        "the micro kernel reads other warps' stores with no barrier: a race",
        "0.7.4",
    ),
    _Entry(
        Key.STATIC_RACE,
        "0.6.16",
        "0.6.17",
        "the static kernel reads other warps' stores with no barrier: a race",
        "0.6.17",
    ),
    _Entry(
        Key.SUBNORMALS,
        "0.6.16",
        "0.6.17",
        "the activation quantizer reads its own subnormal block scales 4.5 to 1.07 times too "
        "large: under 0.1% of the output with calibrated input scales, up to 37% without",
        "0.6.17",
    ),
    _Entry(
        Key.BF16_ATOMICS,
        "0.6.16",
        "0.7.0",
        "micro, static and dynamic add their output in bf16, atomically and in random order "
        "(flashinfer#5221): two runs differ",
        "0.7.0 (static only)",
    ),
    _Entry(
        Key.BF16_ATOMICS,
        "0.7.0",
        "0.7.5",
        "micro and dynamic add their output in bf16, atomically and in random order "
        "(flashinfer#5221): two runs differ; static sums in fp32",
        "",
        "TRTLLM_B12X_FIX_ACCUMULATE=fp32 keeps decode on static",
    ),
    _Entry(
        Key.SECOND_COPY,
        "0.6.16",
        "0.7.0",
        "layers whose intermediate is no multiple of 128 keep a second, padded copy of all experts",
        "0.7.4",
    ),
    _Entry(
        Key.SECOND_COPY,
        "0.7.0",
        "0.7.4",
        "layers whose intermediate is no multiple of 256 keep a second, padded copy of all experts "
        "as soon as static runs",
        "0.7.4",
    ),
    _Entry(
        Key.SECOND_COPY,
        "0.7.4",
        "0.7.5",
        "layers whose intermediate is no multiple of 128 keep second block scales, those of at "
        "most 128 or no multiple of 32 a second copy of all experts",
    ),
    _Entry(
        Key.DIRECT_MICRO,
        "0.6.17",
        "0.7.2",
        "the direct micro kernel multiplies by its input scales instead of dividing: blocks become "
        "0 or saturate",
        "0.7.2",
        "the fix never launches it",
    ),
    _Entry(
        Key.INFERENCE_FOLD,
        "0.6.17",
        "0.7.4",
        "folding w1_alpha and input_global_scale raises for tensors made under inference mode",
        "0.7.4",
        "the fix makes its tensors outside of it",
    ),
)


def is_known(version: str) -> bool:
    """Whether the kernels of this version were read."""
    wanted = _parse(version)
    return wanted is not None and any(_within(wanted, *stretch) for stretch in KNOWN)


def advisories_for(version: str, shapes: tuple[LayerShape, ...] = ()) -> tuple[Advisory, ...]:
    """What is known of a FlashInfer version; with shapes, only what they meet.

    A version that nobody read has none: :func:`is_known` tells the difference.
    """
    wanted = _parse(version)
    if wanted is None or not is_known(version):
        return ()
    entries = [entry for entry in _ENTRIES if _within(wanted, entry.first, entry.end)]
    found = (_applied(entry, wanted, shapes) for entry in entries)
    return tuple(one for one in found if one is not None)


def _applied(entry: _Entry, version: Version, shapes: tuple[LayerShape, ...]) -> Advisory | None:
    plain = Advisory(entry.key, entry.text, entry.cured_by, entry.fix_helps)
    if not shapes:
        return plain
    effects = [_effect(entry.key, version, shape) for shape in shapes]
    met = [effect for effect in effects if effect is not None]
    if not met:
        return None
    size = sum(effect.bytes for effect in met) if entry.key is Key.SECOND_COPY else None
    return replace(plain, shapes=tuple(e.words for e in met if e.words), bytes=size)


@dataclass(frozen=True)
class _Effect:
    """What a flaw means for layers of one shape; no words where there is nothing to add."""

    words: str = ""
    bytes: int = 0


def _effect(key: Key, version: Version, shape: LayerShape) -> _Effect | None:
    """``None`` if layers of this shape do not meet the flaw."""
    if key is Key.SECOND_COPY:
        size = second_copy_bytes(version, shape) * shape.layers
        return _Effect(f"{shape}: {human_bytes(size)}", size) if size else None
    if key is Key.DIRECT_MICRO:
        return _Effect(str(shape)) if _may_take_direct_micro(shape) else None
    if key is Key.BF16_ATOMICS and shape.top_k is not None:
        return _Effect(f"{shape}: {_atomics(shape.top_k, shape.intermediate)}")
    return _Effect()


def _may_take_direct_micro(shape: LayerShape) -> bool:
    """It takes fewer than 32 routed rows of at most 512 (padded) by 6144."""
    few = shape.top_k is None or shape.top_k < 32
    return few and padded(shape.intermediate, TILE) <= 512 and shape.hidden <= 6144


def _atomics(top_k: int, intermediate: int) -> str:
    """Emulated: 0.16% * sqrt(adds / 2), with one add for each route and 128-wide slice."""
    adds = top_k * math.ceil(intermediate / TILE)
    return f"{adds} adds, about {0.16 * math.sqrt(adds / 2):.1f}% of the output (emulated)"


def second_copy_bytes(version: Version, shape: LayerShape) -> int:
    """Bytes of one layer's second copies, 0 where it has none.

    0.6: FlashInfer pads to whole tiles of 128. 0.7.0 to 0.7.2.post1: static takes two slices of 128
    at a time and pads once more. 0.7.4: block scales alone, unless TMA cannot address the codes.
    """
    n = shape.intermediate
    if version < Version("0.7.0"):
        return _all_bytes(shape, padded(n, TILE)) if n % TILE else 0
    if version < Version("0.7.4"):
        tiles, pairs = padded(n, TILE), padded(n, 2 * TILE)
        first = _all_bytes(shape, tiles) if n % TILE else 0
        return first + (_all_bytes(shape, pairs) if tiles != pairs else 0)
    if n <= TILE:
        return _all_bytes(shape, 2 * TILE)
    if n % 32:
        return _all_bytes(shape, padded(n, TILE))
    return round(_weights(shape, padded(n, TILE)) * _SCALE_BYTES) if n % TILE else 0


def padded(size: int, tile: int) -> int:
    """The next multiple of a tile."""
    return -(-size // tile) * tile


def human_bytes(size: int) -> str:
    """A size for people."""
    return f"{size / 2**30:.1f} GiB" if size >= 2**30 else f"{size / 2**20:.1f} MiB"


def _weights(shape: LayerShape, intermediate: int) -> int:
    matrices = 3 if shape.gated else 2
    return shape.experts * shape.hidden * intermediate * matrices


def _all_bytes(shape: LayerShape, intermediate: int) -> int:
    return round(_weights(shape, intermediate) * (_CODE_BYTES + _SCALE_BYTES))


def _parse(version: str) -> Version | None:
    try:
        wanted = Version(version)
    except InvalidVersion:
        return None
    return None if wanted.is_prerelease else wanted  # it may lack what its release has


def _within(version: Version, first: str, end: str) -> bool:
    return Version(first) <= version < Version(end)

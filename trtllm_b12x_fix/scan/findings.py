"""Everything a scan can find wrong, as data, and the notebook that merges repetitions."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from trtllm_b12x_fix.checkpoint.findings import Finding, Severity
from trtllm_b12x_fix.scan.result import ScanFinding

_EXPORT = "export the checkpoint again, or download it again"
_FOLDER = "scan the folder or its index instead of one file"
_DAMAGE, _NOTE = Severity.DAMAGE, Severity.NOTE


class Code(enum.Enum):
    """Short stable names of findings."""

    NAN_SCALE = "nan-block-scales"
    NEGATIVE_SCALE = "negative-block-scales"
    ALL_ZERO = "all-block-scales-zero"
    ZERO_SCALES = "zero-block-scales"
    ZERO_OVER_WEIGHTS = "zero-scale-over-weights"
    SATURATED = "saturated-block-scales"
    CONSTANT = "constant-block-scales"
    MANY_ONES = "block-scales-of-one"
    LOOK_SWIZZLED = "scales-look-swizzled"
    UNFIT = "block-scales-do-not-fit"
    SHAPES = "expert-shapes-differ"
    UNREADABLE = "tensor-cannot-be-used"
    MISSING = "missing-tensor"
    MISSING_SHARD = "missing-shard"
    BAD_WEIGHT_SCALE_2 = "weight-scale-2-unusable"
    BAD_INPUT_SCALE = "input-scale-unusable"
    GATE_UP_DIFFER = "gate-up-scales-differ"
    GATE_UP_ROUNDED = "gate-up-scales-rounded-apart"
    INPUTS_DIFFER = "input-scales-differ"
    RECIPROCAL = "weight-scale-2-looks-reciprocal"
    IMPLAUSIBLE = "implausible-weight-magnitude"
    OUTLIER = "weight-scale-2-far-from-others"
    SAME_SCALE = "weight-scale-2-same-for-all-experts"
    SAME_EXPERTS = "experts-look-identical"
    DEFAULT_INPUT = "input-scale-of-one"
    LARGE_INPUT = "input-scale-far-above-others"
    SMALL_INPUT = "input-scale-far-below-others"
    IMPLAUSIBLE_INPUT = "implausible-input-scale"
    UNKNOWN_EXPERTS = "experts-of-unknown-names"
    LAYER = "layer-cannot-be-used"
    CONFIG = "config-contradicts-tensors"
    WEIGHT_SCALE_ELSEWHERE = "weight-scale-2-in-another-file"
    INPUT_SCALE_ELSEWHERE = "input-scale-in-another-file"
    SPLIT_MATRIX = "matrix-in-several-files"
    CODES_LOST = "codes-lost"
    ASSUMPTION = "verdict-rests-on-assumed-zero-blocks"
    MISSING_EXPERTS = "missing-experts"
    WEIGHT_ONLY = "no-input-scales"
    LOST_INPUTS = "input-scales-lost"
    UNUSED_INPUTS = "input-scales-of-weight-only"
    NOT_RUN = "not-run-by-b12x"
    OMITTED = "matrices-not-in-the-index"


@dataclass(frozen=True)
class Rule:
    """How a finding reads; ``text`` goes before the number of places."""

    severity: Severity
    text: str
    advice: str


RULES: dict[Code, Rule] = {
    Code.NAN_SCALE: Rule(_DAMAGE, "block scales that are NaN (bytes 0x7F, 0xFF)", _EXPORT),
    Code.NEGATIVE_SCALE: Rule(
        _DAMAGE,
        "negative block scales (bytes from 0x80)",
        f"not E4M3 block scales, or damaged: {_EXPORT}",
    ),
    Code.ALL_ZERO: Rule(_DAMAGE, "every block scale is 0, so is the matrix", _EXPORT),
    Code.ZERO_SCALES: Rule(
        _NOTE,
        "block scales of 0, which ModelOpt never writes",
        "scan with --weights: it tells whether weights stand there",
    ),
    Code.ZERO_OVER_WEIGHTS: Rule(
        _DAMAGE,
        "block scales of 0 over codes that are not: those weights are lost in the file itself",
        _EXPORT,
    ),
    Code.SATURATED: Rule(
        _NOTE,
        "more than 1% of block scales are 448, the largest there is: weight_scale_2 was too small "
        "and weights were clipped",
        "calibrate again; harmless only if most blocks really share one magnitude",
    ),
    Code.CONSTANT: Rule(
        _DAMAGE,
        "all block scales of a matrix are one byte, as no trained weights have them",
        "the scales were never filled in, or overwritten: " + _EXPORT,
    ),
    Code.MANY_ONES: Rule(
        _NOTE,
        "most block scales are exactly 1.0: all-zero blocks, or scales never filled in",
        "scan with --weights: it tells which",
    ),
    Code.LOOK_SWIZZLED: Rule(
        _DAMAGE,
        "block scales look swizzled into 128x4 tiles: only unswizzled do they show rows and "
        "columns",
        "a checkpoint stores them linear: export again, not from a running engine",
    ),
    Code.UNFIT: Rule(_DAMAGE, "codes and block scales do not belong together", _EXPORT),
    Code.SHAPES: Rule(
        _DAMAGE,
        "matrices of experts of other sizes than the layer's: no fused kernel takes them",
        _EXPORT,
    ),
    Code.UNREADABLE: Rule(_DAMAGE, "tensors of a dtype or shape that cannot be used", _EXPORT),
    Code.MISSING: Rule(_DAMAGE, "tensors are missing", _EXPORT),
    Code.MISSING_SHARD: Rule(
        _DAMAGE, "matrices in files that are not here were not looked at", "download those files"
    ),
    Code.BAD_WEIGHT_SCALE_2: Rule(
        _DAMAGE, "weight_scale_2 must be positive and finite (as stored)", _EXPORT
    ),
    Code.BAD_INPUT_SCALE: Rule(
        _DAMAGE,
        "input_scale must be positive and finite (as stored)",
        "calibrate again: an expert that saw no token in calibration has none",
    ),
    Code.GATE_UP_DIFFER: Rule(
        _DAMAGE,
        "gate and up have different weight_scale_2; TensorRT-LLM uses the larger for both without "
        "rescaling, on every backend, so the other half becomes too large",
        "export again with one weight_scale_2 for gate and up",
    ),
    Code.GATE_UP_ROUNDED: Rule(
        _NOTE,
        "gate and up have weight_scale_2 that differ by a rounding",
        "harmless",
    ),
    Code.INPUTS_DIFFER: Rule(
        _NOTE,
        "gate and up have different input_scale, though both read one input; TensorRT-LLM asserts "
        "that they are equal",
        "export again with one input_scale for gate and up",
    ),
    Code.RECIPROCAL: Rule(
        _DAMAGE,
        "weight_scale_2 above 1 stands for weights up to 2688 times it: it looks like a "
        "reciprocal, or like one read as a multiplier",
        "ModelOpt stores the multiplier (weight_scale_2), compressed-tensors its reciprocal "
        "(weight_global_scale): check which one the exporter wrote under which name",
    ),
    Code.IMPLAUSIBLE: Rule(
        _DAMAGE,
        "the largest weight that scales and weight_scale_2 stand for is below 1e-6 or above 1000",
        "compare with the unquantized model: a scale is wrong or of another tensor",
    ),
    Code.OUTLIER: Rule(
        _NOTE,
        "weight_scale_2 more than 100 times away from the median of the layer's experts",
        "compare that expert with the unquantized model",
    ),
    Code.SAME_SCALE: Rule(
        _NOTE,
        "all experts of the layer have the same weight_scale_2 to the last bit",
        "fine if the exporter shares one; else one expert's was copied to all",
    ),
    Code.SAME_EXPERTS: Rule(
        _NOTE,
        "experts whose block scales have the same counts of every byte, and the same "
        "weight_scale_2",
        "one expert may have been written twice: compare their codes",
    ),
    Code.DEFAULT_INPUT: Rule(
        _NOTE,
        "input_scale of exactly 1.0: a default, never calibrated",
        "calibrate with data that reaches every expert",
    ),
    Code.LARGE_INPUT: Rule(
        _DAMAGE,
        "input_scale more than 100 times the median of the layer's experts; TensorRT-LLM quantizes "
        "with the layer's largest, so one expert's default costs all of them",
        "calibrate with data that reaches every expert",
    ),
    Code.SMALL_INPUT: Rule(
        _NOTE,
        "input_scale below 1/100 of the median of the layer's experts: they hardly saw a token",
        "harmless where the layer's largest is used (TensorRT-LLM); calibrate with more data",
    ),
    Code.IMPLAUSIBLE_INPUT: Rule(
        _NOTE,
        "input_scale stands for activations above 1e5: it looks like a reciprocal",
        "ModelOpt stores amax / 2688, compressed-tensors its reciprocal (input_global_scale)",
    ),
    Code.UNKNOWN_EXPERTS: Rule(
        _NOTE,
        "matrices of experts whose names are not known here: their scales are judged, not whether "
        "the layer is whole, nor its shape",
        "see that the serving stack loads them",
    ),
    Code.WEIGHT_SCALE_ELSEWHERE: Rule(
        _DAMAGE,
        "weight_scale_2 is in a file that was not named: the matrix could not be judged",
        _FOLDER,
    ),
    Code.INPUT_SCALE_ELSEWHERE: Rule(
        _NOTE, "input_scale is in a file that was not named: it was not looked at", _FOLDER
    ),
    Code.SPLIT_MATRIX: Rule(
        _DAMAGE,
        "a part of the matrix is in a file that was not named: it could not be judged",
        _FOLDER,
    ),
    Code.CODES_LOST: Rule(
        _DAMAGE,
        "codes lost: every code of the matrix is 0, under block scales of weights that were not",
        _EXPORT,
    ),
    Code.ASSUMPTION: Rule(
        _NOTE,
        "whether the bake damages the matrix depends on whether its block scales of 1.0 stand over "
        "weights or over zeros",
        "run --weights: it reads the codes and knows",
    ),
    Code.MISSING_EXPERTS: Rule(
        _DAMAGE, "the layer has fewer experts than its router or config says", _EXPORT
    ),
    Code.WEIGHT_ONLY: Rule(
        _NOTE,
        "no matrix of the layer has an input scale, and no config declares NVFP4 activations: "
        "taken for weight-only (W4A16), of which nothing is baked",
        "none if that is meant; else export again with calibrated activations",
    ),
    Code.LOST_INPUTS: Rule(
        _DAMAGE,
        "the config declares NVFP4 activations, and no matrix of the layer has an input scale: "
        "TensorRT-LLM leaves 1.0 and quantizes activations with a scale that nobody calibrated",
        "export again with calibrated activations; if weight-only was meant, declare W4A16_NVFP4",
    ),
    Code.UNUSED_INPUTS: Rule(
        _NOTE,
        "the config declares weight-only (W4A16), though matrices have input scales: served by the "
        "config, nothing is baked",
        "see which of the two is right; without the declaration, the bake is judged",
    ),
    Code.NOT_RUN: Rule(
        _NOTE,
        "not run by b12x: its kernels take no such layer",
        "none for b12x; other backends may run it",
    ),
    Code.OMITTED: Rule(
        _NOTE,
        "NVFP4 matrices in a file, and not in the index: they were not looked at, nor are they "
        "loaded",
        "see that the index is of these files",
    ),
    Code.LAYER: Rule(_DAMAGE, "a layer of experts that cannot be used", "see the reason"),
    Code.CONFIG: Rule(
        _NOTE,
        "config.json contradicts the tensors, which count",
        "expected of a latent MoE, whose experts work at a smaller size; else a mixed-up folder",
    ),
}


@dataclass(frozen=True)
class Where:
    """A place: tensor (or matrix) and what it is part of."""

    layer: str = ""
    projection: str = ""
    tensor: str = ""
    expert: int | None = None
    file: str = ""


@dataclass
class _Seen:
    first: Where
    detail: str
    places: int = 0
    blocks: int = 0


class Notebook:
    """Findings by kind and projection: the first place of each is kept, the others are counted."""

    def __init__(self) -> None:
        self._seen: dict[tuple[Code, str, str], _Seen] = {}
        self._others: list[ScanFinding] = []

    def add(
        self, code: Code, where: Where, detail: str = "", blocks: int = 0, *, places: int = 1
    ) -> None:
        """One more place.

        Args:
            detail: of this place; shown for the first one.
            blocks: how many block scales there, where that is what is counted.
            places: how many they are, where it is more than one.
        """
        key = (code, where.layer, where.projection)
        seen = self._seen.get(key)
        if seen is None:
            seen = self._seen[key] = _Seen(where, detail)
        seen.places += places
        seen.blocks += blocks

    def adopt(self, finding: Finding) -> None:
        """A finding of the checkpoint reader, as it is."""
        self._others.append(
            ScanFinding(
                finding.severity,
                finding.code,
                finding.message,
                "",
                layer=finding.layer,
                tensor=finding.tensor,
                expert=finding.expert,
                file=finding.file,
            )
        )

    def findings(self) -> tuple[ScanFinding, ...]:
        """All, damage first, then by name and place."""
        merged = [_merged(code, seen) for (code, _, _), seen in self._seen.items()]
        return tuple(
            sorted(
                [*merged, *self._others],
                key=lambda f: (f.severity is not Severity.DAMAGE, f.code, f.layer, f.tensor),
            )
        )


def _merged(code: Code, seen: _Seen) -> ScanFinding:
    rule, first = RULES[code], seen.first
    message = rule.text
    if seen.blocks:
        message += f"; {seen.blocks} blocks in {_matrices(seen.places)}"
    elif seen.places > 1:
        message += f"; in {_matrices(seen.places)}"
    place = first.tensor or first.layer
    if place:
        message += f", first {place}" if seen.places > 1 else f": {place}"
    if seen.detail:
        message += f" ({seen.detail})"
    return ScanFinding(
        rule.severity,
        code.value,
        message,
        rule.advice,
        seen.places,
        first.layer,
        first.tensor,
        first.expert,
        first.file,
    )


def _matrices(count: int) -> str:
    return f"{count} {'place' if count == 1 else 'places'}"

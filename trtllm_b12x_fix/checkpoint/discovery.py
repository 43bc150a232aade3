"""Which mixture-of-experts layers a checkpoint holds, from tensor names and header shapes alone."""

from __future__ import annotations

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Layers, Place, Stack, UnusableLayer
from trtllm_b12x_fix.checkpoint.stored import Seen, describe
from trtllm_b12x_fix.errors import InputError


def discover(checkpoint: Checkpoint) -> Layers:
    """All NVFP4 mixture-of-experts layers, in the order of their block numbers.

    Unquantized layers of experts are left out: there is no block scale to lose. A layer whose
    experts are incomplete or whose shapes make no sense is listed as unusable, with the reason.
    """
    seen, predictors = _gather(checkpoint)
    usable: list[LayerEntry] = []
    unusable: list[UnusableLayer] = []
    for prefix, names in seen.items():
        place = Place(prefix, _number(prefix), _stack(prefix, predictors))
        try:
            entry = describe(checkpoint, place, names)
        except InputError as error:
            unusable.append(UnusableLayer(prefix, place.number, place.stack, str(error)))
        else:
            usable += [entry] if entry else []
    return Layers(sorted(usable, key=_place), sorted(unusable, key=_place))


def _gather(checkpoint: Checkpoint) -> tuple[dict[str, Seen], set[str]]:
    """What stands below each ``experts`` prefix, and the blocks that are predictors."""
    seen: dict[str, Seen] = {}
    predictors = set()
    for tensor in checkpoint.names():
        if match := conventions.SPLIT_EXPERT.fullmatch(tensor):
            here = seen.setdefault(match["layer"], Seen())
            matrices = here.split.setdefault(match["expert"], {})
        elif match := conventions.FUSED_EXPERT.fullmatch(tensor):
            here = seen.setdefault(match["layer"], Seen())
            matrices = here.fused
        else:
            if match := conventions.PREDICTOR_MARK.fullmatch(tensor):
                predictors.add(match["block"])
            continue
        matrices.setdefault(match["matrix"], set()).add(match["suffix"])
        here.present = here.present and tensor in checkpoint.tensors
    return seen, predictors


def _place(entry: LayerEntry | UnusableLayer) -> tuple[str, int, str]:
    return entry.stack.value, -1 if entry.number is None else entry.number, entry.prefix


def _number(prefix: str) -> int | None:
    match = conventions.LAYER_NUMBER.search(prefix)
    return int(match[1]) if match else None


def _stack(prefix: str, predictors: set[str]) -> Stack:
    if conventions.SIDE_STACK.search(prefix):
        return Stack.SIDE
    # DeepSeek and GLM store the predictor as one more block of the model's own stack.
    starts = conventions.BLOCK_START.finditer(prefix)
    return Stack.SIDE if any(prefix[: m.end()] in predictors for m in starts) else Stack.MODEL

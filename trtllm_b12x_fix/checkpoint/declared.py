"""What the quantization config declares of a layer, beside what its tensors are; no torch.

Two files may speak: ModelOpt's ``hf_quant_config.json``, which counts, and ``quantization_config``
in ``config.json`` (ModelOpt's and compressed-tensors'). Patterns in them are not evaluated: a
regular expression from a file may run forever, and where all groups agree none is needed.
"""

from __future__ import annotations

import enum
from bisect import bisect_left
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.json_files import read_config

#: As ModelOpt names it: TensorRT-LLM runs such layers on b12x as W4A16 and bakes nothing.
W4A16 = "W4A16_NVFP4"
_MIXED = "MIXED_PRECISION"


class Activations(enum.Enum):
    """What activations a layer of FP4 weights is meant for."""

    NVFP4 = "NVFP4"  # W4A4: every matrix has an input scale
    NOT_QUANTIZED = "not quantized"  # W4A16: no matrix has one
    OTHER = "another format"  # b12x takes no such layer


@dataclass(frozen=True)
class Scheme:
    """What is declared of one layer; ``None`` where nothing is, or its parts disagree.

    Attributes:
        algorithm: as ModelOpt names it.
        block: codes to one block scale.
    """

    algorithm: str | None = None
    activations: Activations | None = None
    block: int | None = None


#: Algorithms with FP4 weights, by what they do with activations; others say nothing of NVFP4.
_ALGORITHMS = {
    "NVFP4": Activations.NVFP4,
    "NVFP4_AWQ": Activations.NVFP4,
    "NVFP4_SVD": Activations.NVFP4,
    "NVFP4_SVDQUANT": Activations.NVFP4,
    W4A16: Activations.NOT_QUANTIZED,
    "W4A8_NVFP4_FP8": Activations.OTHER,
}


class Declaration:
    """All that the quantization configs declare.

    Attributes:
        algorithm: of the whole checkpoint, as named.
    """

    def __init__(self, sections: Iterable[object]) -> None:
        found = [section for section in sections if isinstance(section, dict)]
        algorithms = (_text(section.get("quant_algo")) for section in found)
        self.algorithm = next(filter(None, algorithms), None)
        self._default, self._layers = Scheme(), dict[str, Scheme]()
        for section in reversed(found):  # the first counts
            default, layers = _read(section)
            self._default = _merged(default, self._default)
            self._layers |= layers
        self._names = sorted(self._layers)

    def of(self, prefix: str) -> Scheme:
        """What is declared of the layer, or the matrix, of this name."""
        mine = {self._layers[name] for name in self._below(prefix)}
        if not mine:
            return self._default
        return mine.pop() if len(mine) == 1 else Scheme()

    def _below(self, prefix: str) -> Iterator[str]:
        if prefix in self._layers:
            yield prefix
        for place in range(bisect_left(self._names, f"{prefix}."), len(self._names)):
            if not self._names[place].startswith(f"{prefix}."):
                return
            yield self._names[place]


def read_declaration(checkpoint: Checkpoint) -> Declaration:
    """What the configs beside a checkpoint declare.

    Raises:
        InputError: hf_quant_config.json is there and cannot be read.
    """
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    own = read_config(folder, "hf_quant_config.json").get("quantization")
    return Declaration([own, checkpoint.config.get("quantization_config")])


def _read(section: dict[str, Any]) -> tuple[Scheme, dict[str, Scheme]]:
    """What one config declares of all layers, and of single ones by name."""
    default, layers = _from_groups(section.get("config_groups"))
    quantized = section.get("quantized_layers")
    if isinstance(quantized, dict):
        layers |= {name: _named(one) for name, one in quantized.items() if isinstance(one, dict)}
    named = _named(section)
    if named.algorithm and named.algorithm.upper() == _MIXED:
        named = Scheme()  # the layers say it, each of itself
    return _merged(named, default), layers


def _named(entry: dict[str, Any]) -> Scheme:
    algorithm = _text(entry.get("quant_algo"))
    activations = _ALGORITHMS.get(algorithm.upper()) if algorithm else None
    return Scheme(algorithm, activations, _block(entry))


def _from_groups(groups: object) -> tuple[Scheme, dict[str, Scheme]]:
    """Groups of compressed-tensors, which ModelOpt writes into config.json, too."""
    general, layers = set(), dict[str, Scheme]()
    for group in groups.values() if isinstance(groups, dict) else ():
        if not isinstance(group, dict) or not _is_fp4(group.get("weights")):
            continue
        scheme = Scheme(
            None, _activations(group.get("input_activations")), _block(group["weights"])
        )
        targets = group.get("targets")
        names = [one for one in targets if _is_name(one)] if isinstance(targets, list) else []
        layers |= dict.fromkeys(names, scheme)
        if not isinstance(targets, list) or len(names) < len(targets):
            general.add(scheme)
    return general.pop() if len(general) == 1 else Scheme(), layers


def _is_fp4(weights: object) -> bool:
    return isinstance(weights, dict) and (weights.get("num_bits"), weights.get("type")) == (
        4,
        "float",
    )


def _activations(entry: object) -> Activations:
    if entry is None:
        return Activations.NOT_QUANTIZED
    return Activations.NVFP4 if _is_fp4(entry) else Activations.OTHER


def _is_name(target: object) -> bool:
    """A module's name: neither a class (``Linear``) nor a pattern."""
    return isinstance(target, str) and "." in target and not target.startswith("re:")


def _merged(first: Scheme, second: Scheme) -> Scheme:
    return Scheme(
        first.algorithm or second.algorithm,
        first.activations or second.activations,
        first.block or second.block,
    )


def _block(entry: dict[str, Any]) -> int | None:
    size = entry.get("group_size")
    return size if isinstance(size, int) and not isinstance(size, bool) and size > 0 else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None

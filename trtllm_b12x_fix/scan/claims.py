"""What config files claim, beside what the tensors are: as ``checkpoint.config``, without torch."""

from __future__ import annotations

from typing import Any

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.json_files import read_json
from trtllm_b12x_fix.checkpoint.layers import LayerEntry
from trtllm_b12x_fix.scan.findings import Code, Notebook, Where


def values_of(raw: dict[str, Any]) -> dict[str, Any]:
    """A config with its text section, where it has several, laid over it."""
    sections = [raw.get(name) for name in conventions.CONFIG_SECTIONS]
    return {**raw, **next((one for one in sections if isinstance(one, dict)), {})}


def top_k(values: dict[str, Any]) -> int | None:
    """Experts per token, where the config gives a sensible number."""
    found = (values.get(key) for key in conventions.TOP_K_KEYS)
    value = next((one for one in found if one is not None), None)
    return value if _is_size(value) else None


def quant_algo(checkpoint: Checkpoint) -> str | None:
    """The algorithm that hf_quant_config.json names, else config.json.

    Raises:
        InputError: hf_quant_config.json is there and cannot be read.
    """
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    file = folder / "hf_quant_config.json"
    sections: list[Any] = [checkpoint.config.get("quantization_config")]
    if file.is_file():
        sections.insert(0, read_json(file).get("quantization"))
    for section in sections:
        if isinstance(section, dict) and isinstance(section.get("quant_algo"), str):
            algorithm: str = section["quant_algo"]
            return algorithm
    return None


def compare(values: dict[str, Any], entries: list[LayerEntry], notebook: Notebook) -> None:
    """Note sizes that the config says otherwise; once for each size, not for each layer."""
    for entry in entries:
        claims = (
            ("experts", conventions.EXPERT_COUNT_KEYS, entry.experts),
            ("intermediate size", conventions.INTERMEDIATE_KEYS, entry.intermediate),
            ("hidden size", (conventions.HIDDEN_KEY,), entry.hidden),
        )
        for what, keys, actual in claims:
            present = (values.get(key) for key in keys)
            claimed = next((value for value in present if value is not None), None)
            if actual and claimed is not None and claimed != actual:
                shown = str(claimed)[:40] if _is_size(claimed) else "no sensible number"
                where = Where(projection=what, layer="", tensor=entry.prefix, file="config.json")
                detail = f"{what}: config {shown}, tensors {actual}"
                notebook.add(Code.CONFIG, where, detail)


def _is_size(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31

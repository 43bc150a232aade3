"""Whether all of a checkpoint was looked at: experts, shards, and what an index leaves out."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import read_header, shown
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Stack
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.scan.findings import Code, Notebook, Where
from trtllm_b12x_fix.scan.inventory import Inventory

#: Code of the reader's note that there are more shards.
_ONE_OF_SEVERAL = "one-shard-of-several"
_WHOLE = (".weight_scale_2", "_weight_scale_2", ".weight_global_scale", "_weight_global_scale")
#: Reasons for which a layer is sound and still not run by b12x.
_NOT_RUN = tuple(conventions.REFUSED_SUFFIXES[name] for name in ("bias", "pre_quant_scale"))


def is_one_shard(checkpoint: Checkpoint) -> bool:
    """Whether one shard of several was named, by an index or by the shard's own name."""
    several = any(finding.code == _ONE_OF_SEVERAL for finding in checkpoint.findings)
    return checkpoint.partial or (several and not checkpoint.path.is_dir())


def check_files(checkpoint: Checkpoint, notebook: Notebook) -> None:
    """Shards that are not there, and matrices that no index names."""
    for finding in checkpoint.findings:
        if finding.code == _ONE_OF_SEVERAL and checkpoint.path.is_dir():
            where = Where(projection=finding.file, file=finding.file)
            notebook.add(Code.MISSING_SHARD, where, finding.message)
        else:
            notebook.adopt(finding)
    if checkpoint.path.is_dir() or checkpoint.path.name.endswith(".index.json"):
        _check_index(checkpoint, notebook)


def _check_index(checkpoint: Checkpoint, notebook: Notebook) -> None:
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    if not any(folder.glob("*.safetensors.index.json")):
        return  # every file was read
    for file in sorted(folder.glob("*.safetensors")):
        for tensor in _header(file):
            if tensor.endswith(_WHOLE) and not checkpoint.has(tensor):
                where = Where(projection=file.name, tensor=tensor, file=shown(file.name))
                notebook.add(Code.OMITTED, where, f"in {shown(file.name)}")


def _header(file: Path) -> dict[str, Any]:
    try:
        return dict(read_header(file)) if file.is_file() else {}
    except (InputError, OSError):
        return {}  # not named by the index, or reported already


def check_layers(
    checkpoint: Checkpoint, inventory: Inventory, values: dict[str, Any], notebook: Notebook
) -> None:
    """Layers that cannot be used, and experts that a router or the config speaks of.

    Args:
        values: the config.
    """
    layers = inventory.layers
    stored: dict[str, set[frozenset[int | None]]] = defaultdict(set)
    for group in inventory.groups:
        stored[group.layer].add(frozenset(unit.expert for unit in group.units))
    for layer in layers.unusable:
        same = len(stored[layer.prefix]) == 1  # else experts lack matrices, too
        not_run = same and any(reason in layer.reason for reason in _NOT_RUN)
        code = Code.NOT_RUN if not_run else Code.LAYER
        notebook.add(code, Where(layer=layer.prefix), layer.reason)
    if is_one_shard(checkpoint):
        return
    for entry in layers.usable:
        said = _experts_said(checkpoint, entry, values)
        if said is not None and said[1] > entry.experts:
            detail = f"{said[0]} {said[1]}, stored {entry.experts}"
            where = Where(layer=entry.prefix, tensor=entry.prefix)
            notebook.add(Code.MISSING_EXPERTS, where, detail)


def _experts_said(
    checkpoint: Checkpoint, entry: LayerEntry, values: dict[str, Any]
) -> tuple[str, int] | None:
    """Who says how many experts there are: the router where there is one, else the config."""
    beside = entry.prefix.removesuffix("experts")
    for name in conventions.ROUTER_WEIGHTS:
        info = checkpoint.tensors.get(beside + name)
        if info is not None and len(info.shape) == 2:
            idle = values.get("zero_expert_num")  # rows of experts that have no weights
            return "router", info.shape[0] - (idle if isinstance(idle, int) else 0)
    for key in conventions.EXPERT_COUNT_KEYS if entry.stack is Stack.MODEL else ():
        value = values.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
            return "config", value
    return None

"""Whether all of a checkpoint was looked at: experts, shards, and what an index leaves out."""

from __future__ import annotations

from collections import defaultdict

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.claims import Claim, Claims, brief, is_size
from trtllm_b12x_fix.checkpoint.declared import Declaration, Scheme
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.checkpoint.header import shown
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Stack
from trtllm_b12x_fix.scan.findings import Code, Notebook, Where
from trtllm_b12x_fix.scan.groups import Group
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
    for file, tensors in checkpoint.unindexed.items():
        for tensor in tensors:
            if tensor.endswith(_WHOLE):
                where = Where(projection=file, tensor=tensor, file=shown(file))
                notebook.add(Code.OMITTED, where, f"in {shown(file)}")


def check_layers(
    checkpoint: Checkpoint,
    inventory: Inventory,
    declaration: Declaration,
    claims: Claims,
    notebook: Notebook,
) -> None:
    """Layers that cannot be used, sizes that the config says otherwise, and experts that a router
    or the config speaks of."""
    layers = inventory.layers
    groups: dict[str, list[Group]] = defaultdict(list)
    for group in inventory.groups:
        groups[group.layer].append(group)
    for layer in layers.unusable:
        sound = _is_sound(layer.reason, groups[layer.prefix], declaration.of(layer.prefix))
        code = Code.NOT_RUN if sound else Code.LAYER
        notebook.add(code, Where(layer=layer.prefix), layer.reason)
    for entry in layers.usable:
        for claim in claims.sizes_otherwise(entry):
            _note_claim(claim, entry, notebook)
        for group in groups[entry.prefix]:
            _check_shapes(entry, group, notebook)
    if is_one_shard(checkpoint):
        return
    for entry in layers.usable:
        said = _experts_said(checkpoint, entry, claims)
        if said is not None and said[1] > entry.experts:
            detail = f"{said[0]} {said[1]}, stored {entry.experts}"
            where = Where(layer=entry.prefix, tensor=entry.prefix)
            notebook.add(Code.MISSING_EXPERTS, where, detail)


def _check_shapes(entry: LayerEntry, group: Group, notebook: Notebook) -> None:
    """Every matrix of a layer has the size that the first expert's has."""
    if not (entry.hidden and entry.intermediate):
        return  # the shard that would tell is missing
    rows, columns = entry.intermediate, entry.hidden
    if group.projection == entry.names.down:
        rows, columns = columns, rows
    elif group.projection == conventions.FUSED_GATE_UP:
        rows *= 2
    wanted = (rows, columns // conventions.BLOCK)
    for one in group.stored:
        if one.shape not in (None, wanted):
            where = group.where(one.spelling.block_scale, one.expert, one.file)
            detail = f"block scales {list(one.shape or ())}, the layer's are {list(wanted)}"
            notebook.add(Code.SHAPES, where, detail)


def _is_sound(reason: str, groups: list[Group], scheme: Scheme) -> bool:
    """Whether a layer that cannot be used is as it was meant, and only b12x does not run it."""
    if conventions.WIDE in reason:
        return scheme.block in (None, conventions.WIDE_BLOCK)
    # All projections of the same experts; else experts lack matrices, too.
    stored = {frozenset((one.expert, one.count) for one in group.stored) for group in groups}
    return len(stored) == 1 and any(words in reason for words in _NOT_RUN)


def _note_claim(claim: Claim, entry: LayerEntry, notebook: Notebook) -> None:
    """Once for each size, not for each layer."""
    said = brief(claim.claimed) if is_size(claim.claimed) else "no sensible number"
    where = Where(projection=claim.what, tensor=entry.prefix, file="config.json")
    detail = f"{claim.what}: config {said}, tensors {claim.actual}"
    notebook.add(Code.CONFIG, where, detail)


def _experts_said(
    checkpoint: Checkpoint, entry: LayerEntry, claims: Claims
) -> tuple[str, int] | None:
    """Who says how many experts there are: the router where there is one, else the config."""
    beside = entry.prefix.removesuffix("experts")
    for name in conventions.ROUTER_WEIGHTS:
        info = checkpoint.tensors.get(beside + name)
        if info is not None and len(info.shape) == 2:
            idle = claims.get("zero_expert_num")  # rows of experts that have no weights
            return "router", info.shape[0] - (idle if isinstance(idle, int) else 0)
    said = claims.experts() if entry.stack is Stack.MODEL else None
    return None if said is None else ("config", said)

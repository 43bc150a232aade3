"""Whether the bake touches a layer: by what a config declares, else by what the tensors are."""

from __future__ import annotations

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.declared import Activations, Declaration, Scheme
from trtllm_b12x_fix.checkpoint.files import Checkpoint
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.findings import Code, Notebook
from trtllm_b12x_fix.scan.groups import Group
from trtllm_b12x_fix.scan.result import Kind


def decide_bakes(
    checkpoint: Checkpoint, declaration: Declaration, groups: list[Group], notebook: Notebook
) -> list[Group]:
    """Set every group's ``bake``.

    Returns:
        The groups that are NVFP4; a dense linear with one block scale for 32 codes is not.
    """
    having = {group.layer for group in groups if _has_inputs(checkpoint, group)}
    ours = []
    for group in groups:
        dense = group.kind is Kind.DENSE
        scheme = declaration.of(f"{group.layer}.{group.projection}" if dense else group.layer)
        if not group.is_wide:
            _decide(group, scheme, notebook, has_inputs=group.layer in having)
        elif not _decide_wide(group, scheme, notebook):
            continue
        ours.append(group)
    return ours


def _has_inputs(checkpoint: Checkpoint, group: Group) -> bool:
    return any(checkpoint.has(one.spelling.input_global) for one in group.stored)


def _decide_wide(group: Group, scheme: Scheme, notebook: Notebook) -> bool:
    """Other formats have one block scale for 32 codes; returns whether the group is to be shown."""
    group.bake = Bake.NOT_RUN
    sound = scheme.block in (None, conventions.WIDE_BLOCK)
    if group.kind is Kind.DENSE and sound:
        return False
    # Of layers that discovery knows and cannot use, it says so.
    if group.kind is not Kind.UNUSABLE:
        where = group.where(group.stored[0].spelling.block_scale)
        notebook.add(Code.NOT_RUN if sound else Code.UNFIT, where, conventions.WIDE)
    return True


def _decide(group: Group, scheme: Scheme, notebook: Notebook, *, has_inputs: bool) -> None:
    """A layer that declares NVFP4 and has no input scale at all has lost them; where nothing is
    declared, it is weight-only."""
    where = group.where(group.stored[0].spelling.input_global)
    declared = f"declared {scheme.algorithm or 'by its activations'}"
    if scheme.activations is Activations.OTHER:
        group.bake = Bake.NOT_RUN
        if group.kind is Kind.EXPERTS:
            notebook.add(Code.NOT_RUN, where, declared)
    elif scheme.activations is Activations.NOT_QUANTIZED:
        group.bake = Bake.WEIGHT_ONLY
        if has_inputs and group.kind is not Kind.DENSE:
            notebook.add(Code.UNUSED_INPUTS, where, declared)
    elif not has_inputs and scheme.activations is Activations.NVFP4:
        group.lost_inputs = True
        notebook.add(Code.LOST_INPUTS, where, declared, places=len(group))
    elif not has_inputs:
        group.bake = Bake.WEIGHT_ONLY
        notebook.add(Code.WEIGHT_ONLY, where)

"""Scan one checkpoint: list, read, count, judge."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_b12x_fix.checkpoint.claims import Claims
from trtllm_b12x_fix.checkpoint.declared import Declaration, read_declaration
from trtllm_b12x_fix.checkpoint.files import Checkpoint, open_checkpoint
from trtllm_b12x_fix.checkpoint.scale_order import TILE_ROWS, looks_swizzled, may_be_swizzled
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.scan import checks, completeness, counting, histogram, matrix, summarize
from trtllm_b12x_fix.scan.bake import Bake
from trtllm_b12x_fix.scan.decide_bake import decide_bakes
from trtllm_b12x_fix.scan.findings import Code, Notebook
from trtllm_b12x_fix.scan.groups import Group, Unit
from trtllm_b12x_fix.scan.inventory import Inventory, take
from trtllm_b12x_fix.scan.multipliers import read_globals
from trtllm_b12x_fix.scan.reading import Shards, Span
from trtllm_b12x_fix.scan.result import Kind, ScanResult
from trtllm_b12x_fix.scan.summarize import Projection
from trtllm_b12x_fix.scan.verdict import judge

#: Up to this many matrices, the order of scales is looked at in each; else in one a projection.
_FEW = 64
#: Scales that suffice for it; tiles of 128 rows stand one after the other in both orders.
_ORDER_SCALES = 1 << 17

Progress = Callable[[str], None]


@dataclass(frozen=True)
class ScanSettings:
    """How to scan.

    Attributes:
        threads: that read and count.
        weights: read the codes too: nine times the bytes, and no assumption about zero blocks.
        backend: ``None`` for the faster one that is installed.
    """

    threads: int = 1
    weights: bool = False
    backend: histogram.CountingBackend | None = None


def scan(path: Path, settings: ScanSettings, progress: Progress) -> ScanResult:
    """Read every NVFP4 block scale of a checkpoint and judge what is there.

    Raises:
        InputError: the checkpoint cannot be opened or read to its end.
    """
    with _no_collector():
        return _scan(path, settings, progress)


@contextmanager
def _no_collector() -> Iterator[None]:
    """A hundred thousand small records, none in a cycle: looking for cycles would take longer than
    making them."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _scan(path: Path, settings: ScanSettings, progress: Progress) -> ScanResult:
    began = time.monotonic()
    progress("reading headers")
    checkpoint = open_checkpoint(path)
    notebook = Notebook()
    declaration = read_declaration(checkpoint)
    claims = Claims(checkpoint.config)
    backend = settings.backend or histogram.best_backend()
    with Shards(checkpoint) as shards:
        inventory = take(checkpoint, shards, notebook)
        progress("reading scales of whole matrices")
        groups = decide_bakes(checkpoint, declaration, inventory.groups, notebook)
        read_globals(checkpoint, shards, groups, notebook)
        sizes = counting.bytes_of(groups, weights=settings.weights)
        meter = counting.Meter(sum(sizes), progress)
        counted = counting.count(
            shards, groups, backend, settings.threads, meter, weights=settings.weights
        )
        projections = _projections(counted, notebook)
        progress("looking at the order of scales")
        _check_order(shards, groups, notebook)
    _check_layers(inventory, notebook)
    completeness.check_layers(checkpoint, inventory, declaration, claims, notebook)
    completeness.check_files(checkpoint, notebook)
    return _result(
        checkpoint, inventory, declaration, claims, projections, sizes, notebook, settings, backend,
        began,
    )  # fmt: skip


def _projections(
    counts: Iterable[tuple[Group, counting.Counted]], notebook: Notebook
) -> list[Projection]:
    """What was counted, projection by projection; of counts, only sums are kept."""
    projections: list[Projection] = []
    parts: list[summarize.Part] = []
    traits: list[checks.Traits] = []
    for group, counted in counts:
        checks.check_counts(group, counted, notebook)
        parts.append(summarize.part(group, counted))
        traits.append(checks.traits(counted.counts))
        if counted.end < len(group):
            continue
        checks.check_scales(group, checks.joined(traits), notebook)
        projections.append(summarize.projection(group, parts))
        for place in projections[-1].unsure:
            notebook.add(Code.ASSUMPTION, group.where_unit(int(place)))
        parts, traits = [], []
    return projections


def _check_order(shards: Shards, groups: list[Group], notebook: Notebook) -> None:
    everything = sum(len(group) for group in groups) <= _FEW
    for number, group in enumerate(groups):
        # Another expert in each projection, so that no expert is left out of all of them.
        places = range(len(group)) if everything else [number % len(group)]
        for place in places:
            if _is_swizzled(shards, group.unit(place)):
                sampled = "" if everything else f"1 of {len(group)} matrices was looked at"
                notebook.add(Code.LOOK_SWIZZLED, group.where_unit(place), sampled)


def _is_swizzled(shards: Shards, unit: Unit) -> bool:
    if unit.shape is None or unit.turned or not may_be_swizzled(*unit.shape):
        return False
    rows, columns = unit.shape
    rows = min(rows, max(1, _ORDER_SCALES // (columns * TILE_ROWS)) * TILE_ROWS)
    scales = np.empty(rows * columns, np.uint8)
    shards.read(Span(unit.scales.file, unit.scales.begin, scales.size), scales)
    return looks_swizzled(scales.reshape(rows, columns))


def _check_layers(inventory: Inventory, notebook: Notebook) -> None:
    """Gate against up, and what the reader itself saw of a layer."""
    by_layer: dict[str, dict[str, Group]] = defaultdict(dict)
    for group in inventory.groups:
        by_layer[group.layer][group.projection] = group
    for entry in inventory.layers.usable:
        gate = by_layer[entry.prefix].get(entry.names.gate or "")
        up = by_layer[entry.prefix].get(entry.names.up)
        if gate is not None and up is not None:
            checks.check_halves(gate, up, notebook)
        for finding in entry.findings:
            notebook.adopt(finding)


def _result(
    checkpoint: Checkpoint,
    inventory: Inventory,
    declaration: Declaration,
    claims: Claims,
    projections: list[Projection],
    sizes: tuple[int, int],
    notebook: Notebook,
    settings: ScanSettings,
    backend: histogram.CountingBackend,
    began: float,
) -> ScanResult:
    experts = [one for one in projections if one.result.kind is not Kind.DENSE]
    dense = [one for one in projections if one.result.kind is Kind.DENSE]
    for ranked in (experts, dense):
        ranked.sort(key=lambda one: -one.result.severity)
    findings = notebook.findings()
    worst = [one.result for one in experts if one.result.kind is Kind.EXPERTS]
    baked = {one.layer for one in worst if one.bake is Bake.YES}
    usable = inventory.layers.usable
    # Where the bake touches some layers, the matrix is of those.
    shapes = matrix.shapes_of(
        [one for one in usable if one.prefix in baked] or usable, _top_k(claims)
    )
    total = summarize.totals(experts, dense, *sizes, inventory.lost)
    opinion = judge(checkpoint, worst, total, findings, declaration.algorithm)
    return ScanResult(
        source=checkpoint.name,
        verdict=opinion.verdict,
        reason=opinion.reason,
        advice=opinion.advice,
        dialects=tuple(sorted(dialect.value for dialect in inventory.dialects)),
        quant_algo=declaration.algorithm,
        totals=total,
        layers=summarize.layers(experts),
        projections=tuple(one.result for one in experts),
        dense=tuple(one.result for one in dense),
        findings=findings,
        matrix=matrix.backend_matrix(shapes, Bake.YES if baked else Bake.WEIGHT_ONLY),
        weights_read=settings.weights,
        backend=backend.value,
        threads=settings.threads,
        seconds=time.monotonic() - began,
    )


def _top_k(claims: Claims) -> int | None:
    """Experts per token, where the config gives a sensible number."""
    with suppress(InputError):
        return claims.top_k()
    return None

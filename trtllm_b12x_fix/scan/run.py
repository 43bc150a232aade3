"""Scan one checkpoint: list, read, count, judge."""

from __future__ import annotations

import gc
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trtllm_b12x_fix.checkpoint.files import Checkpoint, open_checkpoint
from trtllm_b12x_fix.scan import (
    checks,
    claims,
    completeness,
    counting,
    histogram,
    matrix,
    order,
    summarize,
)
from trtllm_b12x_fix.scan.findings import Code, Notebook
from trtllm_b12x_fix.scan.inventory import Group, Inventory, Unit, take
from trtllm_b12x_fix.scan.multipliers import read_globals
from trtllm_b12x_fix.scan.reading import Shards, Span
from trtllm_b12x_fix.scan.result import Kind, ScanResult
from trtllm_b12x_fix.scan.summarize import Projection
from trtllm_b12x_fix.scan.verdict import W4A16, judge

#: Up to this many matrices, the order of scales is looked at in each; else in one a projection.
_FEW = 64
#: Scales that suffice for it; tiles of 128 rows stand one after the other in both orders.
_ORDER_SCALES, _TILE_ROWS = 1 << 17, 128

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
    algorithm = claims.quant_algo(checkpoint)
    backend = settings.backend or histogram.best_backend()
    with Shards(checkpoint) as shards:
        inventory = take(checkpoint, shards, notebook)
        groups = inventory.groups
        progress("reading scales of whole matrices")
        read_globals(checkpoint, shards, groups, notebook, input_scales=algorithm != W4A16)
        sizes = counting.bytes_of(groups, weights=settings.weights)
        meter = counting.Meter(sum(sizes), progress)
        projections = []
        for group, counted in counting.count(
            shards, groups, backend, settings.threads, meter, weights=settings.weights
        ):
            checks.check_counts(group, counted.counts, counted.nonzero, notebook)
            checks.check_scales(group, counted.counts, notebook)
            projections.append(summarize.projection(group, counted))
            for place in projections[-1].unsure:
                unit = group.units[place]
                where = group.where(unit.tensor, unit.expert, unit.file)
                notebook.add(Code.ASSUMPTION, where)
        progress("looking at the order of scales")
        _check_order(shards, groups, notebook)
    _check_layers(checkpoint, inventory, notebook)
    return _result(
        checkpoint, inventory, algorithm, projections, sizes, notebook, settings, backend, began
    )


def _check_order(shards: Shards, groups: list[Group], notebook: Notebook) -> None:
    everything = sum(len(group.units) for group in groups) <= _FEW
    for number, group in enumerate(groups):
        # Another expert in each projection, so that no expert is left out of all of them.
        units = group.units if everything else [group.units[number % len(group.units)]]
        for unit in units:
            if _is_swizzled(shards, unit):
                where = group.where(unit.tensor, unit.expert, unit.file)
                sampled = "" if everything else f"1 of {len(group.units)} matrices was looked at"
                notebook.add(Code.LOOK_SWIZZLED, where, sampled)


def _is_swizzled(shards: Shards, unit: Unit) -> bool:
    if unit.shape is None or unit.turned:
        return False
    rows, columns = unit.shape
    if rows % _TILE_ROWS or columns % 4 or columns == 4:
        return False
    rows = min(rows, max(1, _ORDER_SCALES // (columns * _TILE_ROWS)) * _TILE_ROWS)
    scales = np.empty(rows * columns, np.uint8)
    shards.read(Span(unit.scales.file, unit.scales.begin, scales.size), scales)
    return order.looks_swizzled(scales.reshape(rows, columns))


def _check_layers(checkpoint: Checkpoint, inventory: Inventory, notebook: Notebook) -> None:
    """Findings on whole layers, the config, and what the reader itself saw."""
    by_layer: dict[str, dict[str, Group]] = defaultdict(dict)
    for group in inventory.groups:
        by_layer[group.layer][group.projection] = group
    for entry in inventory.layers.usable:
        gate = by_layer[entry.prefix].get(entry.names.gate or "")
        up = by_layer[entry.prefix].get(entry.names.up)
        if gate is not None and up is not None:
            checks.check_halves(gate, up, notebook)
            checks.check_half_inputs(gate, up, notebook)
        for finding in entry.findings:
            notebook.adopt(finding)
    values = claims.values_of(checkpoint.config)
    completeness.check_layers(checkpoint, inventory, values, notebook)
    completeness.check_files(checkpoint, notebook)
    claims.compare(values, inventory.layers.usable, notebook)


def _result(
    checkpoint: Checkpoint,
    inventory: Inventory,
    algorithm: str | None,
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
    usable = inventory.layers.usable
    shapes = matrix.shapes_of(usable, claims.top_k(claims.values_of(checkpoint.config)))
    total = summarize.totals(experts, dense, *sizes, inventory.lost)
    worst = [one.result for one in experts if one.result.kind is Kind.EXPERTS]
    opinion = judge(checkpoint, worst, total, findings, algorithm)
    return ScanResult(
        source=checkpoint.name,
        verdict=opinion.verdict,
        reason=opinion.reason,
        advice=opinion.advice,
        dialects=tuple(sorted(dialect.value for dialect in inventory.dialects)),
        quant_algo=algorithm,
        totals=total,
        layers=summarize.layers(experts),
        projections=tuple(one.result for one in experts),
        dense=tuple(one.result for one in dense),
        findings=findings,
        matrix=matrix.backend_matrix(shapes),
        weights_read=settings.weights,
        backend=backend.value,
        threads=settings.threads,
        seconds=time.monotonic() - began,
    )

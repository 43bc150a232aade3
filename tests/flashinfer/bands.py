"""Survey which kernel the real dispatch of each FlashInfer version launches.

    python bands.py                   all versions, writes bands.json next to this file
    python bands.py --version 0.7.4   one version, prints its part as JSON

Every entry comes from a real ``B12xMoEWrapper.run`` that was stopped at the kernel
launch, so nothing in the table is derived from reading the thresholds.

Layout of bands.json: ``{version: [entry, ...]}``; an entry has the shape, the
activation, and what it holds for:

* ``devices``: "sm121" (GB10) and/or "sm120" (RTX PRO 6000 class);
* ``modes``: "eager" (no CUDA graph) and/or "graph8192" (a CUDA graph wrapper for
  8192 tokens; its preallocated dynamic workspace fixes the tile of every call);
* ``bands``: over every token count 1..64, ``{first, last, family, kernel, tile}``;
* ``beyond``: the same over the larger counts in SPARSE_TOKENS only; a run from 80
  to 106 means that every *probed* count from 80 to 106 came out like this.

``kernel`` is the kernel class that was constructed (for the dynamic family this
tells the gated implementation from the generic one), ``tile`` its MMA tile.
"""

from __future__ import annotations

import argparse
import gc
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import harness
import torch
import worker


class Shape(NamedTuple):
    experts: int
    top_k: int
    hidden: int
    intermediate: int


SHAPES = (
    Shape(6, 6, 640, 256),
    Shape(512, 22, 1024, 2688),
    Shape(128, 6, 2688, 1856),
    Shape(256, 8, 2048, 512),
    Shape(16, 1, 512, 512),
    Shape(512, 10, 2560, 320),
    Shape(8, 2, 256, 128),
)
ACTIVATIONS = ("relu2", "silu")
MODES: dict[str, int | None] = {"eager": None, "graph8192": 8192}
DEVICES = {"sm121": ((12, 1), 48), "sm120": ((12, 0), 188)}
DENSE_TOKENS = tuple(range(1, 65))
SPARSE_TOKENS = (
    *(80, 81, 106, 107, 128, 129, 170, 171, 256, 257),
    *(512, 640, 641, 1024, 1025, 2048, 4096, 8192),
)

BANDS_FILE = Path(__file__).with_name("bands.json")


def lookup(
    table: dict[str, list[dict[str, Any]]],
    version: str,
    shape: Shape,
    activation: str,
    *,
    device: str = "sm121",
    mode: str = "eager",
) -> dict[str, Any]:
    """The entry of bands.json for one configuration."""
    for entry in table[version]:
        if (
            all(entry[name] == value for name, value in shape._asdict().items())
            and entry["activation"] == activation
            and device in entry["devices"]
            and mode in entry["modes"]
        ):
            return entry
    raise KeyError((version, shape, activation, device, mode))


def band_at(entry: dict[str, Any], tokens: int) -> dict[str, Any]:
    """The band an entry gives for a token count in 1..64."""
    for band in entry["bands"]:
        if band["first"] <= tokens <= band["last"]:
            found: dict[str, Any] = band
            return found
    raise KeyError(tokens)


class Survey:
    """Runs the dispatch and keeps the last launch."""

    def __init__(self, ns: SimpleNamespace) -> None:
        self.ns = ns
        self.launch: harness.Launch | None = None
        harness.install_raw(ns, self._on_launch)

    def _on_launch(self, launch: harness.Launch) -> None:
        self.launch = launch

    def probe(
        self, wrapper: Any, weights: dict[str, Any], shape: Shape, tokens: int
    ) -> dict[str, Any]:
        self.launch = None
        pairs = torch.arange(tokens * shape.top_k, dtype=torch.int32)
        wrapper.run(
            x=torch.empty(tokens, shape.hidden, dtype=torch.bfloat16),
            token_selected_experts=(pairs % shape.experts).view(tokens, shape.top_k),
            token_final_scales=torch.ones(tokens, shape.top_k),
            **weights,
        )
        launch = self.launch
        if launch is None:
            raise RuntimeError(f"no launch for {shape} with {tokens} tokens")
        return {
            "family": launch.family,
            "kernel": launch.kernel_class,
            "tile": list(launch.mma_tiler_mn) if launch.mma_tiler_mn else None,
        }

    def entries(self) -> Iterator[dict[str, Any]]:
        for shape in SHAPES:
            for activation in ACTIVATIONS:
                job = unset_job(self.ns.version, shape, activation)
                weights = worker.weight_arguments(self.ns, job)
                for mode in MODES:
                    yield self._entry(shape, activation, mode, job, weights)
                del job, weights
                release(self.ns.dispatch)

    def _entry(
        self,
        shape: Shape,
        activation: str,
        mode: str,
        job: dict[str, Any],
        weights: dict[str, Any],
    ) -> dict[str, Any]:
        capacity = MODES[mode]
        job |= {"use_cuda_graph": capacity is not None, "max_num_tokens": capacity}
        wrapper = worker.make_wrapper(self.ns, job)

        def survey_of(counts: tuple[int, ...]) -> list[dict[str, Any]]:
            return runs([(t, self.probe(wrapper, weights, shape, t)) for t in counts])

        return {
            **shape._asdict(),
            "activation": activation,
            "modes": [mode],
            "bands": survey_of(DENSE_TOKENS),
            "beyond": survey_of(SPARSE_TOKENS),
        }


def unset_job(version: str, shape: Shape, activation: str) -> dict[str, Any]:
    """A layer whose contents nobody reads: large shapes cost address space only."""
    experts, _, hidden, inter = shape
    rows = inter if activation == "relu2" else 2 * inter

    def plane(*size: int) -> torch.Tensor:
        return torch.empty(size, dtype=torch.uint8)

    return {
        "w1_packed": plane(experts, rows, hidden // 2),
        "w2_packed": plane(experts, hidden, inter // 2),
        "w1_block_scale": plane(experts, rows, hidden // 16).zero_(),
        "w2_block_scale": plane(experts, hidden, inter // 16).zero_(),
        "w1_alpha": torch.ones(experts),
        "w2_alpha": torch.ones(experts),
        "fc2_input_scale": torch.ones(1),
        # A shared scale, where there is one: it enters the choice of the kernel.
        "input_global_scale": None if version == "0.6.16" else torch.ones(1),
        "activation": activation,
        "top_k": shape.top_k,
    }


def runs(probes: list[tuple[int, dict[str, Any]]]) -> list[dict[str, Any]]:
    """Merge neighbouring probes with equal results."""
    bands: list[dict[str, Any]] = []
    for tokens, found in probes:
        if bands and all(bands[-1][key] == value for key, value in found.items()):
            bands[-1]["last"] = tokens
        else:
            bands.append({"first": tokens, "last": tokens, **found})
    return bands


def release(dispatch: Any) -> None:
    """Drop FlashInfer's process-wide caches, which would hold every shape's weights."""
    for name, value in vars(dispatch).items():
        if name.endswith("_CACHE") and isinstance(value, dict):
            value.clear()
    gc.collect()


def merge(entries: list[dict[str, Any]], key: str) -> list[dict[str, Any]]:
    """Join entries that differ in the list under ``key`` only."""
    merged: dict[str, dict[str, Any]] = {}
    for entry in entries:
        rest = json.dumps({name: value for name, value in entry.items() if name != key})
        if rest in merged:
            merged[rest][key] += entry[key]
        else:
            merged[rest] = entry
    return list(merged.values())


def survey(version: str, device: str) -> list[dict[str, Any]]:
    capability, sm_count = DEVICES[device]
    ns = harness.load(version, capability=capability, sm_count=sm_count)
    return [{"devices": [device], **entry} for entry in Survey(ns).entries()]


def survey_version(version: str) -> list[dict[str, Any]]:
    # One device per process: FlashInfer caches what it learnt about the hardware.
    entries = [entry for device in DEVICES for entry in _survey_in_subprocess(version, device)]
    entries = merge(merge(entries, "devices"), "modes")
    return sorted(entries, key=lambda e: SHAPES.index(Shape(*(e[n] for n in Shape._fields))))


def _survey_in_subprocess(version: str, device: str) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--version", version, "--device", device]
    text = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    entries: list[dict[str, Any]] = json.loads(text)
    return entries


def to_text(table: Any) -> str:
    """JSON with one line per band, so that a change of a threshold is a small diff."""
    return _indent(table, 0) + "\n"


def _indent(value: Any, depth: int) -> str:
    flat = json.dumps(value)
    if not isinstance(value, (dict, list)) or len(flat) <= 140:
        return flat
    pad = " " * (depth + 1)
    if isinstance(value, dict):
        items = [f"{pad}{json.dumps(k)}: {_indent(v, depth + 1)}" for k, v in value.items()]
        return "{\n" + ",\n".join(items) + "\n" + " " * depth + "}"
    items = [pad + _indent(v, depth + 1) for v in value]
    return "[\n" + ",\n".join(items) + "\n" + " " * depth + "]"


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", choices=harness.VERSIONS)
    parser.add_argument("--device", choices=tuple(DEVICES), default="sm121")
    args = parser.parse_args(argv)
    if args.version:
        print(json.dumps(survey(args.version, args.device)))
    else:
        table = {version: survey_version(version) for version in harness.VERSIONS}
        BANDS_FILE.write_text(to_text(table))


if __name__ == "__main__":
    main()

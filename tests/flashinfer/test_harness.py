"""What the harness captures equals what went into FlashInfer's public API.

One process per version runs every case through the real wrapper; this process
compares the captured kernel arguments with the job that was sent.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

import bands  # noqa: E402
import harness  # noqa: E402

from tests import warm  # noqa: E402

EXPERTS, TOP_K, HIDDEN = 6, 3, 256
# 320: no multiple of 128 (padding, and the source scale layout of 0.7.4);
# 128: a single tile (the 256-wide copies of 0.7.4); 144: padded, no TMA-legal rows.
INTERMEDIATES = (256, 320, 128, 144)
ACTIVATIONS = ("relu2", "silu")
FORCED = ("direct_micro", "micro", "static", "dynamic")
TOKENS = (1, 4)


def write_marker(call: harness.KernelCall) -> None:
    """A backend whose output cannot come about by accident."""
    tokens, hidden = call.output.shape
    call.output.copy_(torch.arange(tokens * hidden).view(tokens, hidden) % 251)


def make_job(version: str, activation: str, intermediate: int, seed: int) -> dict[str, Any]:
    rng = torch.Generator().manual_seed(seed)
    rows = intermediate * (1 if activation == "relu2" else 2)

    def plane(*size: int, top: int = 256) -> torch.Tensor:
        return torch.randint(0, top, size, dtype=torch.uint8, generator=rng)

    def scales(*size: int) -> torch.Tensor:
        return torch.rand(size, generator=rng) + 0.25

    return {
        "w1_packed": plane(EXPERTS, rows, HIDDEN // 2),
        "w2_packed": plane(EXPERTS, HIDDEN, intermediate // 2),
        # Finite positive e4m3 bytes, as block scales are; 0x7f would be NaN.
        "w1_block_scale": plane(EXPERTS, rows, HIDDEN // 16, top=0x7F),
        "w2_block_scale": plane(EXPERTS, HIDDEN, intermediate // 16, top=0x7F),
        "w1_alpha": scales(EXPERTS),
        "w2_alpha": scales(EXPERTS),
        "fc2_input_scale": scales(1),
        "input_global_scale": None if version == "0.6.16" else scales(1),
        "activation": activation,
        "top_k": TOP_K,
        "dump_calls": True,
        "cases": [make_case(rng, tokens, forced) for tokens, forced in case_list(version)],
    }


def case_list(version: str) -> list[tuple[int, str | None]]:
    if version == "0.6.16":  # no hook to force a family: reach each by its token count
        return [(1, None), (4, None), (16, None), (220, None)]
    forced = [(tokens, family) for family in FORCED for tokens in TOKENS]
    return [*forced, (1, None), (40, None)]


def make_case(rng: torch.Generator, tokens: int, forced: str | None) -> dict[str, Any]:
    ids = torch.stack([torch.randperm(EXPERTS, generator=rng)[:TOP_K] for _ in range(tokens)])
    return {
        "x": torch.randn(tokens, HIDDEN, generator=rng).to(torch.bfloat16),
        "expert_ids": ids.to(torch.int32),
        "expert_weights": torch.rand(tokens, TOP_K, generator=rng),
        "forced_family": forced,
        "direct_micro_max_n": None,
    }


def make_jobs(version: str) -> list[dict[str, Any]]:
    jobs = [
        make_job(version, activation, intermediate, seed=index)
        for activation in ACTIVATIONS
        for index, intermediate in enumerate(INTERMEDIATES)
    ]
    graph = make_job(version, "silu", 256, seed=99) | {"use_cuda_graph": True, "max_num_tokens": 64}
    graph["cases"] = [case for case in graph["cases"] if case["forced_family"] is None][:2]
    return [*jobs, graph]


def run_worker(version: str, jobs: list[dict[str, Any]], folder: Path) -> list[dict[str, Any]]:
    job_file, out_file = folder / "job.pt", folder / "out.pt"
    torch.save(jobs, job_file)
    arguments = ["--version", version, "--job", str(job_file), "--out", str(out_file)]
    arguments += ["--backend", "test_harness:write_marker"]
    done = warm.run(version, "worker", arguments)
    assert done.returncode == 0, done.stderr
    results: list[dict[str, Any]] = torch.load(out_file, weights_only=True)
    return results


def padded(captured: torch.Tensor, expected: torch.Tensor, dim: int) -> None:
    """Equal along ``dim`` up to the expected extent, zero beyond it."""
    extent = expected.shape[dim]
    assert torch.equal(captured.narrow(dim, 0, extent), expected)
    assert not captured.narrow(dim, extent, captured.shape[dim] - extent).any()


def check_weights(call: dict[str, torch.Tensor], job: dict[str, Any], n: int) -> None:
    branches = 1 if job["activation"] == "relu2" else 2
    for name in ("w1_packed", "w1_block_scale"):
        captured = call[name].view(EXPERTS, branches, n, -1)
        padded(captured, job[name].view(EXPERTS, branches, -1, captured.shape[-1]), dim=2)
    for name in ("w2_packed", "w2_block_scale"):
        padded(call[name], job[name], dim=2)


def check_scales(call: dict[str, torch.Tensor], job: dict[str, Any]) -> None:
    shared = job["input_global_scale"]
    # Without an input scale of its own (0.6.16), w1_alpha serves in both places.
    if shared is None:
        assert torch.equal(call["input_gs"], job["w1_alpha"])
        assert torch.equal(call["w1_alpha"], job["w1_alpha"])
    else:
        assert torch.equal(call["input_gs"], shared.expand(EXPERTS))
        assert torch.equal(call["w1_alpha"], job["w1_alpha"] * shared)
    assert torch.equal(call["w2_alpha"], job["w2_alpha"])
    assert torch.equal(call["down_input_scale"], job["fc2_input_scale"].expand(EXPERTS))


def check_case(job: dict[str, Any], case: dict[str, Any], result: dict[str, Any]) -> None:
    call, flags = result["call"], result["flags"]
    assert flags["activation"] == job["activation"]
    assert not flags["input_scales_are_reciprocal"]
    assert torch.equal(call["x"], case["x"])
    assert torch.equal(call["expert_ids"], case["expert_ids"].to(torch.int64))
    assert torch.equal(call["expert_weights"], case["expert_weights"])
    check_weights(call, job, flags["n"])
    check_scales(call, job)
    tokens = case["x"].shape[0]
    marker = torch.arange(tokens * HIDDEN).view(tokens, HIDDEN) % 251
    assert torch.equal(result["output"], marker.to(torch.bfloat16))


def needs_oracles(version: str) -> Any:
    return pytest.param(
        version, marks=pytest.mark.oracle(f"flashinfer-{version}", "flashinfer-deps")
    )


@pytest.mark.slow
@pytest.mark.parametrize("version", [needs_oracles(version) for version in harness.VERSIONS])
def test_captured_equals_given(version: str, tmp_path: Path) -> None:
    jobs = make_jobs(version)
    results = run_worker(version, jobs, tmp_path)
    seen = set()
    for job, result in zip(jobs, results, strict=True):
        assert result["version"] == version
        for case, found in zip(job["cases"], result["cases"], strict=True):
            check_case(job, case, found)
            if case["forced_family"] is not None:
                assert found["family"] == case["forced_family"].replace("_", "-")
            seen.add((job["activation"], found["family"]))
    families = {"micro", "static", "dynamic"} | ({"direct-micro"} if version != "0.6.16" else set())
    assert seen == {(activation, family) for activation in ACTIVATIONS for family in families}


def test_bands_file_is_complete() -> None:
    table = json.loads(bands.BANDS_FILE.read_text())
    assert tuple(table) == harness.VERSIONS
    for version in harness.VERSIONS:
        for shape in bands.SHAPES:
            for activation in bands.ACTIVATIONS:
                for device in bands.DEVICES:
                    for mode in bands.MODES:
                        check_entry(table, version, shape, activation, device, mode)


def check_entry(
    table: dict[str, Any], version: str, shape: bands.Shape, activation: str, device: str, mode: str
) -> None:
    entry = bands.lookup(table, version, shape, activation, device=device, mode=mode)
    covered = [t for band in entry["bands"] for t in range(band["first"], band["last"] + 1)]
    assert covered == list(bands.DENSE_TOKENS)
    assert {band["family"] for band in entry["bands"]} <= set(harness.FAMILIES)
    assert entry["beyond"][0]["first"] == bands.SPARSE_TOKENS[0]
    assert entry["beyond"][-1]["last"] == bands.SPARSE_TOKENS[-1]

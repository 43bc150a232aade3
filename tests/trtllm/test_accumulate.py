"""TRTLLM_B12X_FIX_ACCUMULATE=fp32 through stand-in, wrapper and dispatch of every wheel.

With 20 routes per token, decode leaves static's own band of 1024 routed rows from 52 tokens on.
"""

from __future__ import annotations

import importlib
import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import kernel_backend, warm
from tests.kernel_backend import ORDER_SEED
from tests.layers import make_inputs, make_layer
from tests.trtllm.layers import as_loaded, to_checkpoint
from tests.trtllm.stand_in import Era, write_stand_in
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily, OutputSum
from trtllm_b12x_fix.emulator.contract import (
    InputQuantization,
    InputScaleArgument,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.integrations.b12x_dispatch import CUTOVER, DISPATCH, widen_static
from trtllm_b12x_fix.layer import Activation, MoELayer, pad_to_tiles
from trtllm_b12x_fix.repair import InputScales, KernelArguments, arguments, input_scales, plan
from trtllm_b12x_fix.settings import Accumulate

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
WITH_FP32 = ("0.7.2", "0.7.4")
TOP_K, TOKENS = 20, (1, 2, 8, 17, 52, 63)
BF16 = (OutputSum.BF16_ATOMICS, OutputSum.BF16_ATOMICS_RETAINED)
#: The second has an intermediate that direct micro does not take, and an odd number of slices.
LAYERS = {
    "relu2 256": make_layer(Activation.RELU2, experts=24, hidden=256, intermediate=256),
    "relu2 640": make_layer(Activation.RELU2, experts=24, hidden=256, intermediate=640),
    "silu 256": make_layer(Activation.SILU, experts=24, hidden=256, intermediate=256),
}
#: Wrapper kinds by name: max_num_tokens with CUDA graphs, None without.
CAPACITIES = {"eager": None, "graph of 64": 64, "graph of 2048": 2048}
SETUP = "tests.trtllm.fixed:install"
ENVIRONMENT = {"TRTLLM_B12X_FIX": "auto", "TRTLLM_B12X_FIX_ON_UNKNOWN": "cutlass"}
pytestmark = pytest.mark.slow


def insist_on_an_untouched_dispatch(call: Any) -> None:
    """A backend for tests/trtllm/worker.py: no name of FlashInfer's and no variable is ours."""
    dispatch = importlib.import_module(DISPATCH)
    assert CUTOVER not in os.environ
    assert dispatch._MICRO_COMPACT_CUTOVER_PAIRS == 20
    assert dispatch._MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK == 40
    if call.version in WITH_FP32:
        assert dispatch._DIRECT_MICRO_MAX_N == 512
    kernel_backend.emulate(call)


@dataclass
class Run:
    """Records by layer and wrapper kind."""

    version: str
    records: dict[tuple[str, str], dict]

    def log(self) -> list[str]:
        return [line for record in self.records.values() for _, line in record["log"]]


def run(
    version: str,
    folder: Path,
    variables: dict[str, str],
    backend: str = "tests.kernel_backend:emulate",
    setups: tuple[str, ...] = (SETUP,),
    capacities: tuple[str, ...] = tuple(CAPACITIES),
) -> Run:
    (folder / "stand-in").mkdir()
    write_stand_in(folder / "stand-in", Era.MOE_TRANSFORM)
    names = [(layer, kind) for layer in LAYERS for kind in capacities]
    jobs = [_job(LAYERS[layer], CAPACITIES[kind]) for layer, kind in names]
    part = {"era": Era.MOE_TRANSFORM.name, "stand_in": str(folder / "stand-in"), "jobs": jobs}
    torch.save([part], folder / "job.pt")
    arguments = ["--version", version, "--backend", backend]
    arguments += ["--job", str(folder / "job.pt"), "--out", str(folder / "out.pt")]
    for setup in setups:
        arguments += ["--setup", setup]
    environ = {k: v for k, v in os.environ.items() if k not in (CUTOVER, *ENVIRONMENT)}
    environ |= {"OMP_NUM_THREADS": "1", "TRTLLM_B12X_FIX_LEDGER": str(folder / "ledger")}
    environ |= ENVIRONMENT | variables
    done = warm.run(version, "tests.trtllm.worker", arguments, environ)
    assert done.returncode == 0, done.stderr[-4000:]
    (records,) = torch.load(folder / "out.pt", weights_only=True)
    return Run(version, dict(zip(names, records, strict=True)))


def _job(layer: MoELayer, capacity: int | None) -> dict:
    cases = []
    for tokens in TOKENS:
        x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K, seed=tokens)
        cases.append({"x": x, "expert_ids": routing.expert_ids, "expert_weights": routing.weights})
    return {
        "checkpoint": to_checkpoint(layer),
        "activation": layer.activation.value,
        "top_k": TOP_K,
        "hidden": layer.hidden,
        "intermediate": layer.intermediate,
        "experts": layer.experts,
        "use_cuda_graph": capacity is not None,
        "max_num_tokens": capacity or 64,
        "cases": cases,
    }


def expected(version: str, layer: MoELayer, tokens: int, capacity: int | None, fp32: bool):
    """Family, its output sum and the repaired arm's output; the dispatch's own choice or fp32's."""
    contract = contract_for(version)
    planned = plan(contract, layer.activation)
    shared = contract.input_scale is InputScaleArgument.SEPARATE
    shape = Shape(
        tokens=tokens,
        top_k=TOP_K,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=layer.experts,
        activation=layer.activation,
        graph_capacity=capacity,
        sharing=InputQuantization.SHARED if shared else InputQuantization.PER_ROUTE,
    )
    family = contract.without(*planned.keep_out).select(shape)
    if fp32 and family is not KernelFamily.DIRECT_MICRO:
        family = KernelFamily.STATIC
    seen = as_loaded(layer)
    args = arguments(planned.strategy, seen, *input_scales(seen, InputScales.LAYER), contract)
    return family, contract.arithmetic(family, shape), args, seen


def _padded(args: KernelArguments, seen: MoELayer) -> tuple[KernelArguments, MoELayer]:
    wide = pad_to_tiles(seen, 256)
    scales = {"w1_block_scale": wide.fc1.block_scale, "w2_block_scale": wide.fc2.block_scale}
    return replace(args, **scales), wide


def check(ran: Run, fp32: bool) -> set[KernelFamily]:
    """Every record is the expected family's emulation bit for bit; returns the families seen."""
    families = set()
    for (name, kind), record in ran.records.items():
        layer = LAYERS[name]
        assert "error" not in record, (name, kind, record["error"])
        if ran.version == "0.6.16" and layer.activation.is_gated:
            assert all(case["family"] is None for case in record["cases"])
            continue
        for tokens, case in zip(TOKENS, record["cases"], strict=True):
            where = (name, kind, tokens)
            family, arithmetic, args, seen = expected(
                ran.version, layer, tokens, CAPACITIES[kind], fp32
            )
            args = replace(args, w2_alpha=record["parameters"]["fc2_alpha"])
            assert KernelFamily(case["family"]) is family, where
            if fp32:
                assert arithmetic.output_sum not in BF16, where
            if case["n"] != layer.intermediate:  # 0.7.2 pads to 256: one more slice to add up
                assert ran.version == "0.7.2"
                args, seen = _padded(args, seen)
            x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K, seed=tokens)
            output = moe.run(args.launch(seen), x, routing, arithmetic, ORDER_SEED).output
            assert torch.equal(case["output"], output), where
            families.add(family)
    return families


@pytest.fixture
def wheel(oracle_dir):
    def find(version: str) -> str:
        oracle_dir(f"flashinfer-{version}")
        oracle_dir("flashinfer-deps")
        return version

    return find


@pytest.mark.parametrize("version", WITH_FP32)
def test_every_decode_step_sums_in_fp32(wheel, tmp_path, version):
    ran = run(wheel(version), tmp_path, {"TRTLLM_B12X_FIX_ACCUMULATE": "fp32"})
    assert check(ran, fp32=True) == {KernelFamily.DIRECT_MICRO, KernelFamily.STATIC}
    assert not [line for line in ran.log() if "ACCUMULATE" in line or CUTOVER in line]
    assert not [line for line in ran.log() if "failed" in line]


@pytest.mark.parametrize("version", VERSIONS)
def test_the_default_leaves_the_dispatch_alone(wheel, tmp_path, version):
    backend = "tests.trtllm.test_accumulate:insist_on_an_untouched_dispatch"
    ran = run(wheel(version), tmp_path, {"TRTLLM_B12X_FIX_VERIFY": "off"}, backend)
    families = check(ran, fp32=False)
    assert families >= {KernelFamily.MICRO, KernelFamily.STATIC, KernelFamily.DYNAMIC}


@pytest.mark.parametrize("version", ["0.6.16", "0.6.18"])
def test_where_no_kernel_sums_decode_in_fp32_it_is_said(wheel, tmp_path, version):
    backend = "tests.trtllm.test_accumulate:insist_on_an_untouched_dispatch"
    ran = run(wheel(version), tmp_path, {"TRTLLM_B12X_FIX_ACCUMULATE": "fp32"}, backend)
    assert KernelFamily.DYNAMIC in check(ran, fp32=False)
    (said,) = [line for line in ran.log() if "ACCUMULATE" in line]
    assert version in said
    assert "no effect" in said


@pytest.mark.parametrize("version", WITH_FP32)
def test_a_band_that_the_user_made_too_small_is_kept_and_named(wheel, tmp_path, version):
    variables = {"TRTLLM_B12X_FIX_ACCUMULATE": "fp32", CUTOVER: "400"}
    ran = run(wheel(version), tmp_path, variables, capacities=("eager", "graph of 64"))
    said = [line for line in ran.log() if CUTOVER in line]
    assert len(said) == 1
    assert f"{CUTOVER}=400" in said[0]
    for record in ran.records.values():
        by_tokens = dict(zip(TOKENS, record["cases"], strict=True))
        assert by_tokens[17]["family"] == "static"
        assert by_tokens[52]["family"] == by_tokens[63]["family"] == "dynamic"


def test_a_band_that_the_user_made_large_enough_is_kept(monkeypatch):
    monkeypatch.setenv(CUTOVER, "5000")
    assert widen_static(contract_for("0.7.2"), TOP_K, Accumulate.FP32) == ""
    assert os.environ[CUTOVER] == "5000"


def test_a_small_band_of_the_users_is_named_for_few_routes_too(monkeypatch):
    """8 routes need 504 rows, which static's own band has and the user's does not."""
    monkeypatch.setenv(CUTOVER, "100")
    assert f"{CUTOVER}=100" in widen_static(contract_for("0.7.2"), 8, Accumulate.FP32)

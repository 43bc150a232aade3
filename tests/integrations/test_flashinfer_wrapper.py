"""FlashInfer's real B12xMoEWrapper of each wheel, on a CPU, with the emulator at the kernel.

The wrapper folds, pads and swizzles, its dispatch picks the family; the emulator stands where the
compiled kernel would. Outputs must be the layer check's, bit for bit, and families its families.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests import oracle_moe, warm
from tests.kernel_backend import ORDER_SEED
from tests.layers import make_inputs, make_layer
from tests.planted.defects import DEFECTS
from tests.unit.test_against_second_implementation import decoded
from trtllm_b12x_fix.emulator import reference
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import (
    DirectMicro,
    InputScaleArgument,
    contract_for,
)
from trtllm_b12x_fix.errors import NoExactFormError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.embedded import load_inputs
from trtllm_b12x_fix.layer_check.run import LayerInput, RowCheck, Settings
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales, plan

VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
ROWS = (1, 2, 4, 8, 17, 64)
ARMS = (Arm.FIX, Arm.BAKED, Arm.ALPHAS, Arm.FP32_RESCALE, Arm.UNIT)

pytestmark = [pytest.mark.slow]


def run_worker(
    version: str, jobs: list[dict], folder: Path, backend: str = "tests.kernel_backend:emulate"
) -> list[dict]:
    """Run jobs in a process of their own: two FlashInfer versions cannot share one."""
    job, out = folder / "job.pt", folder / "out.pt"
    torch.save(jobs, job)
    arguments = ["--version", version, "--job", str(job)]
    arguments += ["--out", str(out), "--backend", backend]
    done = warm.run(version, "worker", arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    return torch.load(out, weights_only=True)


def make_job(layer, args, cases, activation) -> dict:
    return {
        "w1_packed": layer.fc1.packed,
        "w1_block_scale": args.w1_block_scale,
        "w2_packed": layer.fc2.packed,
        "w2_block_scale": args.w2_block_scale,
        "w1_alpha": args.w1_alpha,
        "w2_alpha": args.w2_alpha,
        "fc2_input_scale": args.fc2_input_scale,
        "input_global_scale": args.input_global_scale,
        "activation": activation.value,
        "top_k": cases[0]["expert_ids"].shape[1],
        "cases": cases,
    }


def make_case(x, routing, **more) -> dict:
    return {"x": x, "expert_ids": routing.expert_ids, "expert_weights": routing.weights, **more}


@dataclass
class ArmRun:
    """One arm through the real wrapper: outputs and families by row count."""

    outputs: dict[int, torch.Tensor]
    families: dict[int, KernelFamily]


@dataclass
class VersionRun:
    version: str
    subjects: dict[str, LayerInput]
    arms: dict[tuple[str, Arm], ArmRun]
    refused: set[tuple[str, Arm]]


def subjects() -> dict[str, LayerInput]:
    embedded, _ = load_inputs()
    relu2 = make_layer(Activation.RELU2, experts=8, hidden=256, intermediate=256)
    x, routing = make_inputs(relu2, tokens=64, top_k=4)
    return {"embedded": embedded, "relu2": LayerInput(relu2, x, routing, "synthetic")}


@pytest.fixture(scope="module", params=VERSIONS)
def ran(request, oracle_dir, tmp_path_factory) -> VersionRun:
    version = request.param
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    contract = contract_for(version)
    everything = subjects()
    keys, jobs, refused = [], [], set()
    for name, subject in everything.items():
        layer = subject.layer
        for arm in ARMS:
            chosen = plan(contract, layer.activation)
            strategy = chosen.strategy if arm is Arm.FIX else Strategy(arm.value)
            keep_out = arm is Arm.FIX and KernelFamily.DIRECT_MICRO in chosen.keep_out
            more = {"direct_micro_max_n": 0} if keep_out else {}
            cases = [make_case(*subject.head(rows), **more) for rows in ROWS]
            scales = input_scales(layer, InputScales.LAYER)
            try:
                args = arguments(strategy, layer, *scales, contract)
            except NoExactFormError:
                refused.add((name, arm))
                continue
            keys.append((name, arm))
            jobs.append(make_job(layer, args, cases, layer.activation))
    results = run_worker(version, jobs, tmp_path_factory.mktemp(f"flashinfer-{version}"))
    arms = {
        key: ArmRun(
            {rows: case["output"] for rows, case in zip(ROWS, result["cases"], strict=True)},
            {
                rows: KernelFamily(case["family"])
                for rows, case in zip(ROWS, result["cases"], strict=True)
            },
        )
        for key, result in zip(keys, results, strict=True)
    }
    return VersionRun(version, everything, arms, refused)


def row_check(ran: VersionRun, name: str, rows: int) -> RowCheck:
    chosen = Settings(contract_for(ran.version), ARMS, ROWS, None, InputScales.LAYER, ORDER_SEED)
    return RowCheck(ran.subjects[name], chosen, rows)


def test_what_was_refused_is_what_has_no_exact_form(ran):
    old = contract_for(ran.version).input_scale is InputScaleArgument.IS_W1_ALPHA
    expected = {("embedded", Arm.FP32_RESCALE)}
    if old:
        expected |= {(name, arm) for name in ran.subjects for arm in (Arm.ALPHAS, Arm.UNIT)}
        expected |= {("embedded", Arm.FIX)}
    assert ran.refused == expected


@pytest.mark.parametrize("name", ["embedded", "relu2"])
@pytest.mark.parametrize("rows", ROWS)
def test_the_wrapper_gives_the_layer_checks_numbers(ran, name, rows):
    check = row_check(ran, name, rows)
    compared = 0
    for arm in ARMS:
        if (name, arm) in ran.refused:
            assert check.arm(arm).unavailable
            continue
        real, ours = ran.arms[name, arm], check.arm(arm)
        assert real.families[rows] is ours.family
        exact = check.reference(ours.family)
        found = distance(real.outputs[rows], exact.output)
        assert found.relative_rms == ours.output_distance.relative_rms
        compared += 1
    assert compared == len(ARMS) - sum(refused == name for refused, _ in ran.refused)


def test_direct_micro_is_taken_and_its_trap_is_seen(ran):
    """The embedded layer at 1, 2 and 4 rows: 6, 12 and 24 routed rows of intermediate 256."""
    convention = contract_for(ran.version).direct_micro
    families = ran.arms["embedded", Arm.BAKED].families
    taken = {rows for rows, family in families.items() if family is KernelFamily.DIRECT_MICRO}
    assert taken == (set() if convention is DirectMicro.NEVER_SELECTED else {1, 2, 4})
    for rows in taken:
        exact = row_check(ran, "embedded", rows).reference(KernelFamily.DIRECT_MICRO).output
        baked = distance(ran.arms["embedded", Arm.BAKED].outputs[rows], exact).relative_rms
        naive = distance(ran.arms["embedded", Arm.ALPHAS].outputs[rows], exact).relative_rms
        if convention is DirectMicro.MULTIPLIES:
            assert baked > 0.9
            assert naive > 0.9
        else:
            assert 0.1 < baked < 0.5
            assert naive == 0
        assert ran.arms["embedded", Arm.FIX].families[rows] is (
            KernelFamily.MICRO
            if convention is DirectMicro.MULTIPLIES
            else KernelFamily.DIRECT_MICRO
        )


def test_the_fix_is_as_true_as_exact_scales_through_the_real_wrapper(ran):
    for name, subject in ran.subjects.items():
        if (name, Arm.FIX) in ran.refused:
            continue
        for rows in (8, 17, 64):
            x, routing = subject.head(rows)
            truth = reference.truth(subject.layer, x, routing)
            run = ran.arms[name, Arm.FIX]
            exact = row_check(ran, name, rows).reference(run.families[rows]).output
            mine = distance(run.outputs[rows], truth).relative_rms
            assert abs(mine / distance(exact, truth).relative_rms - 1) < 0.02
            baked = distance(ran.arms[name, Arm.BAKED].outputs[rows], truth).relative_rms
            assert baked > 1.2 * mine


@pytest.mark.parametrize("version", VERSIONS)
def test_intermediates_that_the_wrapper_pads(oracle_dir, tmp_path, version):
    """0.6 pads to 128, 0.7.2 to 256, 0.7.4 mostly not: the same output for the same layer."""
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    contract = contract_for(version)
    strategy = plan(contract, Activation.RELU2).strategy
    layers, jobs = [], []
    for intermediate in (144, 320):
        layer = make_layer(Activation.RELU2, experts=4, hidden=256, intermediate=intermediate)
        args = arguments(strategy, layer, *input_scales(layer, InputScales.LAYER), contract)
        x, routing = make_inputs(layer, tokens=12, top_k=4)
        layers.append(LayerInput(layer, x, routing, "synthetic"))
        jobs.append(make_job(layer, args, [make_case(x, routing)], layer.activation))
    limit = 0.03 if strategy is Strategy.FP32_RESCALE else 1e-3
    for subject, result in zip(layers, run_worker(version, jobs, tmp_path), strict=True):
        case = result["cases"][0]
        exact = exact_output(subject, contract, KernelFamily(case["family"]))
        assert distance(case["output"], exact).relative_rms < limit


def exact_output(subject: LayerInput, contract, family: KernelFamily) -> torch.Tensor:
    rows = subject.x.shape[0]
    chosen = Settings(contract, ARMS, (rows,), None, InputScales.LAYER, ORDER_SEED)
    return RowCheck(subject, chosen, rows).reference(family).output


FORCED = {
    "direct-micro": {"forced_family": "direct_micro"},
    "micro": {"forced_family": "micro"},
    "static": {"forced_family": "static"},
    "dynamic": {"forced_family": "dynamic"},
    "gated-dynamic": {"forced_family": "dynamic"},
}


@pytest.mark.parametrize("activation", Activation)
@pytest.mark.parametrize("version", VERSIONS[1:])
def test_every_forced_family_agrees_with_the_second_implementation(
    oracle_dir, tmp_path, version, activation
):
    """The wrapper's folds and layouts under per-expert scales, judged by tests/oracle_moe.py.

    A CUDA-graph wrapper's 128-row tile brings out the gated dynamic kernel. Atomic adds are in
    slot order on both sides.
    """
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    layer = make_layer(activation, experts=4, hidden=128, intermediate=256)
    x, routing = make_inputs(layer, tokens=6, top_k=3)
    contract = contract_for(version)
    args = arguments(Strategy.ALPHAS, layer, *input_scales(layer, InputScales.FILE), contract)
    names = [name for name in FORCED if activation.is_gated or name != "gated-dynamic"]
    jobs = []
    for name in names:
        job = make_job(layer, args, [make_case(x, routing, **FORCED[name])], activation)
        if name == "gated-dynamic":
            job |= {"use_cuda_graph": True, "max_num_tokens": 1024}
        jobs.append(job)
    results = run_worker(version, jobs, tmp_path, "tests.kernel_backend:emulate_in_slot_order")
    launch = args.launch(layer)
    for name, result in zip(names, results, strict=True):
        case = result["cases"][0]
        assert case["family"] == name.removeprefix("gated-")
        gated = case["flags"]["kernel_class"].startswith("gated.")
        assert gated == (name == "gated-dynamic")
        theirs = oracle_moe.run(
            decoded(launch),
            version,
            name,
            x.float().numpy(),
            routing.expert_ids.numpy(),
            routing.weights.numpy(),
        )
        ours = case["output"].float().numpy()
        assert (ours != theirs).mean() < 0.02, name
        assert abs(ours - theirs).max() <= abs(theirs).max() * 2.0**-8, name
        if name != "direct-micro" or contract.direct_micro is DirectMicro.DIVIDES:
            assert abs(theirs).max() > 0


def test_the_comparison_sees_every_planted_defect(oracle_dir, tmp_path):
    """The same comparison with a defect planted in what the wrapper is given must not hold."""
    version = "0.7.4"
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    layer = make_layer(Activation.SILU, experts=4, hidden=128, intermediate=128)
    x, routing = make_inputs(layer, tokens=12, top_k=4)
    contract = contract_for(version)
    args = arguments(Strategy.ALPHAS, layer, *input_scales(layer, InputScales.LAYER), contract)
    sound = make_job(layer, args, [make_case(x, routing)], layer.activation)
    defects = [d for d in DEFECTS if Activation.SILU in d.activations]
    jobs = [sound, *(plant(sound, defect.apply(args.launch(layer))) for defect in defects)]
    first, *broken = run_worker(version, jobs, tmp_path)
    family = KernelFamily(first["cases"][0]["family"])
    exact = exact_output(LayerInput(layer, x, routing, "synthetic"), contract, family)
    assert torch.equal(first["cases"][0]["output"], exact)
    for defect, result in zip(defects, broken, strict=True):
        found = distance(result["cases"][0]["output"], exact).relative_rms
        assert not found <= 1e-3, defect.name  # NaN counts as seen


def plant(job: dict, launch) -> dict:
    return {
        **job,
        "w1_packed": launch.w1_packed,
        "w1_block_scale": launch.w1_block_scale,
        "w2_block_scale": launch.w2_block_scale,
        # The wrapper folds; undo it so that the defect alone reaches the kernel.
        "w1_alpha": launch.w1_alpha / launch.input_global_scale,
        "w2_alpha": launch.w2_alpha,
        "input_global_scale": launch.input_global_scale,
        "fc2_input_scale": launch.fc2_input_scale,
    }

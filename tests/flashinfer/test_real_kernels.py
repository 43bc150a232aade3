"""The real-kernel arms through each FlashInfer wheel's own wrapper and dispatch, on a CPU.

real_kernels_worker.py runs every scenario once per version; the emulator stands where the compiled
kernels would, so an arm that hands over the right tensors gives the emulated output to the bit.
Nothing here ran on SM120 or SM121.
"""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests import warm
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import DirectMicro, InputScaleArgument, Shape, contract_for
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.repair import Strategy, plan

EXPERTS, TOP_K, SIZE = 6, 3, 256  # as in the worker
ROWS = (1, 8, 64)
AGREEING = [
    f"{kind} {activation.value}" for kind in ("steady", "per expert") for activation in Activation
]
AGREEING += ["dense", "only static", "graph", "inference", "inside inference"]

# One process runs every scenario of a version: half a minute on a quiet machine.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


def _version(version: str) -> Any:
    marks = pytest.mark.oracle(f"flashinfer-{version}", "flashinfer-deps")
    return pytest.param(version, marks=marks)


VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")


@pytest.fixture(scope="module", params=[_version(version) for version in VERSIONS])
def ran(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    version = request.param
    out = tmp_path_factory.mktemp("real-kernels") / "out.json"
    arguments = ["--version", version, "--out", str(out)]
    done = warm.run(version, "real_kernels_worker", arguments)
    assert done.returncode == 0, done.stderr[-4000:]
    found: dict[str, Any] = json.loads(out.read_text())
    return found | {"version": version}


def arms(ran: dict[str, Any], scenario: str, **wanted: Any) -> list[dict[str, Any]]:
    """The arms of a scenario with these values; there must be some."""
    found = [
        arm
        for arm in ran[scenario]["arms"]
        if all(arm[name] == value for name, value in wanted.items())
    ]
    assert found, (scenario, wanted)
    return found


def has_fix(ran: dict[str, Any], activation: Activation) -> bool:
    return plan(contract_for(ran["version"]), activation).strategy is not Strategy.CUTLASS


def selectable(version: str, arm: str, forced: str, rows: int) -> bool:
    """Whether this layer's arm can be forced there: the worker's layer has 3 routes a token."""
    contract = contract_for(version)
    if forced == "direct-micro":
        kept_out = arm == "fix" and contract.direct_micro is DirectMicro.MULTIPLIES
        return (
            contract.direct_micro is not DirectMicro.NEVER_SELECTED and rows <= 8 and not kept_out
        )
    return forced != "micro" or rows <= 8


@pytest.mark.parametrize("scenario", AGREEING)
def test_every_arm_gives_the_emulated_output_to_the_bit(ran: dict[str, Any], scenario: str) -> None:
    assert ran[scenario]["status"] == "ran"
    compared = 0
    for arm in ran[scenario]["arms"]:
        if arm["family"] is None:
            assert arm["status"].startswith("not selectable: "), arm
            continue
        assert (arm["status"], arm["vs_emulated"], arm["noise"]) == ("ok", 0, 0), arm
        assert 0.05 < arm["true_error"] < 1.1, arm
        assert arm["time_s"] > 0
        assert arm["first_call_s"] > 0
        compared += 1
    assert compared >= (2 if scenario == "only static" else 3)


@pytest.mark.parametrize("activation", Activation)
def test_only_atomic_adds_make_noise(ran: dict[str, Any], activation: Activation) -> None:
    contract = contract_for(ran["version"])
    kinds = set()
    for arm in ran[f"noisy {activation.value}"]["arms"]:
        if arm["family"] is None:
            continue
        shape = Shape(arm["rows"], TOP_K, SIZE, SIZE, EXPERTS, activation)
        random = contract.arithmetic(KernelFamily(arm["family"]), shape).output_sum.has_random_order
        kinds.add(random)
        assert arm["status"] == "ok", arm
        if random:
            assert 0.002 < arm["noise"] < 0.02, arm
            assert 0.002 < arm["vs_emulated"] < 0.02, arm
        elif arm["true_error"] < 1:  # not where direct micro's misreading leaves zeros
            assert arm["noise"] == arm["vs_emulated"] == 0, arm
    assert kinds == ({True} if ran["version"] == "0.6.16" else {True, False})


@pytest.mark.parametrize("activation", Activation)
def test_the_family_claimed_is_the_family_launched(
    ran: dict[str, Any], activation: Activation
) -> None:
    """What was observed at the getters against what the harness saw at the kernel."""
    contract = contract_for(ran["version"])
    result = ran[f"steady {activation.value}"]
    assert len(result["arms"]) == len(result["launched"])
    for arm, launched in zip(result["arms"], result["launched"], strict=True):
        if arm["family"] is not None:
            assert launched == [arm["family"]], arm
        if arm["forced"] is not None:
            can = selectable(ran["version"], arm["arm"], arm["forced"], arm["rows"])
            assert arm["family"] == (arm["forced"] if can else None), arm
        elif arm["arm"] != "fix" or has_fix(ran, activation):
            shape = Shape(arm["rows"], TOP_K, SIZE, SIZE, EXPERTS, activation)
            chosen = plan(contract, activation)
            kept = chosen.keep_out if arm["arm"] == "fix" else frozenset()
            assert arm["family"] == contract.without(*kept).select(shape).value, arm
    assert {arm["rows"] for arm in result["arms"]} == set(ROWS)


def test_the_gated_dynamic_kernel_is_emulated_as_such(ran: dict[str, Any]) -> None:
    shape = Shape(128, 2, SIZE, SIZE, 2, Activation.SILU)
    contract = contract_for(ran["version"])
    assert contract.retains_slices(shape) == (ran["version"] != "0.6.16")
    assert all(a["vs_emulated"] == 0 for a in arms(ran, "dense", forced="dynamic", status="ok"))


def test_a_fix_without_an_exact_form_is_told_once_per_row_count(ran: dict[str, Any]) -> None:
    found = arms(ran, "steady silu", arm="fix")
    if contract_for(ran["version"]).input_scale is InputScaleArgument.SEPARATE:
        assert len(found) == len(ROWS) * 5
    else:
        assert [arm["rows"] for arm in found] == list(ROWS)
        assert all("CUTLASS" in arm["status"] for arm in found)


def test_the_fix_is_nearer_to_the_truth_than_what_is_shipped(ran: dict[str, Any]) -> None:
    for rows in ROWS:
        (fix,) = arms(ran, "steady relu2", arm="fix", forced=None, rows=rows)
        (baked,) = arms(ran, "steady relu2", arm="baked", forced=None, rows=rows)
        assert baked["true_error"] > 1.2 * fix["true_error"]


def test_outputs_that_share_the_wrappers_buffer_are_caught(ran: dict[str, Any]) -> None:
    for arm in ran["graph, not cloned"]["arms"]:
        if not arm["status"].startswith("not selectable: "):
            assert "share one buffer" in arm["status"], arm


def test_inference_tensors_are_copied_and_fail_where_they_are_not(ran: dict[str, Any]) -> None:
    """0.6.17 to 0.7.2 ask inference tensors for a version, which raises."""
    for arm in arms(ran, "inference, not cloned", arm="fix", forced=None):
        if ran["version"] in ("0.6.18", "0.7.2"):
            assert arm["status"].startswith("failed: RuntimeError: "), arm
            assert "version counter" in arm["status"]
        else:
            assert arm["status"] == "ok"


def test_a_kernel_that_raises_is_told_and_the_rest_still_runs(ran: dict[str, Any]) -> None:
    assert ran["raising"]["status"] == "ran"
    for arm in ran["raising"]["arms"]:
        failed = arm["status"] == "failed: RuntimeError: planted: the kernel failed"
        assert failed == (arm["forced"] == "static"), arm
    assert {arm["forced"] for arm in arms(ran, "raising", status="ok")} >= {None, "dynamic"}


@pytest.mark.parametrize(
    ("scenario", "status", "families"),
    [
        ("not_finite", "not finite: ", {"dynamic"}),
        ("too_large", "disagrees: ", {"micro", "static", "dynamic"}),
    ],
)
def test_a_wrong_output_is_told(
    ran: dict[str, Any], scenario: str, status: str, families: set[str]
) -> None:
    wrong = {a["family"] for a in ran[scenario]["arms"] if a["status"].startswith(status)}
    assert wrong - {"direct-micro"} == families
    for arm in ran[scenario]["arms"]:
        assert arm["status"] != "ok" or arm["family"] not in families, arm


def test_nothing_runs_after_an_error_that_outlives_its_arm(ran: dict[str, Any]) -> None:
    """The device answers every synchronization with an error, the first one included."""
    result = ran["sticky"]
    assert result["status"] == "stopped"
    assert "illegal memory access" in result["why_not"]
    executed = [arm for arm in result["arms"] if not arm["status"].startswith("skipped: ")]
    assert [arm["status"][:6] for arm in executed] == ["failed"]
    assert len(result["launched"]) == 1
    assert len(result["arms"]) == len(ROWS) * len(Arm) * 2


def test_fp16_is_refused_before_a_kernel_can_misread_it(ran: dict[str, Any]) -> None:
    assert all("bf16" in arm["status"] for arm in ran["fp16"]["arms"])
    assert not any(ran["fp16"]["launched"])


def test_a_family_that_was_not_launched_is_never_claimed(ran: dict[str, Any]) -> None:
    """With the forcing planted away, forced arms tell what was launched instead of them."""
    own = {arm["arm"]: arm["family"] for arm in arms(ran, "not forced", forced=None)}
    for arm in ran["not forced"]["arms"]:
        if arm["forced"] not in (None, own[arm["arm"]]):
            assert (
                arm["status"] == f"not selectable: the dispatch launched {own[arm['arm']]} instead"
            )


def test_a_kernel_that_nobody_observed_is_no_result(ran: dict[str, Any]) -> None:
    for arm in arms(ran, "not observed", forced="static"):
        assert "without asking for a known b12x kernel" in arm["status"]


def test_flashinfer_is_left_as_it_was(ran: dict[str, Any]) -> None:
    assert ran["restored"] is True

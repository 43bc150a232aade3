"""check-layer --preset: what is made, what is refused, what the reports say beside the figures."""

from __future__ import annotations

import io
import json
from contextlib import redirect_stderr, redirect_stdout

import pytest
import torch

from trtllm_b12x_fix import cli
from trtllm_b12x_fix.commands import parsing
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check import from_preset
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.result import ArmResult, FamilyResult
from trtllm_b12x_fix.layer_check.scales import ScaleDamage
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.presets.published import Quantity
from trtllm_b12x_fix.presets.shapes import PRESETS
from trtllm_b12x_fix.repair import Strategy

BASE = ("check-layer", "--device", "cpu", "--flashinfer", "0.6.18")
TINY = ("--hidden", "128", "--intermediate", "144", "--experts", "8", "--top-k", "2")
# static: at this size 0.6.18 would choose direct micro, whose misreading drowns everything else.
STATIC = ("--kernel", "static", "--rows", "1,2", "--arms", "fix,baked")
QUICK = (*BASE, "--preset", "super-layer1", *TINY, *STATIC)


def call(*arguments: str) -> tuple[object, str, str]:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        try:
            code: object = cli.main(arguments)
        except SystemExit as stop:
            code = stop.code
    return code, out.getvalue(), err.getvalue()


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def tiny() -> dict:
    code, out, err = call(*QUICK, "--json", "-")
    assert (code, err) == (0, "")
    return json.loads(out)


# ---- what is made


def test_sizes_override_the_shape_and_not_the_law(tiny):
    layer = tiny["layer"]
    assert (layer["hidden"], layer["logical_intermediate"], layer["intermediate"]) == (
        128,
        144,
        256,
    )
    assert (layer["experts"], layer["top_k"], layer["activation"]) == (8, 2, "relu2")
    assert 2 <= layer["experts_read"] <= 4  # two tokens, two experts each
    assert tiny["preset"]["changed"] == [
        "hidden 128, not 1024",
        "intermediate 144, not 2688",
        "experts 8, not 512",
        "top-k 2, not 22",
    ]


def test_activations_are_overridden_too():
    code, out, _ = call(*QUICK, "--activations", "silu", "--json", "-")
    document = json.loads(out)
    assert code == 0
    assert document["layer"]["activation"] == "silu"
    assert "activation silu, not relu2" in document["preset"]["changed"]


def test_the_fix_is_exact_on_a_made_up_layer(tiny):
    assert tiny["verdict"] == "good"
    by_cell = {(r["rows"], r["arm"]): r for r in tiny["results"]}
    assert by_cell[2, "fix"]["fidelity"]["relative_rms"] == 0


def test_only_routed_experts_are_made(monkeypatch):
    asked: list[list[int]] = []
    make = from_preset.generate.make_layer

    def spy(preset, shape, experts, seed, progress):
        asked.append(experts)
        return make(preset, shape, experts, seed, progress)

    monkeypatch.setattr(from_preset.generate, "make_layer", spy)
    request = from_preset.Request("super-layer1", 3, 0, 128, 128, 64, 2)
    subject = from_preset.load(request).subject
    (experts,) = asked
    assert len(experts) == subject.layer.experts <= 6
    assert subject.experts == 64
    # Ids in the routing are places in the layer, each of them used.
    assert subject.routing.expert_ids.unique().tolist() == list(range(len(experts)))


def test_more_rows_leave_the_first_ones_as_they_were():
    few = from_preset.load(from_preset.Request("super-layer1", 2, 0, 128, 128, 64, 4)).subject
    many = from_preset.load(from_preset.Request("super-layer1", 9, 0, 128, 128, 64, 4)).subject
    assert torch.equal(many.x[:2], few.x)
    assert torch.equal(many.routing.weights[:2], few.routing.weights)
    codes = [subject.layer.fc1.packed[subject.routing.expert_ids[1, 3]] for subject in (few, many)]
    assert torch.equal(*codes)


def test_the_seed_changes_the_layer(tiny):
    _, out, _ = call(*QUICK, "--seed", "1", "--json", "-")
    assert json.loads(out)["scales"] != tiny["scales"]


# ---- what the reports say


def test_the_document_has_published_beside_measured(tiny):
    preset = tiny["preset"]
    assert preset["name"] == "super-layer1"
    assert "no evidence for the emulator" in preset["caveat"]
    figures = {figure["name"]: figure for figure in preset["figures"]}
    assert figures["mean FC1 scale error"]["published"] == [0.141, 0.141]
    assert figures["FC1 scales baked to 0"]["published"] == [0.008, 0.008]
    assert figures["layer output error, baked"]["published"] == [0.081, 0.095]
    assert figures["FC1 weight_scale_2"]["published"] == [2e-5, 2e-5]
    assert figures["FC1 weight_scale_2"]["role"] == "not met"
    fc1 = tiny["scales"]["fc1"]
    assert figures["mean FC1 scale error"]["measured"] == [fc1["mean_relative_error"]] * 2
    assert figures["FC1 weight_scale_2"]["measured"] == [
        fc1["weight_scale_2_min"],
        fc1["weight_scale_2_max"],
    ]


def test_the_true_error_ratio_is_that_of_the_results(tiny):
    by_cell = {(r["rows"], r["arm"]): r for r in tiny["results"]}
    ratios = tiny["preset"]["true_error_baked_over_exact"]
    assert [entry["rows"] for entry in ratios] == [1, 2]
    for entry in ratios:
        baked, fix = (by_cell[entry["rows"], arm]["true_error"] for arm in ("baked", "fix"))
        assert entry["ratio"] == pytest.approx(baked["relative_rms"] / fix["relative_rms"])


def test_the_text_report_has_the_table_and_the_caveat():
    code, out, _ = call(*QUICK)
    assert code == 0
    text = " ".join(out.split())
    assert "preset super-layer1 (" in text
    assert "8.10% to 9.50% TensorRT-LLM#21461" in text
    assert "A stand-in: four numbers" in text
    assert "true error, baked over exact scales, by rows:" in text
    assert "Not the published shape (hidden 128, not 1024;" in text


def test_a_layer_that_is_no_preset_has_no_such_part():
    code, out, _ = call(*BASE, "--rows", "1", "--arms", "fix", "--json", "-")
    assert code == 0
    assert json.loads(out)["preset"] is None
    assert "preset" not in call(*BASE, "--rows", "1", "--arms", "fix")[1]


def test_without_the_baked_arm_the_layer_error_is_not_run():
    _, out, _ = call(*QUICK[:-1], "fix")
    row = next(line for line in out.splitlines() if line.startswith("layer output error"))
    assert "not run" in row
    assert "by rows:" not in out


DAMAGE = ScaleDamage(96, 0.01, 0.9, 0.14, 1.0, 0, 0.2, 1e-4, 2e-4)


def result(rows: int, error: float, trap: str = "") -> ArmResult:
    distance = Distance(error, 0.9)
    arm = ArmResult(rows, Arm.BAKED, Strategy.BAKED, KernelFamily.STATIC, trap=trap)
    return ArmResult(**{**arm.__dict__, "fidelity": distance, "true_error": distance})


def test_figures_come_from_rows_where_input_scales_are_read_right():
    """Where direct micro misreads them, 100% error is not the block scales' doing."""
    preset = PRESETS["super-layer1"]
    loaded = from_preset.Loaded(
        from_preset.load(from_preset.Request("super-layer1", 1, 0, 64, 64, 4, 2)).subject,
        preset,
        preset.shape,
    )
    results = (result(1, 1.0, trap="misread"), result(2, 0.5), result(4, 0.25))
    exact = Distance(0.2, 0.9)
    families = tuple(
        FamilyResult(rows, KernelFamily.STATIC, exact, 0.0, 0.0, 0.0, 0.0) for rows in (1, 2, 4)
    )
    report = from_preset.compare(loaded, DAMAGE, results, families)
    measured = {f.published.quantity: f.measured for f in report.figures}
    assert measured == {
        Quantity.MEAN_ERROR: (0.14, 0.14),
        Quantity.ZERO_FRACTION: (0.01, 0.01),
        Quantity.LAYER_ERROR: (0.25, 0.5),
        Quantity.WEIGHT_SCALE_2: (1e-4, 2e-4),
    }
    assert report.true_error_ratios == ((2, 2.5), (4, 1.25))
    assert report.changed == ()


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--preset", "super-layer1", "--checkpoint", "x"), "--checkpoint and --preset"),
        (("--preset", "super-layer1", "--layer", "1"), "--layer and --preset"),
        (("--preset", "super-layer1", "--list"), "--list and --preset"),
        (("--preset", "super-layer1", "--inputs", "x"), "--inputs and --preset"),
        (("--preset", "super-layer1", "--experts", "0-31"), "one number, such as 64"),
        (("--preset", "super-layer1", "--experts", "0"), "--experts must be 1 to"),
        (("--preset", "super-layer1", "--experts", "16"), "give --top-k as well"),
        (("--preset", "super-layer1", "--hidden", "1000"), "multiple of 16"),
        (("--preset", "super-layer1", "--intermediate", "8"), "multiple of 16"),
        (("--preset", "super-layer1", "--top-k", "513"), "number of experts, 512"),
        (("--preset", "nano"), "invalid choice: 'nano'"),
        (("--hidden", "128"), "--hidden needs --preset"),
        (("--intermediate", "128"), "--intermediate needs --preset"),
        (("--experts", "8"), "--checkpoint PATH or --preset NAME"),
        (("--layer", "8"), "--layer needs --checkpoint PATH;"),
        (("--checkpoint", "x", "--layer", "1", "--hidden", "128"), "--hidden needs --preset"),
    ],
)
def test_options_that_do_not_fit_are_refused(arguments, words):
    code, out, err = call(*BASE, *arguments)
    assert (code, out) == (2, "")
    assert words in err


def test_the_command_line_knows_every_preset():
    assert tuple(PRESETS) == parsing.PRESET_NAMES
    with pytest.raises(InputError, match="super-layer1, nemotron-3-nano"):
        from_preset.load(from_preset.Request("other", 1, 0))


def test_a_size_of_zero_is_refused_and_not_replaced():
    small = {"hidden": 64, "intermediate": 64, "experts": 4, "top_k": 2}
    for name in small:
        with pytest.raises(InputError, match="must be"):
            from_preset.load(from_preset.Request("super-layer1", 1, 0, **{**small, name: 0}))


def test_the_other_presets_run_at_a_small_size():
    for name, activation in (
        ("nemotron-3-nano", Activation.RELU2),
        ("qwen3.6-35b-a3b", Activation.SILU),
    ):
        loaded = from_preset.load(from_preset.Request(name, 2, 0, 128, 128, 8, 2))
        assert loaded.subject.layer.activation is activation
        assert loaded.preset.name in loaded.subject.layer.source


# ---- the reported layer


@pytest.mark.slow
@pytest.mark.parametrize("seed", ["0", "1"])
def test_super_layer1_lands_in_its_bands(seed):
    """All 512 experts are there to be routed to; one and two rows need 22 and 43 of them."""
    options = ("--preset", "super-layer1", "--rows", "1,2", "--arms", "fix,baked", "--json", "-")
    code, out, _ = call(*BASE, *options, "--seed", seed)
    document = json.loads(out)
    assert code == 0
    assert document["layer"]["experts"] == 512
    assert document["preset"]["changed"] == []
    fc1 = document["scales"]["fc1"]
    assert fc1["mean_relative_error"] == pytest.approx(0.141, rel=0.2)
    assert fc1["zero_fraction"] == pytest.approx(0.008, rel=0.2)
    for entry in document["results"]:
        if entry["arm"] == "baked":
            assert 0.081 * 0.8 < entry["fidelity"]["relative_rms"] < 0.095 * 1.2
    for entry in document["preset"]["true_error_baked_over_exact"]:
        assert 1.05 < entry["ratio"] < 1.3

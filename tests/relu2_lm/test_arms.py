"""Quantized experts: ModelOpt's bytes, the law, what an arm does to the weights, twins."""

from dataclasses import replace

import pytest
import torch

from evals.relu2_lm import arms, checkpoint, decode, evaluate, export, quantize
from evals.relu2_lm.arms import Magnitude
from evals.relu2_lm.evaluate import Emulated, Plain
from evals.relu2_lm.experts import Experts
from tests.relu2_lm.models import random_model, subject
from trtllm_b12x_fix.checkpoint.assemble import load_experts
from trtllm_b12x_fix.checkpoint.discovery import discover
from trtllm_b12x_fix.checkpoint.files import open_checkpoint
from trtllm_b12x_fix.errors import NoExactFormError
from trtllm_b12x_fix.law import Powers
from trtllm_b12x_fix.layer import Activation, Projection
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.scales import damage

REFERENCE = Emulated(None, "0.6.18", 16, Magnitude.REPORTED)


def _log_probabilities(case):
    given = subject()
    with arms.standing_in(given.model, evaluate.experts_of(given, case)) as model:
        return decode.solution_log_probabilities(model, given.corpus)


@pytest.fixture(scope="module")
def reference():
    return _log_probabilities(REFERENCE)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """Our folder, and what ModelOpt makes of it."""
    source, folder = tmp_path_factory.mktemp("bf16"), tmp_path_factory.mktemp("nvfp4")
    model = random_model()
    amax = {1: quantize.InputAmax(4.0, 25.0), 3: quantize.InputAmax(3.5, 90.0)}
    checkpoint.save(model, amax, source)
    export.write_nvfp4(source, folder)
    return source, folder


def test_modelopt_exports_the_same_bytes(exported):
    source, folder = exported
    model = checkpoint.load(source, torch.device("cpu"), torch.float32)
    ours = quantize.quantize(model, checkpoint.load_calibration(source))
    opened = open_checkpoint(folder)
    entries = discover(opened).usable
    assert [entry.number for entry in entries] == list(ours) == [1, 3]
    for entry in entries:
        theirs = load_experts(
            opened, entry, range(entry.experts), Activation.RELU2, "ModelOpt"
        ).layer
        for projection in Projection:
            a, b = ours[entry.number].projection(projection), theirs.projection(projection)
            for name in ("packed", "block_scale", "weight_scale_2", "input_scale"):
                assert torch.equal(getattr(a, name), getattr(b, name)), (projection, name)


def test_only_routed_experts_are_quantized(exported):
    names = open_checkpoint(exported[1]).names()
    scaled = {name for name in names if name.endswith(("weight_scale", "input_scale"))}
    assert scaled
    assert all(".mixer.experts." in name for name in scaled)


def test_calibration_sees_the_largest_input():
    given = subject()
    (number, moe), *_ = given.model.moe_layers()
    seen = []
    moe.experts.observe = lambda x, inner: seen.append((x.abs().max(), inner.abs().max()))
    decode.solution_log_probabilities(given.model, given.corpus, size=4)
    moe.experts.observe = None
    amax = quantize.calibrate(given.model, given.corpus, size=4)[number]
    assert amax.fc1 == max(float(x) for x, _ in seen)
    assert amax.fc2 == max(float(inner) for _, inner in seen)
    assert len(seen) > 1


@pytest.mark.parametrize(
    "case",
    [
        replace(REFERENCE, magnitude=Magnitude.OWN),
        replace(REFERENCE, magnitude=Magnitude.QUARTER),
        replace(REFERENCE, arm=Arm.ALPHAS),
        replace(REFERENCE, arm=Arm.FIX),
    ],
    ids=["own magnitude", "far below", "alphas", "fix"],
)
def test_correct_paths_give_the_references_bits(reference, case):
    assert torch.equal(_log_probabilities(case), reference)


def test_the_law_holds_for_the_rescaled_form_at_every_magnitude():
    at = [
        _log_probabilities(replace(REFERENCE, arm=Arm.FP32_RESCALE, magnitude=m))
        for m in (Magnitude.OWN, Magnitude.REPORTED)
    ]
    assert torch.equal(*at)


def test_the_bake_depends_on_magnitude(reference):
    def far(magnitude):
        baked = _log_probabilities(replace(REFERENCE, arm=Arm.BAKED, magnitude=magnitude))
        return float((baked - reference).norm())

    own, reported, quarter = map(far, (Magnitude.OWN, Magnitude.REPORTED, Magnitude.QUARTER))
    assert 0 < own < reported / 2
    assert quarter > 2 * reported


def test_magnitudes_are_where_they_say():
    layer = subject().layers[1]
    for magnitude, target in ((Magnitude.REPORTED, 2e-5), (Magnitude.HALF, 1e-5)):
        moved = arms.move_layer(layer, magnitude.powers(layer))
        for projection in Projection:
            mean = moved.projection(projection).weight_scale_2.log2().mean().exp2()
            assert 2**-0.5 <= float(mean) / target <= 2**0.5
    assert Magnitude.OWN.powers(layer) == Powers()


def test_families_follow_the_tokens_of_a_step():
    given = subject()
    names = {}
    for tokens in (1, 16):
        case = replace(REFERENCE, version="0.7.2", tokens=tokens)
        names[tokens] = evaluate.experts_of(given, case)[1].arithmetic.name
    assert names == {
        1: "direct-micro of FlashInfer 0.7.2",
        16: "static of FlashInfer 0.7.2",
    }


def test_no_exact_form_is_said():
    with pytest.raises(NoExactFormError, match=r"0\.6\.16"):
        evaluate.experts_of(subject(), replace(REFERENCE, version="0.6.16", arm=Arm.ALPHAS))


def test_weights_alone_lose_less_than_weights_and_activations(reference):
    bf16, w4a16 = _log_probabilities(Plain.BF16), _log_probabilities(Plain.W4A16)
    assert 0 < float((w4a16 - bf16).norm()) < float((reference - bf16).norm())


def test_the_baked_twin_holds_what_the_bake_leaves():
    given = subject()
    layer, (_, moe) = given.layers[1], given.model.moe_layers()[0]
    powers = Magnitude.REPORTED.powers(layer)
    intact = arms.weights_only(layer, moe.experts)
    baked = arms.baked_weights_only(layer, powers, moe.experts)
    for projection, name in ((Projection.FC1, "up_proj"), (Projection.FC2, "down_proj")):
        whole, left = getattr(intact, name), getattr(baked, name)
        blocks = whole.unflatten(-1, (-1, 16)).norm(dim=-1)
        error = (left.unflatten(-1, (-1, 16)).norm(dim=-1) / blocks - 1).abs().mean()
        moved = arms.move_layer(layer, powers).projection(projection)
        assert float(error) == pytest.approx(damage(moved).mean_relative_error, rel=1e-5)


def test_twins_are_folders_like_the_original(tmp_path):
    source = tmp_path / "source"
    amax = {1: quantize.InputAmax(4.0, 25.0), 3: quantize.InputAmax(3.5, 90.0)}
    checkpoint.save(random_model(), amax, source)
    for twin in export.Twin:
        export.write_twin(twin, source, tmp_path / twin.value)
    original, intact, baked = (
        checkpoint.load(tmp_path / name, torch.device("cpu"), torch.float32).state_dict()
        for name in ("source", "intact", "baked")
    )
    changed = {name for name in original if not torch.equal(intact[name], baked[name])}
    assert changed == {name for name in original if ".experts." in name and "shared" not in name}
    assert all(torch.equal(original[n], intact[n]) for n in original if n not in changed)


def test_stand_ins_leave_whatever_happens():
    given = subject()
    own = [moe.experts for _, moe in given.model.moe_layers()]

    def use_and_fail():
        with arms.standing_in(given.model, evaluate.experts_of(given, REFERENCE)) as model:
            assert not any(isinstance(moe.experts, Experts) for _, moe in model.moe_layers())
            quantize.quantize(model, {number: None for number, _ in model.moe_layers()})

    with pytest.raises(TypeError, match="EmulatedExperts"):
        use_and_fail()
    assert [moe.experts for _, moe in given.model.moe_layers()] == own


def test_many_tokens_are_launched_in_parts(monkeypatch, reference):
    monkeypatch.setattr(arms, "_TOKENS_AT_A_TIME", 100)
    assert torch.equal(_log_probabilities(REFERENCE), reference)

"""The model's side: replacing MLPs, splitting into experts, the law on a whole network."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch
from torch.nn.functional import silu

from evals.regress import arms, experts, generate, layer_errors, suite
from evals.regress.arms import STATIC, Arm, Kernel, Variant
from evals.regress.documents import Document
from evals.regress.language_model import hidden_states, load, replaced
from evals.regress.suite import Subjects
from tests.regression import tiny
from trtllm_b12x_fix.emulator import reference
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import KNOWN_VERSIONS
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.law import Powers, Subject
from trtllm_b12x_fix.layer import move_magnitude

DOCUMENTS = [
    Document("gsm8k", str(n), tuple((7 * n + 3 * i * i) % 120 for i in range(length)), 4)
    for n, length in enumerate((12, 30, 7, 19))
]


@pytest.fixture(scope="module")
def subjects() -> Subjects:
    model = tiny.model()
    layers = experts.quantize(model, experts.calibrate(model, DOCUMENTS))
    return Subjects(model, layers, list(DOCUMENTS))


class TestReplacing:
    def test_documents_in_a_batch_do_not_see_each_other(self):
        model = tiny.model()
        together = hidden_states(model, DOCUMENTS)
        alone = torch.cat([hidden_states(model, [each]) for each in DOCUMENTS])
        assert together.shape[0] == sum(len(each.tokens) for each in DOCUMENTS)
        # Another batch shape may sum in another order, no more.
        assert (together.float() - alone.float()).abs().max() < 0.02 * alone.float().abs().max()
        assert torch.equal(hidden_states(model, DOCUMENTS, tokens_per_batch=1), alone)

    def test_its_own_mlp_as_the_function_changes_nothing(self):
        model = tiny.model()
        own = [layer.mlp for layer in model.layers]
        seen = []

        def function(number, x):
            seen.append((number, x.shape[0]))
            return own[number](x)

        assert torch.equal(
            hidden_states(model, DOCUMENTS, function), hidden_states(model, DOCUMENTS)
        )
        # One call per layer, all real tokens, no padding: each expert is decoded once.
        assert seen == [(0, 68), (1, 68)]

    def test_everything_is_put_back_even_after_an_error(self):
        model = tiny.model()
        before = hidden_states(model, DOCUMENTS)
        own = [layer.mlp for layer in model.layers]
        with pytest.raises(ZeroDivisionError), replaced(model, lambda n, x: x, k=9):
            raise ZeroDivisionError
        assert [layer.mlp for layer in model.layers] == own
        assert torch.equal(hidden_states(model, DOCUMENTS), before)

    def test_a_missing_model_says_how_to_get_it(self, tmp_path):
        with pytest.raises(InputError, match="make oracles"):
            load(tmp_path / "none.gguf", torch.device("cpu"))

    def test_a_broken_model_is_named(self, tmp_path):
        broken = tmp_path / "broken.gguf"
        broken.write_bytes(b"GGUF nothing else")
        with pytest.raises(InputError, match=r"broken\.gguf: transformers cannot read it"):
            load(broken, torch.device("cpu"))


class TestExperts:
    def test_experts_add_up_to_the_mlp(self):
        model = tiny.model()
        mlp = model.layers[0].mlp
        x = torch.randn(5, 64, dtype=torch.float64)
        whole = silu(x @ mlp.gate_proj.weight.double().t()) * (x @ mlp.up_proj.weight.double().t())
        whole = whole @ mlp.down_proj.weight.double().t()
        parts = experts.experts_of(model)[0]
        split = sum(
            (silu(x @ e.gate.double().t()) * (x @ e.up.double().t())) @ e.down.double().t()
            for e in parts
        )
        assert torch.allclose(whole, split)

    def test_quantized_as_modelopt_does(self, subjects):
        for layer, parts in zip(subjects.layers, experts.experts_of(subjects.model), strict=True):
            for number, expert in enumerate(parts):
                both = nvfp4.quantize(torch.cat([expert.up, expert.gate]))
                assert torch.equal(layer.fc1.packed[number], both.packed)
                assert torch.equal(layer.fc1.block_scale[number], both.block_scale)
                assert layer.fc1.weight_scale_2[number] == both.global_scale
                down = nvfp4.quantize(expert.down)
                assert torch.equal(layer.fc2.packed[number], down.packed)
                assert layer.fc2.weight_scale_2[number] == down.global_scale

    def test_calibration_is_the_largest_value_of_every_token(self, subjects):
        model = tiny.model()
        own = [layer.mlp for layer in model.layers]
        amax = []

        def look(number, x):
            amax.append(float(x.abs().max()))
            return own[number](x)

        hidden_states(model, DOCUMENTS, look)
        for layer, largest in zip(subjects.layers, amax, strict=True):
            assert torch.equal(layer.fc1.input_scale, torch.full((6,), largest) / 2688)
            assert layer.fc2.input_scale.unique().numel() == 6

    def test_a_calibration_of_another_model_is_refused(self, tmp_path):
        model = tiny.model()
        path = tmp_path / "calibration.json"
        document = experts.to_document(experts.calibrate(model, DOCUMENTS), {})
        path.write_text(json.dumps(document))
        assert experts.load_calibration(path, model).model_sha256 == model.sha256
        with pytest.raises(InputError, match="belongs to a model file"):
            experts.load_calibration(path, replace(model, sha256="f" * 64))
        document["calibration"]["fc1"].pop()
        path.write_text(json.dumps(document))
        with pytest.raises(InputError, match="1 layers, the model has 2"):
            experts.load_calibration(path, model)

    @pytest.mark.parametrize("content", ["", "[]", "{}", '{"calibration": {"fc1": []}}'])
    def test_a_broken_calibration_is_named(self, tmp_path, content):
        path = tmp_path / "calibration.json"
        path.write_text(content)
        with pytest.raises(InputError, match="not a calibration"):
            experts.load_calibration(path, tiny.model())


class TestArms:
    def test_w4a16_is_the_truth_up_to_bf16(self, subjects):
        layer = subjects.layers[0]
        x = torch.randn(9, 64).bfloat16()
        routing = experts.route_to_all(layer, 9, x.device)
        truth = reference.truth(layer, x, routing)
        ours = arms.w4a16(Subject(layer, x, routing)).double()
        assert (ours - truth).norm() < 0.004 * truth.norm()
        # The intermediate is rounded to bf16, as kernels do, so it is not the truth itself.
        assert (ours - truth.bfloat16().double()).norm() > 0

    def test_an_arm_and_its_kernel_belong_together(self):
        with pytest.raises(InputError, match="do not go together"):
            Variant(Arm.BAKED)
        with pytest.raises(InputError, match="do not go together"):
            Variant(Arm.REFERENCE, STATIC)

    def test_bf16_has_no_experts_to_run(self, subjects):
        with pytest.raises(InputError, match="launches no kernel"):
            arms.trace(Variant(Arm.BF16), 0, Subject(subjects.layers[0], None, None))

    def test_kernels_of_the_full_suite_are_all_arithmetics_there_are(self, subjects):
        """Every version and family has the bits of one of them, by name of its parts."""
        layer = subjects.layers[0]
        here = {replace(kernel.arithmetic(layer), name="") for kernel in suite.KERNELS}
        assert len(here) == len(suite.KERNELS)
        same = [each for kernel in suite.KERNELS for each in suite.same_bits(kernel, layer)]
        assert sorted(map(str, same)) == sorted(map(str, suite.every_kernel()))
        assert Kernel("0.7.4", KernelFamily.MICRO) in suite.same_bits(STATIC, layer)
        assert Kernel("0.7.2", KernelFamily.STATIC) not in suite.same_bits(STATIC, layer)
        for version in KNOWN_VERSIONS:
            assert len([each for each in same if each.version == version]) >= 4

    def test_suites_hold_each_variant_once_and_need_their_floor(self):
        for each in (suite.SMALL, suite.FULL):
            found = suite.variants(each, Powers(5, 5))
            assert len(found) == len(set(found))
            assert len({variant.name for variant in found}) == len(found)
            assert {v.arm for v in found if v.seed} >= {Arm.ALPHAS, Arm.BAKED}
        assert {v.arm for v in found} == set(Arm) - {Arm.BF16}


class TestTheLawOnANetwork:
    @pytest.mark.parametrize("k", [3, 7, -2])
    def test_the_bf16_model_itself_keeps_every_bit(self, k):
        """Norm weights times 2^k, gate and up over 2^k: no quantization anywhere."""
        model = tiny.model()
        before = hidden_states(model, DOCUMENTS)
        own = [layer.mlp for layer in model.layers]

        def divided(number, x):
            mlp = own[number]
            gate, up = (x @ (p.weight * 2.0**-k).t() for p in (mlp.gate_proj, mlp.up_proj))
            return mlp.down_proj(silu(gate) * up)

        assert torch.equal(hidden_states(model, DOCUMENTS, divided, k), before)

    @pytest.mark.parametrize(
        "variant", [Variant(Arm.W4A16), Variant(Arm.REFERENCE), Variant(Arm.ALPHAS, STATIC)]
    )
    @pytest.mark.parametrize("powers", [Powers(k=5), Powers(j=5), Powers(4, 6), Powers(-3, 9)])
    def test_exact_arms_too(self, subjects, variant, powers):
        own = suite.states_of(subjects, variant)
        assert torch.equal(suite.states_of(subjects, replace(variant, powers=powers)), own)

    @pytest.mark.parametrize("powers", [Powers(k=5), Powers(j=5)])
    def test_the_bake_does_not(self, subjects, powers):
        own = suite.states_of(subjects, Variant(Arm.BAKED, STATIC))
        moved = suite.states_of(subjects, Variant(Arm.BAKED, STATIC, powers))
        assert not torch.equal(moved, own)

    def test_another_order_of_adds_shows_and_is_repeatable(self, subjects):
        one = Variant(Arm.ALPHAS, STATIC)
        assert torch.equal(suite.states_of(subjects, one), suite.states_of(subjects, one))
        other = suite.states_of(subjects, replace(one, seed=1))
        assert not torch.equal(suite.states_of(subjects, one), other)

    def test_the_reference_has_another_order_too(self, subjects):
        one = Variant(Arm.REFERENCE)
        own, other = (suite.states_of(subjects, replace(one, seed=seed)) for seed in (0, 1))
        assert (own.float() - other.float()).abs().max() < 0.1 * own.float().abs().max()

    def test_layers_report_what_breaks(self, subjects, monkeypatch):
        inputs = layer_errors.record_inputs(subjects, 6, 0)
        found = layer_errors.measure(subjects.layers, inputs, range(7))
        assert [layer.violations for layer in found] == [[], []]
        assert not any(layer.baked_obeys or layer.falls for layer in found)
        assert all(len(layer.baked) == 7 for layer in found)
        monkeypatch.setattr(layer_errors, "LAWFUL", (Arm.BAKED,))
        broken = layer_errors.measure(subjects.layers, inputs, range(7))
        assert broken[1].violations[0].startswith("layer 1, baked: k=")

    def test_recorded_inputs_are_tokens_of_the_bf16_model(self, subjects):
        inputs = layer_errors.record_inputs(subjects, 6, 0)
        assert [x.shape for x in inputs] == [(6, 64)] * 2
        again = layer_errors.record_inputs(subjects, 6, 0)
        assert all(torch.equal(a, b) for a, b in zip(inputs, again, strict=True))
        other = layer_errors.record_inputs(subjects, 6, 1)
        assert not torch.equal(inputs[0], other[0])


class TestGeneration:
    PROMPTS = ([5, 9, 3], [4, 4, 8, 1, 7, 2], [60])

    def test_bf16_is_transformers_own_greedy_search(self, subjects):
        model = subjects.model
        found = generate.generate(model, subjects.layers, self.PROMPTS, Variant(Arm.BF16), 12)
        for prompt, answer in zip(self.PROMPTS, found, strict=True):
            theirs = model.causal.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
                max_new_tokens=12,
                do_sample=False,
                pad_token_id=0,
            )[0, len(prompt) :].tolist()
            theirs = theirs[: theirs.index(127)] if 127 in theirs else theirs
            # Padding moves a prompt in its batch, so a last bit may differ and a near tie turn.
            assert answer[:4] == theirs[:4]

    def test_prompts_are_read_by_the_reference_whatever_decodes(self, subjects):
        exact = Variant(Arm.REFERENCE, powers=Powers(5, 5))
        baked = Variant(Arm.BAKED, STATIC, Powers(5, 5))
        one, other = (
            generate.generate(subjects.model, subjects.layers, self.PROMPTS, v, 8)
            for v in (exact, baked)
        )
        assert [a[0] for a in one] == [a[0] for a in other]
        assert one != other

    def test_the_law_holds_token_for_token(self, subjects):
        own, moved = (
            generate.generate(subjects.model, subjects.layers, self.PROMPTS, v, 8)
            for v in (Variant(Arm.ALPHAS, STATIC), Variant(Arm.ALPHAS, STATIC, Powers(6, 4)))
        )
        assert own == moved

    def test_answers_stop_at_the_end_token(self):
        assert generate._until([3, 2, 9], 2) == [3]
        assert generate._until([3, 9], [7, 9]) == [3]
        assert generate._until([3, 9], 2) == [3, 9]


def test_moving_a_layer_is_what_the_layer_check_does(subjects):
    """Two places move magnitudes; they agree."""
    from trtllm_b12x_fix.law import move_layer

    layer = subjects.layers[0]
    ours, theirs = move_layer(layer, Powers(k=5)), move_magnitude(layer, 5)
    assert torch.equal(ours.fc1.weight_scale_2, theirs.fc1.weight_scale_2)
    assert torch.equal(ours.fc1.input_scale, theirs.fc1.input_scale)

"""A layer that TensorRT-LLM prepared: repaired, left alone, or refused by name and unchanged."""

from __future__ import annotations

import gc
import importlib.util
import os
import sys
import threading
import weakref
from dataclasses import replace
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.layers import make_inputs
from tests.trtllm.layers import as_loaded
from tests.trtllm_layers import (
    PARAMETERS,
    RELU2,
    SILU,
    THRESHOLD_OF_CLASS,
    VERSION,
    Bench,
    Layer,
    Method,
    Upstream,
    add_carrier,
    digest,
    entries_of,
    make_bench,
    make_module,
    prepared,
    set_block_scale,
    set_parameter,
    set_scale,
    storage,
)
from trtllm_b12x_fix import __version__, patching
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.contract import (
    InputQuantization,
    InputScaleArgument,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.errors import B12xFixError, InputError, ScaleError, UnsupportedVersionError
from trtllm_b12x_fix.integrations import flashinfer, tensorrt_llm
from trtllm_b12x_fix.integrations.b12x_dispatch import CUTOVER, DispatchHold
from trtllm_b12x_fix.integrations.b12x_wrapper import FORCE_W4A16
from trtllm_b12x_fix.integrations.tensorrt_llm import CLASS, on_import
from trtllm_b12x_fix.integrations.trtllm_contract import ENTRIES, ContractError
from trtllm_b12x_fix.integrations.trtllm_decode import THRESHOLD, baked_bytes, goes_to_cutlass
from trtllm_b12x_fix.integrations.trtllm_halves import LOADING
from trtllm_b12x_fix.integrations.trtllm_layer import LayerOutcome, repair_layer
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales, plan
from trtllm_b12x_fix.settings import LEDGER, Accumulate, Mode, OnUnknown, Settings, Verify

VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
SEPARATE = VERSIONS[1:]
LAYERS = {Activation.RELU2: RELU2, Activation.SILU: SILU}
#: All but 0.6.16's gated layers, whose decode goes to CUTLASS.
ON_B12X = [
    (version, activation)
    for version in VERSIONS
    for activation in Activation
    if plan(contract_for(version), activation).strategy is not Strategy.CUTLASS
]
NAN, INF = float("nan"), float("inf")
GIVEN = ("w1_alpha", "w2_alpha", "fc2_input_scale", "input_global_scale")
ALPHAS = ("fc31_alpha", "fc2_alpha")
RECIPROCALS = ("fc31_input_scale", "fc2_input_scale")
BLOCK_SCALES = ("w3_w1_weight_scale", "w2_weight_scale")
PROJECTION = dict(zip((*ALPHAS, *RECIPROCALS, *BLOCK_SCALES), ("FC1", "FC2") * 3, strict=True))


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products, often on a busy machine: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Bench:
    return make_bench(monkeypatch, tmp_path)


def repair(module: Any, version: str = "0.6.18", mode: Mode = Mode.AUTO) -> LayerOutcome:
    return repair_layer(module, mode, contract_for(version), VERSION)


def refusal(module: Any, version: str = "0.6.18", mode: Mode = Mode.AUTO) -> B12xFixError:
    """What the repair raises, having changed nothing."""
    parameters, entries = digest(module), getattr(module, "_b12x_weights", None)
    before = dict(entries) if isinstance(entries, dict) else entries
    with pytest.raises(B12xFixError) as caught:
        repair(module, version, mode)
    assert digest(module) == parameters
    after = getattr(module, "_b12x_weights", None)
    assert after is entries
    if isinstance(after, dict):
        assert after.keys() == before.keys()
        assert all(after[key] is before[key] for key in before)
    return caught.value


def assert_broken(module: Any, symbol: str) -> None:
    """Refused as an unknown TensorRT-LLM, with version, layer, symbol and ways out."""
    error = refusal(module)
    assert isinstance(error, ContractError), error
    for text in (VERSION, "layer 3", symbol, "TRTLLM_B12X_FIX=off", "backend: CUTLASS"):
        assert text in str(error), error


def plain(module: Any, name: str, value: Any) -> None:
    """Put something that is no parameter in the place of an attribute."""
    delattr(module, name)
    setattr(module, name, value)


# ---- attributes


@pytest.mark.parametrize(
    "name", [*PARAMETERS, "num_experts", "hidden_size", "_b12x_weights", "b12x_wrapper"]
)
def test_a_missing_attribute_is_named(bench, name):
    module = prepared()
    delattr(module, name)
    assert_broken(module, f"{name} is missing")


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_parameter_that_is_no_tensor_is_named(bench, name):
    module = prepared()
    plain(module, name, 0.5)
    assert_broken(module, f"{name} must be a tensor, is float")


WRONG_PARAMETERS = {
    ("w3_w1_weight", "as bytes"): lambda t: t.view(torch.uint8),
    ("w3_w1_weight", "an expert short"): lambda t: t[:-1],
    ("w3_w1_weight", "narrow"): lambda t: t[:, :, :-1].contiguous(),
    ("w3_w1_weight", "flat"): lambda t: t.flatten(1),
    ("w2_weight", "int32"): lambda t: t.view(torch.int32),
    ("w2_weight", "a row short"): lambda t: t[:, :-1].contiguous(),
    ("w2_weight", "flat"): lambda t: t.flatten(),
    ("w3_w1_weight_scale", "decoded"): lambda t: t.view(torch.float8_e4m3fn).float(),
    ("w3_w1_weight_scale", "bf16"): lambda t: t.view(torch.bfloat16),
    ("w3_w1_weight_scale", "an expert short"): lambda t: t[:-1],
    ("w3_w1_weight_scale", "strided"): lambda t: t.mT.contiguous().mT,
    ("w2_weight_scale", "a row short"): lambda t: t[:, :-1].contiguous(),
    ("w2_weight_scale", "twice"): lambda t: t.repeat(2, 1, 1),
    ("fc31_alpha", "fp64"): lambda t: t.double(),
    ("fc31_alpha", "an expert short"): lambda t: t[:-1],
    ("fc31_alpha", "a column"): lambda t: t[:, None],
    ("fc2_alpha", "bf16"): lambda t: t.bfloat16(),
    ("fc2_alpha", "one for all"): lambda t: t[0],
    ("fc31_input_scale", "per expert"): lambda t: t.expand(4).clone(),
    ("fc31_input_scale", "fp16"): lambda t: t.half(),
    ("fc2_input_scale", "[1]"): lambda t: t.reshape(1),
    ("fc2_input_scale", "fp64"): lambda t: t.double(),
}


@pytest.mark.parametrize(
    ("name", "change"),
    [(name, change) for (name, _), change in WRONG_PARAMETERS.items()],
    ids=[f"{name}, {what}" for name, what in WRONG_PARAMETERS],
)
def test_a_parameter_of_another_dtype_or_shape_is_named(bench, name, change):
    module = prepared()
    set_parameter(module, name, change(getattr(module, name).data))
    # FC1's other tensors are measured against w3_w1_weight, FC2's against w2_weight.
    error = refusal(module)
    assert isinstance(error, ContractError)
    assert name in str(error)
    assert "must " in str(error)
    assert "layer 3" in str(error)
    assert VERSION in str(error)


@pytest.mark.parametrize("name", ["num_experts", "hidden_size"])
@pytest.mark.parametrize("value", [0, -4, "4", 4.0, None])
def test_a_size_that_is_no_positive_integer_is_named(bench, name, value):
    module = prepared()
    setattr(module, name, value)
    assert_broken(module, f"{name} must be a positive integer, is {value!r}")


def test_a_layer_without_an_index_is_called_so(bench):
    module = prepared(index=None)
    del module.fc2_alpha
    assert "a layer without an index: fc2_alpha is missing" in str(refusal(module))


# ---- the wrapper's arguments


@pytest.mark.parametrize("value", [None, [], SimpleNamespace()])
def test_arguments_that_are_no_dict_are_refused(bench, value):
    module = prepared()
    module._b12x_weights = value
    assert_broken(module, "_b12x_weights must be a dict")


@pytest.mark.parametrize("key", ENTRIES)
def test_a_missing_argument_is_named(bench, key):
    module = prepared()
    del module._b12x_weights[key]
    assert_broken(module, f"_b12x_weights['{key}'] is missing")


@pytest.mark.parametrize("key", ENTRIES)
@pytest.mark.parametrize("value", [None, 1.0, "x" * 1000])
def test_an_argument_that_is_no_tensor_is_named(bench, key, value):
    module = prepared()
    module._b12x_weights[key] = value
    assert_broken(module, f"_b12x_weights['{key}'] is no tensor")
    assert len(str(refusal(module))) < 400


@pytest.mark.parametrize(
    "key",
    ["w1_alpha", "w2_alpha", "w1_weight_sf", "w2_weight_sf", "w1_weight", "w2_weight"],
)
def test_an_argument_of_another_length_is_named(bench, key):
    module = prepared()
    module._b12x_weights[key] = module._b12x_weights[key][:-1]
    assert_broken(module, f"_b12x_weights['{key}'] must ")


def test_an_fc2_input_scale_of_another_length_is_named(bench):
    module = prepared()
    module._b12x_weights["fc2_input_scale"] = torch.full((3,), 0.1)
    assert_broken(module, "_b12x_weights['fc2_input_scale'] must ")


@pytest.mark.parametrize("key", ["w1_alpha", "w2_alpha"])
@pytest.mark.parametrize("change", [torch.Tensor.double, lambda t: t[:, None]])
def test_alphas_of_another_kind_are_named(bench, key, change):
    module = prepared()
    module._b12x_weights[key] = change(module._b12x_weights[key])
    assert_broken(module, f"_b12x_weights['{key}'] must be torch.float32 [4]")


@pytest.mark.parametrize("key", ["w1_weight_sf", "w2_weight_sf"])
def test_block_scales_of_another_dtype_are_named(bench, key):
    module = prepared()
    module._b12x_weights[key] = module._b12x_weights[key].float()
    assert_broken(module, f"_b12x_weights['{key}']")


def test_another_layout_of_block_scales_is_refused(bench):
    module = prepared()
    scales = module._b12x_weights["w1_weight_sf"]
    module._b12x_weights["w1_weight_sf"] = scales.flatten(0, 1)
    error = refusal(module)
    assert isinstance(error, ContractError)
    assert "layer 3: FlashInfer's layout of block scales is" in str(error)


# ---- the wrapper


@pytest.mark.parametrize("named", ["gelu", None, 3])
def test_an_unknown_activation_is_named(bench, named):
    module = prepared()
    module.b12x_wrapper.activation = named
    assert_broken(module, f"b12x_wrapper.activation must be relu2 or silu, is {named!r}")


@pytest.mark.parametrize("name", ["num_experts", "hidden_size"])
def test_a_wrapper_told_other_sizes_is_refused(bench, name):
    module = prepared()
    setattr(module.b12x_wrapper, name, 7)
    assert_broken(module, f"b12x_wrapper.{name} must be {getattr(module, name)}, is 7")


@pytest.mark.parametrize(
    ("files", "wrapper", "words"),
    [("0.6.18", "0.6.16", "does not take"), ("0.6.16", "0.6.18", "takes")],
)
def test_a_signature_against_the_files_is_refused(bench, files, wrapper, words):
    error = refusal(prepared(flashinfer=wrapper), files)
    assert isinstance(error, ContractError)
    assert f"FlashInfer {files}, layer 3: B12xMoEWrapper.run {words} input_global_scale" in str(
        error
    )


def test_a_wrapper_without_run_is_refused(bench):
    module = prepared()
    module.b12x_wrapper = SimpleNamespace(
        num_experts=4, hidden_size=128, intermediate_size=128, activation="relu2"
    )
    assert_broken(module, "b12x_wrapper.run")


def narrow(activation: Activation, intermediate: int):
    """A layer that upstream pads."""
    layer = LAYERS[activation]
    rows = activation.fc1_rows(intermediate)
    fc1 = replace(
        layer.fc1, packed=layer.fc1.packed[:, :rows], block_scale=layer.fc1.block_scale[:, :rows]
    )
    fc2 = replace(
        layer.fc2,
        packed=layer.fc2.packed[:, :, : intermediate // 2],
        block_scale=layer.fc2.block_scale[:, :, : intermediate // 16],
    )
    return replace(layer, fc1=fc1, fc2=fc2)


def test_a_wrapper_told_the_logical_size_is_refused(bench):
    error = refusal(prepared(narrow(Activation.RELU2, 96), told=96))
    assert isinstance(error, ContractError)
    for text in (VERSION, "layer 3", "intermediate size 96", "have 128", "backend: CUTLASS"):
        assert text in str(error)


def test_a_padded_layer_is_repaired_where_the_wrapper_is_told_the_padded_size(bench):
    assert repair(prepared(narrow(Activation.RELU2, 96))).strategy is Strategy.ALPHAS


def test_displaced_halves_are_refused(bench):
    """[up 96; gate 96; 64 zeros] is split at 128: 32 rows of gate become up."""
    error = refusal(prepared(narrow(Activation.SILU, 96)))
    assert isinstance(error, ContractError)
    for text in ("layer 3", "96 rows each", "padded to 256", "split at 128", "multiple of 128"):
        assert text in str(error)


def test_gate_and_up_that_fill_the_tile_are_repaired(bench):
    module = prepared(narrow(Activation.SILU, 64))
    assert module.w3_w1_weight.shape[1] == 128
    assert repair(module).strategy is Strategy.ALPHAS


def test_rows_that_fit_no_activation_are_refused(bench):
    module = prepared(SILU)
    module.b12x_wrapper.activation = "relu2"
    assert "layer 3: FC1 has 256 rows, FC2 takes 128" in str(refusal(module))


# ---- how the process runs b12x


def test_an_awq_activation_scale_is_refused(bench):
    module = prepared()
    module.fc31_act_scale = torch.ones(128)
    assert_broken(module, "fc31_act_scale is there (NVFP4_AWQ)")


def test_fp16_is_refused(bench):
    module = prepared()
    module.dtype = torch.float16
    error = refusal(module)
    assert isinstance(error, InputError)
    for text in ("layer 3", "float16", "bfloat16", "backend: CUTLASS"):
        assert text in str(error)


@pytest.mark.parametrize("dtype", [torch.bfloat16, None])
def test_bf16_or_no_word_about_it_is_fine(bench, dtype):
    module = prepared()
    module.dtype = dtype
    assert repair(module).strategy is Strategy.ALPHAS


def test_forced_w4a16_is_refused(bench):
    bench.patch.setenv(FORCE_W4A16, "1")
    error = refusal(prepared())
    assert isinstance(error, InputError)
    assert f"{FORCE_W4A16}=1" in str(error)
    assert "unset it" in str(error)


@pytest.mark.parametrize("value", ["0", ""])
def test_w4a16_not_forced_is_fine(bench, value):
    bench.patch.setenv(FORCE_W4A16, value)
    assert repair(prepared()).strategy is Strategy.ALPHAS


# ---- scales


def damaged(change, **options) -> Layer:
    """The checkpoint is wrong, so the hook has seen it, too."""
    module = make_module(**options)
    change(module)
    Method(contract_for("0.6.18")).transform_weights(module)
    return module


@pytest.mark.parametrize("name", ALPHAS)
@pytest.mark.parametrize("value", [NAN, -0.5, 0.0, INF, -INF])
@pytest.mark.parametrize("expert", [0, 2, 3])
def test_an_alpha_no_kernel_can_use_is_refused_by_expert(bench, name, value, expert):
    error = refusal(damaged(set_scale(name, value, expert)))
    assert isinstance(error, ScaleError)
    assert f"layer 3, expert {expert}: {PROJECTION[name]}'s weight_scale_2" in str(error)
    assert repr(value) in str(error)


@pytest.mark.parametrize("name", ALPHAS)
@pytest.mark.parametrize("expert", [0, 2, 3])
def test_an_alpha_that_was_never_loaded_is_refused_by_expert(bench, name, expert):
    error = refusal(damaged(set_scale(name, 1.0, expert)))
    assert isinstance(error, ScaleError)
    words = f"layer 3, expert {expert}: {PROJECTION[name]}'s weight_scale_2 was never loaded"
    assert words in str(error)
    assert "the checkpoint lacks it" in str(error)


@pytest.mark.parametrize("name", RECIPROCALS)
@pytest.mark.parametrize("value", [NAN, -2.0, 0.0, INF])
def test_an_input_scale_no_kernel_can_use_is_refused(bench, name, value):
    error = refusal(damaged(set_scale(name, value)))
    assert isinstance(error, ScaleError)
    words = f"layer 3: the reciprocal of the {PROJECTION[name]} input_scale is {value!r}"
    assert words in str(error)
    assert "the checkpoint's input_scale" in str(error)


@pytest.mark.parametrize("name", RECIPROCALS)
def test_an_input_scale_that_was_never_loaded_is_refused(bench, name):
    error = refusal(damaged(set_scale(name, 1.0)))
    assert isinstance(error, ScaleError)
    assert f"layer 3: the {PROJECTION[name]} input_scale was never loaded" in str(error)
    assert "calibrate" in str(error)


@pytest.mark.parametrize("name", BLOCK_SCALES)
@pytest.mark.parametrize(
    ("byte", "word"), [(0x7F, "NaN"), (0xFF, "NaN"), (0x81, "negative"), (0xFE, "negative")]
)
@pytest.mark.parametrize("expert", [0, 2, 3])
def test_a_block_scale_no_kernel_can_use_is_refused_by_expert(bench, name, byte, word, expert):
    error = refusal(damaged(lambda module: set_block_scale(module, name, expert, byte)))
    assert isinstance(error, ScaleError)
    where = f"layer 3, expert {expert}: {PROJECTION[name]} has a block scale that is "
    assert where in str(error)
    assert word in str(error).removeprefix(where)
    assert "(1 of 4 experts): the checkpoint is damaged" in str(error)


@pytest.mark.parametrize("name", BLOCK_SCALES)
@pytest.mark.parametrize("byte", [0, 1, 0x7E])
def test_zero_and_the_largest_block_scale_are_legitimate(bench, name, byte):
    """Padding rows have zero scales."""
    module = damaged(lambda module: set_block_scale(module, name, 2, byte))
    assert repair(module).strategy is Strategy.ALPHAS


# ---- weight_scale_2 that the layer keeps (dynamic quantization)


def test_weight_scale_2_that_the_layer_keeps_is_used(bench):
    module = prepared(dynamic=True)
    repair(module)
    assert torch.equal(module._b12x_weights["w1_alpha"], RELU2.fc1.weight_scale_2)


@pytest.mark.parametrize("name", ["fc31_weight_scale_2", "fc2_weight_scale_2"])
def test_weight_scale_2_of_another_shape_is_named(bench, name):
    module = prepared(dynamic=True)
    set_parameter(module, name, getattr(module, name).data[:-1])
    assert_broken(module, f"{name} must be torch.float32 [4]")


@pytest.mark.parametrize("value", [NAN, 0.0, -1e-5, INF])
def test_weight_scale_2_that_the_layer_keeps_is_checked(bench, value):
    module = prepared(dynamic=True)
    set_scale("fc31_weight_scale_2", value, 2)(module)
    assert "expert 2" in str(refusal(module))


def test_a_tie_does_not_hide_the_bake_from_a_layer_with_dynamic_quantization(bench):
    """Where weight_scale_2 has few bits, as amax / 2688 has for 6 of 128 bf16 mantissas."""
    few_bits, input_scale = torch.full((4,), 11 * 2.0**-18), torch.full((4,), 1.27e-3)
    fc1 = replace(RELU2.fc1, weight_scale_2=few_bits, input_scale=input_scale)
    module = prepared(replace(RELU2, fc1=fc1), dynamic=True)
    recovered = module.fc31_alpha * module.fc31_input_scale
    assert not torch.equal(recovered, module.fc31_weight_scale_2)
    assert repair(module).strategy is Strategy.ALPHAS


# ---- what upstream did to the block scales


def test_block_scales_that_are_neither_are_refused(bench):
    error = refusal(prepared(upstream=Upstream.LOST))
    assert isinstance(error, ContractError)
    for text in (VERSION, "layer 3", "neither the checkpoint's nor those multiplied"):
        assert text in str(error)


@pytest.mark.parametrize("key", ["w1_weight_sf", "w2_weight_sf"])
@pytest.mark.parametrize("expert", [0, -1])
def test_a_bake_of_some_experts_is_refused(bench, key, expert):
    module = prepared()
    intact = entries_of(module, Upstream.INTACT_COPY)[key]
    module._b12x_weights[key][..., expert] = intact[..., expert]
    assert "neither the checkpoint's nor those multiplied" in str(refusal(module))


INTACT = [Upstream.INTACT_VIEW, Upstream.INTACT_COPY]


@pytest.mark.parametrize("upstream", INTACT)
def test_intact_scales_without_a_carrier_are_refused(bench, upstream):
    error = refusal(prepared(upstream=upstream))
    assert isinstance(error, ContractError)
    for text in (VERSION, "layer 3", "intact", "no argument carries weight_scale_2"):
        assert text in str(error)


@pytest.mark.parametrize("upstream", INTACT)
def test_intact_scales_with_a_carrier_are_left_alone(bench, upstream):
    module = prepared(upstream=upstream, carries=True)
    before = dict(module._b12x_weights)
    outcome = repair(module)
    assert (outcome.strategy, outcome.freed) == (None, 0)
    assert outcome.reason == "upstream keeps block scales intact"
    assert all(module._b12x_weights[key] is before[key] for key in before)


def test_an_fc2_input_scale_per_expert_is_a_carrier(bench):
    module = prepared(flashinfer="0.6.16", upstream=Upstream.INTACT_VIEW)
    module._b12x_weights["fc2_input_scale"] = torch.full((4,), 0.1)
    assert repair(module, "0.6.16").strategy is None


def test_a_bake_with_a_carrier_is_still_a_bake(bench):
    module = prepared()
    add_carrier(module)
    assert repair(module).strategy is Strategy.ALPHAS


@pytest.mark.parametrize(
    "algorithm", [SimpleNamespace(name="W4A16_NVFP4"), "W4A16_NVFP4"], ids=["enum", "string"]
)
def test_w4a16_is_left_alone(bench, algorithm):
    module = prepared(upstream=Upstream.INTACT_VIEW)
    module.quant_config.quant_algo = algorithm
    module._b12x_weights["fc2_input_scale"] = None
    before = dict(module._b12x_weights)
    outcome = repair(module)
    assert (outcome.strategy, outcome.view, outcome.freed) == (None, None, 0)
    assert outcome.reason == "W4A16_NVFP4 is not baked"
    assert module._b12x_weights == before


def test_w4a16_needs_no_known_flashinfer(bench):
    bench.use_error(None)
    module = bench.prepare(make_module(quant_algo="W4A16_NVFP4"))
    assert module.decode() == "b12x"
    assert bench.record()["layers"] == {"unchanged": 1}


# ---- the strategy


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("activation", Activation)
def test_the_plan_is_followed(bench, version, activation):
    outcome = repair(prepared(LAYERS[activation], version), version)
    planned = plan(contract_for(version), activation)
    assert (outcome.strategy, outcome.reason) == (planned.strategy, planned.reason)
    assert outcome.name == "layer 3"


def test_alphas_are_computed_right(bench):
    module = prepared()
    repair(module)
    entries = module._b12x_weights
    assert entries.keys() == {*ENTRIES, "input_global_scale"}
    s1, s2 = 1.0 / module.fc31_input_scale, 1.0 / module.fc2_input_scale
    assert torch.equal(entries["w1_alpha"], module.fc31_alpha * module.fc31_input_scale)
    assert torch.equal(entries["input_global_scale"], s1)
    assert torch.equal(entries["fc2_input_scale"], s2)
    assert torch.equal(entries["w2_alpha"], module.fc2_alpha)
    # The checkpoint's own figures, to the ulps of two reciprocals.
    fc1, fc2 = RELU2.fc1, RELU2.fc2
    close = {"rtol": 1e-6, "atol": 0.0}
    torch.testing.assert_close(entries["w1_alpha"], fc1.weight_scale_2, **close)
    torch.testing.assert_close(entries["input_global_scale"], fc1.largest_input_scale, **close)
    torch.testing.assert_close(entries["fc2_input_scale"], fc2.largest_input_scale, **close)
    wanted = fc2.weight_scale_2 * fc2.largest_input_scale
    torch.testing.assert_close(entries["w2_alpha"], wanted, **close)


def test_rescaled_scales_are_computed_right(bench):
    module = prepared(flashinfer="0.6.16")
    repair(module, "0.6.16")
    entries = module._b12x_weights
    assert entries.keys() == set(ENTRIES)
    fc1, fc2 = RELU2.fc1, RELU2.fc2
    close = {"rtol": 1e-6, "atol": 0.0}
    torch.testing.assert_close(
        entries["w1_alpha"], fc1.largest_input_scale.expand(4).contiguous(), **close
    )
    wanted = fc2.largest_input_scale.double() / fc1.weight_scale_2.double() ** 2
    torch.testing.assert_close(entries["fc2_input_scale"], wanted.float(), **close)
    wanted = fc2.weight_scale_2 * fc2.largest_input_scale
    torch.testing.assert_close(entries["w2_alpha"], wanted, **close)


@pytest.mark.parametrize("version", SEPARATE)
def test_fp32_rescale_can_be_asked_for(bench, version):
    module = prepared(flashinfer=version)
    outcome = repair(module, version, Mode.FP32_RESCALE)
    assert (outcome.strategy, outcome.reason) == (Strategy.FP32_RESCALE, "asked for")
    assert module._b12x_weights.keys() == set(ENTRIES)
    assert module._b12x_weights["fc2_input_scale"].shape == (4,)


@pytest.mark.parametrize("version", SEPARATE)
@pytest.mark.parametrize("activation", Activation)
def test_alphas_can_be_asked_for(bench, version, activation):
    module = prepared(LAYERS[activation], version)
    assert repair(module, version, Mode.ALPHAS).strategy is Strategy.ALPHAS


@pytest.mark.parametrize("version", VERSIONS)
def test_fp32_rescale_of_a_gated_layer_is_refused(bench, version):
    error = refusal(prepared(SILU, version), version, Mode.FP32_RESCALE)
    assert isinstance(error, InputError)
    for text in ("TRTLLM_B12X_FIX=fp32-rescale needs relu2", "silu", version, "=auto"):
        assert text in str(error)


@pytest.mark.parametrize("activation", Activation)
def test_alphas_without_input_global_scale_are_refused(bench, activation):
    error = refusal(prepared(LAYERS[activation], "0.6.16"), "0.6.16", Mode.ALPHAS)
    assert isinstance(error, InputError)
    for text in ("TRTLLM_B12X_FIX=alphas needs FlashInfer 0.6.17 or later", "0.6.16", "=auto"):
        assert text in str(error)


def with_weight_scale_2(value: float, expert: int):
    scales = RELU2.fc1.weight_scale_2.clone()
    scales[expert] = value
    return replace(RELU2, fc1=replace(RELU2.fc1, weight_scale_2=scales))


@pytest.mark.parametrize("expert", [0, 2])
def test_weight_scale_2_too_small_to_be_squared_is_refused(bench, expert):
    error = refusal(prepared(with_weight_scale_2(5e-20, expert), "0.6.16"), "0.6.16")
    assert isinstance(error, ContractError)
    for text in (f"layer 3, expert {expert}", "5e-20", "fc2_input_scale", "0.6.17 or later"):
        assert text in str(error)


def test_weight_scale_2_that_small_rides_in_the_alphas(bench):
    assert repair(prepared(with_weight_scale_2(5e-20, 2))).strategy is Strategy.ALPHAS


def test_the_smallest_weight_scale_2_stays_finite_as_its_square_would_not(bench):
    module = prepared(with_weight_scale_2(1.05e-19, 2), "0.6.16")
    assert repair(module, "0.6.16").strategy is Strategy.FP32_RESCALE
    assert bool(torch.isfinite(module._b12x_weights["fc2_input_scale"]).all())


# ---- what the wrapper computes with the new arguments


@pytest.mark.parametrize(("version", "activation"), ON_B12X)
def test_decode_is_the_emulated_repair_bit_for_bit(bench, version, activation):
    layer = LAYERS[activation]
    contract = contract_for(version)
    planned = plan(contract, activation)
    bench.use(version)
    module = bench.prepare(make_module(layer), bench.process(verify=Verify.OFF))
    x, routing = make_inputs(layer, tokens=3, top_k=2)
    with torch.inference_mode():
        live = module.b12x_wrapper.run(
            x=x,
            token_selected_experts=routing.expert_ids.int(),
            token_final_scales=routing.weights,
            **module._b12x_weights,
        )
    seen = as_loaded(layer)
    scales = input_scales(seen, InputScales.LAYER)
    args = arguments(planned.strategy, seen, *scales, contract)
    args = replace(args, w2_alpha=module.fc2_alpha.data)
    shared = contract.input_scale is InputScaleArgument.SEPARATE
    shape = Shape(
        *(3, 2, layer.hidden, layer.intermediate, layer.experts, activation),
        sharing=InputQuantization.SHARED if shared else InputQuantization.PER_ROUTE,
    )
    family = contract.without(*planned.keep_out).select(shape)
    arithmetic = contract.arithmetic(family, shape)
    assert torch.equal(live, moe.run(args.launch(seen), x, routing, arithmetic, 5).output)


# ---- memory


@pytest.mark.parametrize("version", ["0.6.16", "0.6.18"])
def test_parameters_keep_every_byte(bench, version):
    module = make_module()
    before = digest(module)
    bench.use(version)
    bench.prepare(module)
    assert digest(module) == before


@pytest.mark.parametrize("version", ["0.6.16", "0.6.18"])
def test_block_scales_are_the_parameters_own_memory(bench, version):
    module = prepared(flashinfer=version)
    repair(module, version)
    entries = module._b12x_weights
    assert storage(entries["w1_weight_sf"]) == storage(module.w3_w1_weight_scale)
    assert storage(entries["w2_weight_sf"]) == storage(module.w2_weight_scale)
    assert storage(entries["w1_weight"]) == storage(module.w3_w1_weight)


@pytest.mark.parametrize("version", ["0.6.16", "0.6.18"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_small_arguments_are_nobody_elses_memory(bench, version, dynamic):
    """Dynamic quantization changes alphas in place."""
    module = prepared(flashinfer=version, dynamic=dynamic)
    repair(module, version)
    owned = {storage(tensor) for tensor in module.parameters()}
    given = [module._b12x_weights[key] for key in GIVEN if key in module._b12x_weights]
    assert owned.isdisjoint(storage(tensor) for tensor in given)
    assert len({storage(tensor) for tensor in given}) == len(given)
    assert all(tensor.is_contiguous() and tensor.dtype == torch.float32 for tensor in given)


@pytest.mark.parametrize("activation", Activation)
def test_freed_bytes_are_those_of_the_baked_copies(bench, activation):
    module = prepared(LAYERS[activation], "0.7.4")
    scales = module.w3_w1_weight_scale, module.w2_weight_scale
    assert repair(module, "0.7.4").freed == sum(4 * tensor.numel() for tensor in scales)


def test_only_copies_are_freed(bench):
    """Baked in FC1 alone: a state that is refused, but counted rightly."""
    module = prepared()
    intact = entries_of(module, Upstream.INTACT_VIEW)
    module._b12x_weights["w2_weight_sf"] = intact["w2_weight_sf"]
    wanted = 4 * module.w3_w1_weight_scale.numel()
    assert baked_bytes(module) == wanted


@pytest.mark.parametrize("version", ["0.6.16", "0.6.18"])
@pytest.mark.parametrize("dynamic", [False, True])
def test_arguments_have_versions_even_when_the_layer_was_made_in_inference_mode(
    bench, version, dynamic
):
    """FlashInfer's fold asks for them; it raises for inference tensors."""
    with torch.inference_mode():
        module = prepared(flashinfer=version, inference=True, dynamic=dynamic)
        assert module.fc2_alpha.is_inference()
        repair(module, version)
    given = {key: module._b12x_weights[key] for key in GIVEN if key in module._b12x_weights}
    for key, tensor in given.items():
        assert not tensor.is_inference(), key
        assert isinstance(tensor._version, int), key


# ---- on_import


def quantization(**classes: type) -> ModuleType:
    module = ModuleType("tensorrt_llm._torch.moe.fused_moe.quantization")
    vars(module).update(classes)
    return module


def owner(*names: str, bases: tuple[type, ...] = ()) -> type:
    methods = {name: lambda self, module: None for name in names}
    return type(CLASS, bases, methods | {"__module__": "tensorrt_llm.quantization"})


@pytest.fixture
def installed_version(monkeypatch) -> None:
    found = {"tensorrt_llm": VERSION}
    monkeypatch.setattr(tensorrt_llm.metadata, "version", found.__getitem__)


def test_a_module_without_the_class_is_left_alone(installed_version):
    planned = on_import(quantization(), Settings(mode=Mode.AUTO))
    assert planned.patches == ()
    assert f"has no {CLASS}" in planned.note
    assert planned.versions == {"tensorrt_llm": VERSION}


@pytest.mark.parametrize(
    ("defined", "inherited", "patched"),
    [
        (["transform_weights"], [], "transform_weights"),
        (["post_load_weights"], [], "post_load_weights"),
        (["post_load_weights"], ["transform_weights"], "post_load_weights"),
        (["post_load_weights", "transform_weights"], [], "transform_weights"),
    ],
)
def test_the_hook_that_the_class_itself_defines_is_patched(
    installed_version, defined, inherited, patched
):
    kind = owner(*defined, bases=(owner(*inherited),))
    (patch,) = on_import(quantization(**{CLASS: kind}), Settings(mode=Mode.AUTO)).patches
    assert (patch.owner, patch.attribute) == (kind, patched)


def test_loading_is_watched_on_the_class_alone(installed_version):
    """CUTLASS's layers, on every GPU, have the base's method."""
    base = owner(LOADING)
    kind = owner("transform_weights", bases=(base,))
    _, watch = on_import(quantization(**{CLASS: kind}), Settings(mode=Mode.AUTO)).patches
    assert (watch.owner, watch.attribute) == (kind, LOADING)


def test_a_version_nobody_tells_is_said_to_be_unknown(monkeypatch):
    def version(name):
        raise tensorrt_llm.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(tensorrt_llm.metadata, "version", version)
    assert on_import(quantization(), Settings()).versions == {"tensorrt_llm": "of unknown version"}


def test_the_other_distribution_name_is_asked_too(monkeypatch):
    def version(name):
        if name == "tensorrt_llm":
            raise tensorrt_llm.metadata.PackageNotFoundError(name)
        return VERSION

    monkeypatch.setattr(tensorrt_llm.metadata, "version", version)
    assert tensorrt_llm.tensorrt_llm_version() == VERSION


# ---- FlashInfer missing or unknown


UNKNOWN = UnsupportedVersionError("FlashInfer 0.9.0: its b12x kernel contract is not known here")


def without_flashinfer(bench: Bench) -> str:
    find = importlib.util.find_spec
    bench.patch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "flashinfer" else find(name)
    )
    bench.patch.setattr(tensorrt_llm, "installed_contract", flashinfer.installed_contract)
    return "FlashInfer is not installed"


def with_unknown_flashinfer(bench: Bench) -> str:
    bench.use_error(UNKNOWN)
    return "FlashInfer 0.9.0"


LACKING = {"missing": without_flashinfer, "unknown": with_unknown_flashinfer}


@pytest.mark.parametrize("lacking", LACKING.values(), ids=LACKING)
def test_flashinfer_missing_or_unknown_stops_the_start(bench, lacking):
    words = lacking(bench)
    module = make_module()
    with pytest.raises(UnsupportedVersionError, match=words) as caught:
        bench.prepare(module)
    for text in ("TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass", "TRTLLM_B12X_FIX=off"):
        assert text in str(caught.value)
    (warning,) = bench.record()["warnings"]
    assert warning.startswith("layer 3 stopped the start: ")
    assert words in warning
    assert bench.record()["layers"] == {}


@pytest.mark.parametrize("lacking", LACKING.values(), ids=LACKING)
def test_flashinfer_missing_or_unknown_sends_decode_to_cutlass(bench, lacking):
    words = lacking(bench)
    module = bench.prepare(make_module(), bench.process(on_unknown=OnUnknown.CUTLASS))
    assert_on_cutlass(module)
    assert words in bench.log.warnings[0]


def test_a_flashinfer_without_a_version_number_follows_the_policy(bench):
    bench.use_error(InputError("not a FlashInfer version: 'nightly'"))
    module = bench.prepare(make_module(), bench.process(on_unknown=OnUnknown.CUTLASS))
    assert_on_cutlass(module)


# ---- the policy


def assert_on_cutlass(module: Layer) -> None:
    """The layer's decode left b12x, and the layer's alone."""
    assert module.decode() == "CUTLASS"
    assert goes_to_cutlass(module)
    assert vars(module)[THRESHOLD] == 0
    assert getattr(type(module), THRESHOLD) == THRESHOLD_OF_CLASS
    assert module._b12x_weights is None
    assert module.b12x_wrapper is None


def test_damage_stops_the_start_with_ways_out(bench):
    module = make_module()
    set_scale("fc2_alpha", NAN, 2)(module)
    with pytest.raises(ScaleError, match="layer 3, expert 2: FC2") as caught:
        bench.prepare(module)
    for text in ("TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass", "CUTLASS", "TRTLLM_B12X_FIX=off"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("flashinfer", "wrapper", "mode"),
    [("0.6.18", "0.6.16", Mode.AUTO), ("0.6.16", "0.6.16", Mode.ALPHAS)],
    ids=["signature", "no exact form"],
)
def test_every_refusal_stops_the_start_with_ways_out(bench, flashinfer, wrapper, mode):
    bench.use(flashinfer)
    with pytest.raises(B12xFixError) as caught:
        bench.prepare(make_module(), bench.process(mode=mode), Method(contract_for(wrapper)))
    for text in ("TRTLLM_B12X_FIX_ON_UNKNOWN=cutlass", "TRTLLM_B12X_FIX=off", flashinfer):
        assert text in str(caught.value)


def test_damage_sends_its_layers_decode_to_cutlass_and_no_others(bench):
    process = bench.process(on_unknown=OnUnknown.CUTLASS)
    first, bad, last = (make_module(index=index) for index in (1, 2, 4))
    set_scale("fc2_alpha", NAN, 2)(bad)
    before = digest(bad)
    for module in (first, bad, last):
        bench.prepare(module, process)
    assert_on_cutlass(bad)
    assert digest(bad) == before
    for module in (first, last):
        assert module.decode() == "b12x"
        assert "input_global_scale" in module._b12x_weights
    (warning,) = [line for line in bench.log.warnings if "CUTLASS" in line]
    assert "layer 2, expert 2: FC2's weight_scale_2" in warning
    assert bench.record()["layers"] == {"alphas": 2, "cutlass": 1}


def test_prefill_of_a_layer_on_cutlass_stays_there(bench):
    module = make_module()
    set_scale("fc2_alpha", NAN, 2)(module)
    bench.prepare(module, bench.process(on_unknown=OnUnknown.CUTLASS))
    assert [module.decode(tokens) for tokens in (1, 63, 64, 4096)] == ["CUTLASS"] * 4


def test_the_next_preparation_decides_anew(bench):
    process = bench.process(on_unknown=OnUnknown.CUTLASS)
    module = make_module()
    good = module.fc2_alpha.data.clone()
    set_scale("fc2_alpha", NAN, 2)(module)
    bench.prepare(module, process)
    assert_on_cutlass(module)
    set_parameter(module, "fc2_alpha", good)  # a reload of better weights
    bench.prepare(module, process)
    assert module.decode() == "b12x"
    assert not goes_to_cutlass(module)
    assert "input_global_scale" in module._b12x_weights


def test_a_layer_that_a_reload_repaired_counts_as_repaired(bench):
    process = bench.process(on_unknown=OnUnknown.CUTLASS)
    module = make_module()
    good = module.fc2_alpha.data.clone()
    set_scale("fc2_alpha", NAN, 2)(module)
    bench.prepare(module, process)
    set_parameter(module, "fc2_alpha", good)
    bench.prepare(module, process)
    assert bench.record()["layers"] == {"alphas": 1}


def test_no_exact_form_sends_decode_to_cutlass_whatever_the_policy(bench):
    bench.use("0.6.16")
    module = bench.prepare(make_module(SILU))
    assert_on_cutlass(module)
    assert bench.record()["layers"] == {"cutlass": 1}
    assert bench.record()["bytes_freed"] == 4 * 3 * 128 * 8


@pytest.mark.parametrize("name", [THRESHOLD, "_route_to_cutlass"])
def test_a_backend_that_decides_otherwise_is_refused(bench, name):
    bench.patch.delattr(Layer, name)
    module = make_module()
    set_scale("fc2_alpha", NAN, 2)(module)
    with pytest.raises(ContractError) as caught:
        bench.prepare(module, bench.process(on_unknown=OnUnknown.CUTLASS))
    for text in (VERSION, "layer 3", name, "backend: CUTLASS"):
        assert text in str(caught.value)
    assert THRESHOLD not in vars(module)


# ---- FlashInfer's dispatch


@pytest.mark.parametrize("version", VERSIONS)
def test_direct_micro_is_held_where_it_misreads(bench, version):
    bench.use(version)
    bench.prepare(make_module())
    wanted = 0 if version == "0.6.18" else 512
    assert wanted == bench.dispatch._DIRECT_MICRO_MAX_N


def test_w4a16_holds_nothing(bench):
    bench.prepare(make_module(quant_algo="W4A16_NVFP4"))
    assert bench.dispatch._DIRECT_MICRO_MAX_N == 512


def test_an_upstream_that_keeps_scales_intact_needs_direct_micro_out_too(bench):
    """It misreads calibrated input scales, whoever passes them."""
    bench.prepare(make_module(), method=bench.method(upstream=Upstream.INTACT_VIEW, carries=True))
    assert bench.dispatch._DIRECT_MICRO_MAX_N == 0
    assert bench.record()["layers"] == {"unchanged": 1}
    assert bench.record()["checks"]["counts"] == {"passed": 1}


def test_fp32_sums_are_asked_for_before_the_wrapper_is_made(bench):
    bench.use("0.7.4")
    module = make_module()
    module.routing_method.experts_per_token = 22
    method = bench.method()
    process = bench.process(accumulate=Accumulate.FP32, verify=Verify.OFF)
    bench.prepare(module, process, method)
    assert method.bands == ["2016"]
    assert bench.dispatch._MICRO_COMPACT_CUTOVER_PAIRS == 0
    assert bench.dispatch._MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK == 0


def test_fp32_sums_that_do_not_exist_are_told_once(bench):
    process = bench.process(accumulate=Accumulate.FP32)
    for index in range(3):
        bench.prepare(make_module(index=index), process)
    told = [line for line in bench.log.warnings if "ACCUMULATE" in line]
    assert len(told) == 1
    assert "0.6.18" in told[0]


def test_w4a16_asks_for_no_sums(bench):
    bench.use("0.7.4")
    module = make_module(quant_algo="W4A16_NVFP4")
    module.routing_method.experts_per_token = 22
    method = bench.method()
    bench.prepare(module, bench.process(accumulate=Accumulate.FP32), method)
    assert method.bands == [None]
    assert CUTOVER not in os.environ


# ---- reports


def test_one_line_and_one_record_say_what_was_done(bench):
    process = bench.process()
    for index in range(3):
        bench.prepare(make_module(index=index), process)
    (check,) = bench.record()["checks"]["last"]
    reason = plan(contract_for("0.6.18"), Activation.RELU2).reason
    assert bench.line() == (
        f"trtllm-b12x-fix {__version__} on TensorRT-LLM {VERSION}, FlashInfer 0.6.18: alphas in 3 "
        f"layers ({reason}); 0.0 MiB of baked scales given back; layer 0: {check['detail']}. All "
        "processes: trtllm-b12x-fix status"
    )
    record = bench.record()
    assert record["layers"] == {"alphas": 3}
    assert record["bytes_freed"] == 3 * 4 * 2 * 128 * 8
    assert record["versions"] == {"tensorrt_llm": VERSION, "flashinfer": "0.6.18"}


def test_a_layer_prepared_twice_counts_once(bench):
    process, module = bench.process(), make_module()
    for _ in range(2):
        bench.prepare(module, process)
        assert "input_global_scale" in module._b12x_weights
    record = bench.record()
    assert record["layers"] == {"alphas": 1}
    assert record["bytes_freed"] == 4 * 2 * 128 * 8


@pytest.mark.parametrize("kind", ["a file", "a file above it", "nowhere"])
def test_a_ledger_that_cannot_be_written_breaks_nothing(bench, tmp_path, kind):
    """A folder without write permission would stop nobody who runs as root."""
    taken = tmp_path / "taken"
    taken.write_text("")
    places = {"a file": taken, "a file above it": taken / "below", "nowhere": "/proc/no/such"}
    bench.patch.setenv(LEDGER, str(places[kind]))
    process = bench.process(on_unknown=OnUnknown.CUTLASS)
    good, bad = make_module(), make_module()
    set_scale("fc2_alpha", NAN, 2)(bad)
    bench.prepare(good, process)
    bench.prepare(bad, process)
    assert "input_global_scale" in good._b12x_weights
    assert_on_cutlass(bad)


# ---- upstream


def test_upstreams_error_passes_through_and_nothing_is_replaced(bench):
    error = RuntimeError("the b12x backend needs flashinfer")

    def upstream(method, module):
        module._b12x_weights = entries_of(module, Upstream.BAKES)
        raise error

    module = make_module()
    replacement = bench.process(on_unknown=OnUnknown.CUTLASS).replacement(upstream)
    with pytest.raises(RuntimeError) as caught:
        replacement(None, module)
    assert caught.value is error
    assert caught.value.__cause__ is None
    baked = entries_of(module, Upstream.BAKES)
    assert module._b12x_weights.keys() == baked.keys()
    assert all(torch.equal(module._b12x_weights[k], baked[k]) for k in baked)
    assert bench.dispatch._DIRECT_MICRO_MAX_N == 512
    assert module.decode() == "b12x"
    assert not bench.ledger.exists()


def test_the_replacement_looks_like_upstreams(bench):
    replacement = bench.process().replacement(Method.transform_weights)
    assert replacement.__name__ == "transform_weights"
    assert replacement.__wrapped__ is Method.transform_weights


def test_what_a_version_adds_to_the_arguments_stays(bench):
    module = prepared()
    module._b12x_weights["swiglu_limit"] = None
    entries = module._b12x_weights
    repair(module)
    assert module._b12x_weights is entries
    assert "swiglu_limit" in entries


# ---- threads


def test_layers_prepared_by_threads_at_once_are_all_repaired(bench):
    process = bench.process(verify=Verify.FIRST)
    modules = [make_module(index=index) for index in range(8)]
    together = threading.Barrier(2)

    class Together(Method):
        def transform_weights(self, module):
            together.wait(timeout=30)
            super().transform_weights(module)

    replacement = process.replacement(Together.transform_weights)
    errors: list[BaseException] = []

    def work(mine):
        try:
            for module in mine:
                replacement(Together(contract_for("0.6.18")), module)
        except BaseException as error:
            together.abort()
            errors.append(error)

    threads = [threading.Thread(target=work, args=(modules[i::2],)) for i in range(2)]
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
    finally:
        sys.setswitchinterval(interval)
    assert errors == []
    assert all("input_global_scale" in module._b12x_weights for module in modules)
    record = bench.record()
    assert record["layers"] == {"alphas": 8}
    assert record["checks"]["counts"] == {"passed": 1}
    assert "alphas in 8 layers" in bench.line()


# ---- end to end, as TensorRT-LLM calls it


def test_a_plan_that_is_installed_repairs_a_layer(bench, installed_version):
    bench.patch.setattr(patching, "_INSTALLED", {})
    bench.patch.setattr(patching, "_REMOVED", set())

    class Fresh(Method):
        def transform_weights(self, module):
            super().transform_weights(module)

    planned = on_import(quantization(**{CLASS: Fresh}), Settings(mode=Mode.AUTO))
    (patch,) = planned.patches
    patch.install()
    try:
        module = make_module()
        Fresh(contract_for("0.6.18")).transform_weights(module)
    finally:
        patch.undo()
    assert "input_global_scale" in module._b12x_weights


def test_a_version_that_does_not_know_w4a16_bakes_it_and_is_repaired(bench):
    """The format's name is no evidence: what upstream prepared is."""
    module = make_module(quant_algo="W4A16_NVFP4")
    prepared_like_nvfp4 = bench.prepare(module, method=bench.method(knows_w4a16=False))
    assert prepared_like_nvfp4._b12x_weights["fc2_input_scale"] is not None
    assert "input_global_scale" in prepared_like_nvfp4._b12x_weights


# ---- what outlives a patch


@pytest.fixture
def shared(bench, monkeypatch):
    """The hold of the whole process, fresh, on the stub of this test."""
    monkeypatch.setattr(tensorrt_llm, "_HOLD", DispatchHold())
    monkeypatch.setattr(tensorrt_llm, "_REPAIRED", weakref.WeakSet())
    bench.use("0.6.18")
    return bench


def patched(bench, **settings) -> tuple[Any, Any]:
    """A class of the hook, patched as on_import says, and its patch."""
    kind = type(CLASS, (), {"transform_weights": bench.method().transform_weights.__func__})
    settings = Settings(mode=Mode.AUTO, **settings)
    (patch, *_) = on_import(quantization(**{CLASS: kind}), settings).patches
    patch.install()
    return patch, patch.replacement(lambda method, module: method.transform_weights(module))


def test_layers_repaired_before_keep_the_dispatch_when_the_patch_is_undone(shared):
    """Released, direct micro would read their scales as reciprocals: all zeros."""
    module = make_module()
    patch, prepare = patched(shared)
    prepare(shared.method(), module)
    assert shared.dispatch._DIRECT_MICRO_MAX_N == 0
    patch.undo()
    assert shared.dispatch._DIRECT_MICRO_MAX_N == 0
    assert module.decode() == "b12x"


def test_without_a_repaired_layer_the_dispatch_is_put_back(shared):
    patch, prepare = patched(shared)
    module = make_module()
    prepare(shared.method(), module)
    del module
    gc.collect()
    patch.undo()
    assert shared.dispatch._DIRECT_MICRO_MAX_N == 512


def test_new_settings_do_not_let_go(shared):
    """apply() with another variable undoes and makes anew."""
    module = make_module()
    patch, prepare = patched(shared)
    prepare(shared.method(), module)
    patch.undo()
    again, _ = patched(shared, verify=Verify.ALL)
    assert shared.dispatch._DIRECT_MICRO_MAX_N == 0
    again.undo()


def test_a_layer_loaded_before_the_fix_is_told_and_fails_the_status(shared):
    """It stays baked: CUDA graphs may hold its memory."""
    module = prepared()
    module_of_the_class = quantization(**{CLASS: owner("transform_weights")})
    on_import(module_of_the_class, Settings(mode=Mode.AUTO))
    assert any("loaded before the fix was on" in line for line in shared.log.warnings)
    # At least: layers of other tests may still be waiting for the garbage collector.
    assert shared.record()["checks"]["counts"]["failed"] >= 1
    assert module._b12x_weights is not None


@pytest.mark.parametrize("policy", OnUnknown)
def test_an_error_that_nobody_expected_follows_the_policy(bench, monkeypatch, policy):
    """Parameters on the meta device, for one: torch's own error names no layer."""

    def fail(*_: object) -> None:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")

    monkeypatch.setattr(tensorrt_llm, "repair_layer", fail)
    module, process = make_module(), bench.process(on_unknown=policy)
    if policy is OnUnknown.CUTLASS:
        assert_on_cutlass(bench.prepare(module, process))
        assert any("meta tensors" in line for line in bench.log.warnings)
        return
    with pytest.raises(UnsupportedVersionError, match=r"layer 3: the repair failed: RuntimeError"):
        bench.prepare(module, process)
    assert module._b12x_weights is None


def test_an_earlier_layer_that_nobody_baked_is_none(shared):
    gc.collect()
    before = shared.log.warnings[:]
    module = prepared(upstream=Upstream.INTACT_VIEW)
    add_carrier(module)
    module.layer_idx = 77
    on_import(quantization(**{CLASS: owner("transform_weights")}), Settings(mode=Mode.AUTO))
    told = [line for line in shared.log.warnings if line not in before]
    assert not [line for line in told if "layer 77" in line]


def test_a_first_import_looks_for_no_earlier_layers(shared):
    module = prepared()
    importing = quantization(**{CLASS: owner("transform_weights")})
    importing.__spec__ = SimpleNamespace(_initializing=True)
    on_import(importing, Settings(mode=Mode.AUTO))
    assert shared.log.warnings == []
    assert module._b12x_weights is not None


def test_a_refused_layer_cannot_decode_for_whoever_goes_on(bench):
    module = make_module()
    set_scale("fc2_alpha", NAN, 2)(module)
    with pytest.raises(ScaleError):
        bench.prepare(module)
    assert module._b12x_weights is None
    assert module.b12x_wrapper is None
    assert bench.record()["checks"]["counts"] == {"failed": 1}


@pytest.mark.parametrize("factor", [2.0, 1 + 1e-4])
def test_a_kept_weight_scale_2_that_is_not_the_alphas_is_refused(bench, factor):
    module = prepared(dynamic=True)
    module.fc31_weight_scale_2.data[1] *= factor
    error = refusal(module)
    assert isinstance(error, ScaleError)
    assert "layer 3, expert 1: FC1's weight_scale_2 is kept as" in str(error)


def test_a_version_that_cannot_be_read_is_unknown(monkeypatch):
    def version(name):
        raise UnicodeDecodeError("utf-8", b"\xff", 0, 1, "invalid start byte")

    monkeypatch.setattr(tensorrt_llm.metadata, "version", version)
    assert tensorrt_llm.tensorrt_llm_version() == "of unknown version"

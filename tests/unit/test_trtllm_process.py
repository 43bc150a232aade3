"""The fix in a process: layers that went past it, what precedes a graph capture, odd histories."""

from __future__ import annotations

import gc
import threading
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from tests.layers import make_inputs, make_layer
from tests.trtllm_layers import (
    RELU2,
    VERSION,
    Bench,
    Layer,
    Method,
    Misbehaviour,
    Upstream,
    entries_of,
    make_bench,
    make_module,
    prepared,
    set_scale,
)
from trtllm_b12x_fix import patching
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.errors import ScaleError
from trtllm_b12x_fix.integrations import tensorrt_llm
from trtllm_b12x_fix.integrations.b12x_dispatch import DispatchHold
from trtllm_b12x_fix.integrations.tensorrt_llm import CLASS, on_import
from trtllm_b12x_fix.integrations.trtllm_contract import ContractError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.settings import Mode, OnUnknown, Settings, Verify

RELU, SILU = Activation


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products, often on a busy machine: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def isolate(monkeypatch, tmp_path) -> Bench:
    """A process with no patch and no layer."""
    monkeypatch.setattr(patching, "_INSTALLED", {})
    monkeypatch.setattr(patching, "_REMOVED", set())
    monkeypatch.setattr(tensorrt_llm, "_HOLD", DispatchHold())
    monkeypatch.setattr(tensorrt_llm.metadata, "version", {"tensorrt_llm": VERSION}.__getitem__)
    gc.collect()  # layers of other tests were not loaded in this process
    return make_bench(monkeypatch, tmp_path)


@pytest.fixture
def bench(monkeypatch, tmp_path) -> Bench:
    return isolate(monkeypatch, tmp_path)


def decode(module: Any, tokens: int = 3) -> None:
    x, routing = make_inputs(RELU2, tokens=tokens, top_k=2)
    with torch.inference_mode():
        module.b12x_wrapper.run(
            x=x,
            token_selected_experts=routing.expert_ids.int(),
            token_final_scales=routing.weights,
            **module._b12x_weights,
        )


# ---- before a CUDA graph is captured


VERIFY_OFF = {"verify": Verify.OFF}  # the check of the first layer calls the wrapper, too


def test_the_fold_is_made_before_the_first_call_of_serving(bench):
    """Made in a capture, it would live in the graph's memory."""
    method = bench.method(use_cuda_graph=True)
    module = bench.prepare(make_module(), bench.process(**VERIFY_OFF), method)
    wrapper = module.b12x_wrapper
    assert len(wrapper.folds) == 1
    decode(module)
    assert len(wrapper.folds) == 1
    assert torch.equal(
        wrapper.folds[0],
        module._b12x_weights["w1_alpha"] * module._b12x_weights["input_global_scale"],
    )


def test_every_layer_is_primed_not_the_checked_one_alone(bench):
    process = bench.process(verify=Verify.FIRST)
    for index in range(3):
        method = bench.method(use_cuda_graph=True)
        module = bench.prepare(make_module(index=index), process, method)
        assert len(module.b12x_wrapper.folds) == 1, index


def test_reloaded_weights_are_primed_again(bench):
    process, module = bench.process(**VERIFY_OFF), make_module()
    for _ in range(2):
        bench.prepare(module, process, bench.method(use_cuda_graph=True))
        folds = len(module.b12x_wrapper.folds)
        decode(module)
        assert len(module.b12x_wrapper.folds) == folds == 1


def test_an_upstream_that_keeps_scales_intact_is_primed_too(bench):
    method = bench.method(upstream=Upstream.INTACT_VIEW, carries=True, use_cuda_graph=True)
    module = bench.prepare(make_module(), bench.process(**VERIFY_OFF), method)
    assert len(module.b12x_wrapper.folds) == 1


def test_without_graphs_nothing_is_called(bench):
    module = bench.prepare(make_module(), bench.process(**VERIFY_OFF))
    assert module.b12x_wrapper.calls == []


def test_a_layer_on_cutlass_is_not_primed(bench):
    module = make_module()
    set_scale("fc2_alpha", float("nan"), 2)(module)
    method = bench.method(use_cuda_graph=True)
    bench.prepare(module, bench.process(on_unknown=OnUnknown.CUTLASS), method)
    assert module.b12x_wrapper is None
    assert not any("CUDA graphs" in line for line in bench.log.warnings)


def test_a_call_that_fails_is_a_warning_and_no_end(bench):
    method = bench.method(use_cuda_graph=True, misbehaviour=Misbehaviour.OUT_OF_MEMORY)
    module = bench.prepare(make_module(), bench.process(**VERIFY_OFF), method)
    assert module.decode() == "b12x"
    (warning,) = bench.log.warnings
    for words in ("layer 3", "OutOfMemoryError", "warm up before capturing"):
        assert words in warning


# ---- layers that went past the replaced method


def patched_class(bench: Bench, **settings: Any) -> tuple[type, list[Any]]:
    """The class as TensorRT-LLM has it, patched as on_import says."""

    class Loading:
        def process_weights_after_loading(self, module: Any) -> None:
            module.loaded = True

    class Class(Method, Loading):
        def transform_weights(self, module: Any) -> None:
            super().transform_weights(module)

    module = ModuleType("tensorrt_llm._torch.moe.fused_moe.quantization")
    vars(module)[CLASS] = Class
    module.__spec__ = SimpleNamespace(_initializing=True)
    planned = on_import(module, Settings(mode=Mode.AUTO, **settings))
    for patch in planned.patches:
        patch.install()
    assert len(planned.patches) == 2
    return Class, list(planned.patches)


def load(kind: type, module: Any, **options: Any) -> Any:
    method = kind(contract_for("0.6.18"), **options)
    module.quant_method = method
    method.process_weights_after_loading(module)
    method.transform_weights(module)
    return module


class Baking:
    """What a subclass does that prepares its layers by itself."""

    def transform_weights(self, module: Any) -> None:
        module._b12x_weights = entries_of(module, Upstream.BAKES)
        module.b12x_wrapper = SimpleNamespace()


def test_a_subclass_that_calls_upstreams_method_is_repaired(bench):
    kind, _ = patched_class(bench)

    class Heir(kind):
        def transform_weights(self, module: Any) -> None:
            super().transform_weights(module)
            module.finished = True

    module = load(Heir, make_module())
    assert "input_global_scale" in module._b12x_weights
    assert module.finished
    assert "alphas in 1 layer" in bench.line()
    assert bench.log.warnings == []


def test_a_subclass_that_does_not_is_told_once_loading_has_ended(bench):
    kind, _ = patched_class(bench)

    class Heir(Baking, kind):
        pass

    good, bad = load(kind, make_module(index=1)), load(Heir, make_module(index=2))
    assert "alphas in 1 layer" in bench.line()
    (warning,) = bench.log.warnings
    for words in ("layer 2: prepared past the fix", "Heir", "are baked", "backend: CUTLASS"):
        assert words in warning
    assert bench.record()["checks"]["counts"] == {"passed": 1, "failed": 1}
    bench.summary.loading_ended()
    assert len(bench.log.warnings) == 1
    assert good is not bad


def test_a_process_with_such_layers_alone_is_told_of_them(bench):
    kind, _ = patched_class(bench)
    module = load(type("Heir", (Baking, kind), {}), make_module())
    assert bench.line() == ""
    assert len(bench.log.warnings) == 1
    assert module._b12x_weights is not None


@pytest.mark.parametrize("how", ["intact", "W4A16", "gone", "not prepared", "on CUTLASS", "failed"])
def test_layers_that_no_bake_reached_are_none(bench, how):
    kind, _ = patched_class(bench, on_unknown=OnUnknown.CUTLASS)
    module = make_module()

    class Heir(kind):
        def transform_weights(self, module: Any) -> None:
            if how == "intact":
                module._b12x_weights = entries_of(module, Upstream.INTACT_VIEW)
            if how == "W4A16":
                module._b12x_weights = {**entries_of(module, Upstream.BAKES)}
                module._b12x_weights["fc2_input_scale"] = None
            if how == "on CUTLASS":
                set_scale("fc2_alpha", float("nan"), 2)(module)
                super().transform_weights(module)

    if how == "W4A16":
        module.quant_config.quant_algo.name = "W4A16_NVFP4"
    if how == "failed":
        kind(contract_for("0.6.18")).process_weights_after_loading(module)
    else:
        load(Heir, module)
    if how == "gone":
        del module
        gc.collect()
    bench.summary.loading_ended()
    assert not [line for line in bench.log.warnings if "past the fix" in line]


def test_a_layer_that_is_loaded_again_and_repaired_is_none(bench):
    kind, _ = patched_class(bench)
    module = make_module()
    for _ in range(2):
        load(kind, module)
        kind(contract_for("0.6.18")).process_weights_after_loading(module)  # weights in parts
    load(kind, module)
    assert "alphas in 1 layer" in bench.line()
    assert bench.log.warnings == []


def test_a_layer_whose_repair_was_refused_is_told_once_and_rightly(bench):
    kind, _ = patched_class(bench)
    module = make_module()
    set_scale("fc2_alpha", float("nan"), 2)(module)
    with pytest.raises(ScaleError):
        load(kind, module)
    assert bench.line() == ""
    assert bench.log.warnings == []
    assert bench.record()["checks"]["counts"] == {"failed": 1}


def base_of(kind: type) -> type:
    return next(one for one in kind.__mro__[1:] if one.__name__ == "Loading")


def test_loading_of_other_classes_layers_is_not_watched(bench):
    """CUTLASS's layers have the base's method, on GPUs without b12x, too."""
    kind, patches = patched_class(bench)
    base = base_of(kind)
    assert "trtllm_b12x_fix" not in base.process_weights_after_loading.__code__.co_filename
    module = prepared()
    base().process_weights_after_loading(module)
    bench.summary.loading_ended()
    assert bench.log.warnings == []
    for patch in patches:
        patch.undo()
    assert "process_weights_after_loading" not in vars(kind)


def test_who_patches_the_base_later_is_called(bench):
    kind, _ = patched_class(bench)
    seen = []
    base_of(kind).process_weights_after_loading = lambda self, module: seen.append(module)
    module = load(kind, make_module())
    assert seen == [module]


@pytest.mark.parametrize("how", [staticmethod, classmethod, property])
def test_a_loading_method_of_another_kind_is_left_alone(bench, how):
    """The gate and up report is lost there; the repair is not."""
    names = {
        "transform_weights": lambda self, module: None,
        "process_weights_after_loading": how(lambda *_: None),
    }
    module = ModuleType("tensorrt_llm._torch.moe.fused_moe.quantization")
    vars(module)[CLASS] = type(CLASS, (), names)
    module.__spec__ = SimpleNamespace(_initializing=True)
    (patch,) = on_import(module, Settings(mode=Mode.AUTO)).patches
    assert patch.attribute == "transform_weights"


# ---- odd histories


class Grumpy(torch.nn.Module):
    """A module that raises whatever it likes when asked for an attribute."""

    def __getattr__(self, name: str) -> Any:
        if name == "_b12x_weights":
            raise RuntimeError("not in this mode")
        return super().__getattr__(name)


def test_modules_that_raise_when_asked_do_not_stop_apply(bench):
    kept = Grumpy()
    bench.process().tell_of_earlier_layers()
    # Layers of other tests may still wait for the garbage collector; they have a number.
    assert not any("without an index" in line for line in bench.log.warnings)
    assert isinstance(kept, torch.nn.Module)


class Lazy(ModuleType):
    """A module that imports what it is asked for."""

    def __getattr__(self, name: str) -> Any:
        if name == CLASS:
            raise ImportError("libcuda.so.1 is missing")
        raise AttributeError(name)


def test_a_module_that_cannot_show_its_class_is_imported_all_the_same(bench):
    planned = on_import(Lazy("tensorrt_llm.quantization"), Settings(mode=Mode.AUTO))
    assert planned.patches == ()
    assert "libcuda.so.1 is missing" in planned.refusal
    assert any("libcuda.so.1" in line for line in bench.log.warnings)


@pytest.mark.parametrize("value", [None, "4", object()])
def test_a_top_k_of_another_kind_does_not_stop_a_layer(bench, value):
    """It is asked for before upstream's method, and for one setting alone."""
    module = make_module()
    module.routing_method.experts_per_token = value
    bench.prepare(module)
    assert "input_global_scale" in module._b12x_weights


def test_an_interrupt_half_way_leaves_nothing_to_decode_with(bench, monkeypatch):
    """In a notebook somebody may go on."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tensorrt_llm, "repair_layer", interrupted)
    module, process = make_module(), bench.process()
    with pytest.raises(KeyboardInterrupt):
        bench.prepare(module, process)
    assert module._b12x_weights is None
    assert module.b12x_wrapper is None


@pytest.mark.parametrize("name", ["_PREFILL_VIA_CUTLASS_THRESHOLD", "_route_to_cutlass"])
def test_a_layer_that_cannot_be_sent_to_cutlass_cannot_decode_baked(bench, name):
    bench.patch.delattr(Layer, name)
    module = make_module()
    set_scale("fc2_alpha", float("nan"), 2)(module)
    with pytest.raises(ContractError, match=name):
        bench.prepare(module, bench.process(on_unknown=OnUnknown.CUTLASS))
    assert module._b12x_weights is None


@pytest.mark.parametrize("own", [None, 0, 16])
def test_a_threshold_that_the_layer_has_itself_is_kept(bench, own):
    """Someone may have set it, 0 included; ours is taken back, theirs is not."""
    process = bench.process(on_unknown=OnUnknown.CUTLASS)
    module = make_module()
    if own is not None:
        module._PREFILL_VIA_CUTLASS_THRESHOLD = own
    good = module.fc2_alpha.data.clone()
    bench.prepare(module, process)
    assert vars(module).get("_PREFILL_VIA_CUTLASS_THRESHOLD") == own
    for _ in range(2):
        module.fc2_alpha.data[2] = float("nan")
        for _ in range(2):
            bench.prepare(module, process)
            assert vars(module)["_PREFILL_VIA_CUTLASS_THRESHOLD"] == 0
        module.fc2_alpha.data.copy_(good)
        bench.prepare(module, process)
        assert vars(module).get("_PREFILL_VIA_CUTLASS_THRESHOLD") == own


def test_the_module_imported_twice_tells_one_line_of_both(bench):
    first, patches = patched_class(bench)
    one = load(first, make_module(index=1))
    for patch in patches:
        patch.undo()
    second, _ = patched_class(bench)  # as importlib.reload makes a new class
    two = load(second, make_module(index=2))
    load(second, one)  # the reloaded class prepares a layer of before
    assert "alphas in 2 layers" in bench.line()
    assert bench.record()["layers"] == {"alphas": 2}
    assert "input_global_scale" in two._b12x_weights


def test_a_reload_under_another_policy_counts_what_is_true_at_last(bench):
    module = make_module()
    bench.prepare(module)
    bench.use_error(None)
    bench.prepare(module, bench.process(on_unknown=OnUnknown.CUTLASS))
    line = bench.line()
    assert "cutlass in 1 layer" in line
    assert "alphas" not in line
    assert bench.record()["layers"] == {"cutlass": 1}


def test_layers_of_different_shapes_and_activations_are_each_repaired(bench):
    """In one process, as a model with a draft has them; every one checked live."""
    process = bench.process(verify=Verify.ALL)
    sizes = [(RELU, 4, 128, 128), (SILU, 4, 128, 128), (RELU, 6, 256, 384), (SILU, 3, 384, 64)]
    for index, (activation, experts, hidden, intermediate) in enumerate(sizes):
        layer = make_layer(
            activation, experts=experts, hidden=hidden, intermediate=intermediate, sigma=0.005
        )
        module = bench.prepare(make_module(layer, index=index), process)
        assert module._b12x_weights["w1_alpha"].shape == (experts,)
    assert bench.record()["checks"]["counts"] == {"passed": len(sizes)}
    assert "; 4 live checks, 4 passed; the worst is layer " in bench.line()


def test_threads_that_load_and_one_that_ends_it_all(bench):
    """Timers, loads and the end of the interpreter, all at once: one line, no error."""
    process = bench.process(verify=Verify.OFF)
    modules = [make_module(index=index) for index in range(6)]
    errors: list[BaseException] = []

    def work(mine: list[Layer]) -> None:
        try:
            for module in mine:
                bench.prepare(module, process)
                bench.summary.quiet.finish()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work, args=(modules[i::2],)) for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert errors == []
    assert len(bench.log.info_lines) == 1
    assert bench.record()["layers"] == {"alphas": 6}

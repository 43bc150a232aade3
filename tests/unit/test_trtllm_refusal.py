"""A TensorRT-LLM whose b12x class is not known: the import goes on, the first layer is refused.

The stand-in is changed on disk and imported as the hook meets it. FlashInfer is not there at all:
it does not matter before a layer is prepared.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from tests import fake_trtllm
from tests.layers import make_inputs, make_layer
from tests.trtllm.layers import to_checkpoint
from tests.trtllm.stand_in import Era, write_stand_in
from tests.trtllm_layers import NoTimer
from trtllm_b12x_fix import cli, fix, patching, startup
from trtllm_b12x_fix.fix_state import FixState
from trtllm_b12x_fix.integrations import tensorrt_llm, trtllm_report
from trtllm_b12x_fix.integrations.targets import CALLBACK
from trtllm_b12x_fix.integrations.tensorrt_llm import CLASS, HOOKS, on_import
from trtllm_b12x_fix.integrations.trtllm_contract import ContractError
from trtllm_b12x_fix.integrations.trtllm_summary import Summary
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.patching import TargetPlan
from trtllm_b12x_fix.settings import Mode, OnUnknown, Settings

REAL_CALLBACK = CALLBACK
LAYER = make_layer(Activation.RELU2, experts=4, hidden=128, intermediate=128, sigma=0.005)
TOP_K = 2
WAYS_OUT = ("TRTLLM_B12X_FIX=off", "moe_config.backend: CUTLASS", "report the version")
STAGED = [era for era in Era if era.value.hook == "transform_weights" and era.value.bakes]


def isolate(monkeypatch, tmp_path) -> Path:
    """Nothing imported, nothing patched, no FlashInfer; the real integration."""
    folder = fake_trtllm.isolate(monkeypatch, tmp_path)
    monkeypatch.setattr("trtllm_b12x_fix.integrations.targets.CALLBACK", REAL_CALLBACK)
    monkeypatch.setattr(trtllm_report, "SUMMARY", Summary(trtllm_report._logger, NoTimer))
    find = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *a: None if name == "flashinfer" else find(name)
    )
    return folder


@pytest.fixture(autouse=True)
def ledger(monkeypatch, tmp_path) -> Path:
    yield isolate(monkeypatch, tmp_path)
    startup.uninstall()
    fake_trtllm.forget_package()
    importlib.invalidate_caches()


class Change:
    """What a future TensorRT-LLM may have done to its class."""

    def __init__(self, old: str, new: str, words: str) -> None:
        self.old, self.new, self.words = old, new, words


RENAMED = Change("def transform_weights(", "def prepare_b12x(", " nor ".join(HOOKS))
ONE_MORE = Change(
    "def transform_weights(self, module: torch.nn.Module)",
    "def transform_weights(self, module: torch.nn.Module, stage: int)",
    "known is (self, module)",
)
STATIC = Change(
    "    def transform_weights(self, module: torch.nn.Module)",
    "    @classmethod\n    def transform_weights(self, module: torch.nn.Module)",
    "it is a classmethod",
)
CHANGES = {"renamed": RENAMED, "one parameter more": ONE_MORE, "no method": STATIC}


def bring(folder: Path, change: Change | None = None, era: Era = Era.MOE_TRANSFORM) -> ModuleType:
    """Write a changed stand-in, switch the fix on and import its module."""
    site = folder / "site-packages"
    site.mkdir()
    write_stand_in(site, era)
    path = site.joinpath(*era.value.quantization_module.split(".")).with_suffix(".py")
    if change is not None:
        text = path.read_text()
        assert text.count(change.old) == 1
        path.write_text(text.replace(change.old, change.new))
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()
    fix.apply()
    return importlib.import_module(era.value.quantization_module)


def build(era: Era = Era.MOE_TRANSFORM, quant_algo: str = "NVFP4") -> Any:
    """A layer, as TensorRT-LLM's model builds it."""
    from tensorrt_llm._torch.model_config import ModelConfig
    from tensorrt_llm._torch.utils import ActivationType
    from tensorrt_llm.models.modeling_utils import QuantAlgo, QuantConfig

    backend = getattr(importlib.import_module(era.value.backend_module), era.value.backend)
    config = ModelConfig(
        quant_config=QuantConfig(QuantAlgo(quant_algo)),
        use_cuda_graph=False,
        moe_max_num_tokens=64,
        force_dynamic_quantization=False,
    )
    return backend(
        routing_method=SimpleNamespace(experts_per_token=TOP_K),
        num_experts=LAYER.experts,
        hidden_size=LAYER.hidden,
        intermediate_size=LAYER.intermediate,
        model_config=config,
        activation_type=ActivationType.Relu2,
    )


def log_lines(severity: str) -> list[str]:
    logger = importlib.import_module("tensorrt_llm.logger").logger
    return [line for one, line in logger.lines if one == severity]


def recorded(ledger: Path) -> dict[str, Any]:
    (record,) = fake_trtllm.records(ledger)
    return record


@pytest.mark.parametrize("policy", OnUnknown)
@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
@pytest.mark.parametrize("era", STAGED)
def test_where_the_class_is_never_built_nothing_happens(
    tmp_path, monkeypatch, ledger, capsys, era, change, policy
):
    """B200, H100: TensorRT-LLM imports the module there, too."""
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", policy.value)
    module = bring(tmp_path, change, era)
    assert getattr(module, CLASS)
    assert log_lines("warning") == []
    status = fix.status()
    assert status.state is FixState.WOULD_REFUSE
    for words in (change.words, era.value.version, CLASS, *WAYS_OUT):
        assert words in status.note
    assert recorded(ledger)["state"] == "unknown version: would be refused"
    assert cli.main(["status", "--require-live"]) == 0
    assert "would be refused" in capsys.readouterr().out


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_the_first_layer_stops_the_start(tmp_path, ledger, capsys, change):
    bring(tmp_path, change)
    for _ in range(2):  # TensorRT-LLM tries again without the meta device
        with pytest.raises(ContractError) as caught:
            build()
        for words in (change.words, "1.4.0rc1", CLASS, "ON_UNKNOWN=cutlass", *WAYS_OUT):
            assert words in str(caught.value)
    record = recorded(ledger)
    assert record["checks"]["counts"]["failed"] == 2
    assert "stopped the start" in record["warnings"][0]
    assert cli.main(["status"]) == 1
    assert "WITHOUT the repair" in capsys.readouterr().out


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_or_its_layers_decode_goes_to_cutlass(tmp_path, monkeypatch, ledger, change):
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", "cutlass")
    bring(tmp_path, change)
    layers = [build() for _ in range(2)]
    x, _ = make_inputs(LAYER, tokens=3, top_k=TOP_K, seed=1)
    for layer in layers:
        layer.load_weights([to_checkpoint(LAYER)])
        assert layer._route_to_cutlass(x)
    assert type(layers[0])._PREFILL_VIA_CUTLASS_THRESHOLD == 64
    (warning,) = log_lines("warning")
    assert change.words in warning
    assert "goes to CUTLASS" in warning
    assert recorded(ledger)["layers"] == {"cutlass": 2}
    trtllm_report.SUMMARY.loading_ended()
    (line,) = log_lines("info")
    assert "cutlass in 2 layers (decode goes to CUTLASS: TensorRT-LLM 1.4.0rc1: " in line
    assert cli.main(["status"]) == 0


@pytest.mark.parametrize("policy", OnUnknown)
def test_w4a16_goes_on_where_the_layer_can_be_told(tmp_path, monkeypatch, policy):
    """By ``create_weights``, which gets it; ``__init__`` cannot tell and refuses all."""
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", policy.value)
    bring(tmp_path, RENAMED)
    if policy is OnUnknown.FAIL:
        with pytest.raises(ContractError):
            build(quant_algo="W4A16_NVFP4")
        return
    layer = build(quant_algo="W4A16_NVFP4")
    assert "_PREFILL_VIA_CUTLASS_THRESHOLD" not in vars(layer)
    assert log_lines("warning") == []


@pytest.mark.parametrize("policy", OnUnknown)
def test_remove_puts_back_what_was_inherited(tmp_path, monkeypatch, policy):
    monkeypatch.setenv("TRTLLM_B12X_FIX_ON_UNKNOWN", policy.value)
    owner = getattr(bring(tmp_path, RENAMED), CLASS)
    before = dict(vars(owner))
    assert fix.remove().state is FixState.REMOVED
    assert set(before) - set(vars(owner)) == {
        {"fail": "__init__", "cutlass": "create_weights"}[policy.value]
    }
    build()
    assert fix.apply().state is FixState.WOULD_REFUSE
    assert set(vars(owner)) == set(before)


def test_off_builds_it_as_upstream_does(tmp_path, monkeypatch):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "off")
    bring(tmp_path, RENAMED)
    build()
    assert fix.status().state is FixState.OFF


@pytest.mark.parametrize("era", Era)
def test_a_missing_flashinfer_is_no_matter_before_a_layer_is_prepared(tmp_path, ledger, era):
    bring(tmp_path, None, era)
    assert fix.status().state is FixState.ACTIVE
    layer = build(era)
    layer.load_weights([to_checkpoint(LAYER)])
    assert log_lines("warning") == []
    with pytest.raises(RuntimeError, match="needs flashinfer"):  # upstream's own
        layer.post_load_weights()
    assert recorded(ledger)["checks"]["counts"] == {}


def test_a_broken_flashinfer_is_not_looked_at_either(tmp_path, monkeypatch):
    def fail() -> None:
        raise AssertionError("FlashInfer was looked at")

    monkeypatch.setattr(tensorrt_llm, "installed_contract", fail)
    bring(tmp_path)
    build()


# ---- a draft of the backend, which prepares b12x itself


def draft(folder: Path) -> None:
    """As in a state of before the class: the backend's own ``post_load_weights`` makes it."""
    site = folder / "site-packages"
    site.mkdir()
    write_stand_in(site, Era.MODULES_POST_LOAD)
    path = site.joinpath(*Era.MODULES_POST_LOAD.value.quantization_module.split("."))
    quantization, backend = path.with_suffix(".py"), path.with_name("fused_moe_sm12x.py")
    text = quantization.read_text()
    start = text.index(f"class {CLASS}")
    backend.write_text("def post_load_weights(self):\n    return B12xMoEWrapper(top_k=1)\n")
    quantization.write_text(text[:start].replace(f'    "{CLASS}",\n', ""))
    sys.path.insert(0, str(site))
    importlib.invalidate_caches()


def test_a_backend_that_prepares_b12x_itself_is_out_of_reach(tmp_path, ledger, capsys):
    draft(tmp_path)
    fix.apply()
    importlib.import_module(Era.MODULES_POST_LOAD.value.quantization_module)
    status = fix.status()
    assert status.state is FixState.OUT_OF_REACH
    (warning,) = log_lines("warning")
    for words in ("1.3.0rc17", "fused_moe_sm12x.py", CLASS, "SM120", *WAYS_OUT[:2]):
        assert words in warning
    assert recorded(ledger)["warnings"]
    assert cli.main(["status"]) == 1
    assert "out of reach" in capsys.readouterr().out


def test_doctor_says_the_same_of_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "auto")
    draft(tmp_path)
    assert cli.main(["doctor", "--json", "-"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert "makes a B12xMoEWrapper, but" in found["reason"]
    assert not found["hold"]["holds"]
    assert "so it would do nothing" in found["reason"]


def test_a_release_of_before_b12x_needs_nothing(tmp_path):
    draft(tmp_path)
    (made,) = (tmp_path / "site-packages").rglob("fused_moe_sm12x.py")
    made.unlink()
    for file in made.parent.glob("*b12x*.py"):
        file.unlink()
    fix.apply()
    importlib.import_module(Era.MODULES_POST_LOAD.value.quantization_module)
    assert fix.status().state is FixState.NOT_NEEDED


# ---- classes of all sorts


def quantization(**names: Any) -> ModuleType:
    module = ModuleType("tensorrt_llm._torch.moe.fused_moe.quantization")
    vars(module).update(names)
    return module


def plan_for(kind: Any, policy: OnUnknown = OnUnknown.FAIL) -> TargetPlan:
    return on_import(quantization(**{CLASS: kind}), Settings(mode=Mode.AUTO, on_unknown=policy))


@pytest.mark.parametrize(
    "hook",
    [
        lambda self: None,
        lambda self, module, weights: None,
        lambda self, layer: None,
        lambda self, module, weights=None: None,
        lambda self, *modules: None,
        lambda self, *, module: None,
        staticmethod(lambda self, module: None),
        classmethod(lambda self, module: None),
        property(lambda self: None),
        None,
        "a text",
    ],
)
@pytest.mark.parametrize("name", HOOKS)
def test_every_other_hook_is_refused_when_the_class_is_built(name, hook):
    kind = type(CLASS, (), {name: hook, "__module__": "tensorrt_llm.quantization"})
    planned = plan_for(kind)
    (patch,) = planned.patches
    assert (patch.owner, patch.attribute) == (kind, "__init__")
    patch.install()
    assert vars(kind)[name] is hook
    with pytest.raises(ContractError) as caught:
        kind()
    for words in (name, "known is", *WAYS_OUT):
        assert words in str(caught.value)
    patch.undo()
    kind()


def test_a_hook_that_is_inherited_is_not_the_classs_own():
    base = type("Base", (), {name: lambda self, module: None for name in HOOKS})
    kind = type(CLASS, (base,), {})
    assert "defines neither" in plan_for(kind).refusal


def test_a_class_with_its_own_constructor_is_refused_with_any_arguments():
    class Own:
        def __init__(self, size: int) -> None:
            self.size = size

    (patch,) = plan_for(Own).patches
    patch.install()
    for arguments in ((), (1,)):
        with pytest.raises(ContractError):
            Own(*arguments)
    patch.undo()
    assert Own(3).size == 3


def test_a_subclass_of_it_is_refused_too():
    base = type(CLASS, (), {})
    heir = type("Heir", (base,), {})
    (patch,) = plan_for(base).patches
    patch.install()
    with pytest.raises(ContractError):
        heir()
    patch.undo()


@pytest.mark.parametrize(
    "creating",
    [None, lambda self: None, lambda self, layer: None, 3, staticmethod(lambda: None)],
)
def test_without_a_way_to_the_layer_cutlass_cannot_be_had(creating):
    names = {} if creating is None else {"create_weights": creating}
    kind = type(CLASS, (), names)
    (patch,) = plan_for(kind, OnUnknown.CUTLASS).patches
    patch.install()
    with pytest.raises(ContractError, match=r"no create_weights\(self, module\)"):
        kind()
    patch.undo()


def test_a_backend_that_decides_otherwise_is_refused_by_name():
    kind = type(CLASS, (), {"create_weights": lambda self, module: None})
    (patch,) = plan_for(kind, OnUnknown.CUTLASS).patches
    patch.install()
    with pytest.raises(ContractError, match="_PREFILL_VIA_CUTLASS_THRESHOLD"):
        kind().create_weights(SimpleNamespace())
    patch.undo()


def test_what_upstream_returns_and_raises_is_upstreams():
    from tests.trtllm_layers import make_module

    def create_weights(self, module, value, *, fail=False):
        if fail:
            raise LookupError(value)
        return value

    kind = type(CLASS, (), {"create_weights": create_weights})
    (patch,) = plan_for(kind, OnUnknown.CUTLASS).patches
    patch.install()
    module = make_module()
    with pytest.raises(LookupError):
        kind().create_weights(module, 5, fail=True)
    assert "_PREFILL_VIA_CUTLASS_THRESHOLD" not in vars(module)
    assert kind().create_weights(module, 5) == 5
    assert vars(module)["_PREFILL_VIA_CUTLASS_THRESHOLD"] == 0
    patch.undo()


@pytest.mark.parametrize("thing", [lambda: None, SimpleNamespace(), "a text", 3])
def test_what_is_no_class_is_out_of_reach(thing):
    planned = plan_for(thing)
    assert planned.patches == ()
    assert f"{CLASS} is no class" in planned.refusal


def test_the_marker_names_the_refusal_as_ours():
    kind = type(CLASS, (), {})
    (patch,) = plan_for(kind).patches
    patch.install()
    assert getattr(vars(kind)["__init__"], patching.MARKER)
    patch.undo()
    assert "__init__" not in vars(kind)

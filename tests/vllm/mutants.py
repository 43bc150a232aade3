"""Defects in the plugin, each with the job that must bring it to light.

They are in place in the worker's process while that job runs; tests/planted/test_vllm_mutants.py
asks the check of that job to fail.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch

from trtllm_b12x_fix import stacks, vllm_plugin
from trtllm_b12x_fix.integrations import (
    vllm,
    vllm_b12x,
    vllm_cutlass,
    vllm_entries,
    vllm_guard,
    vllm_layer,
)
from trtllm_b12x_fix.integrations.trtllm_entries import ScaleState
from trtllm_b12x_fix.settings import ActScale, Mode


@dataclass(frozen=True)
class Mutant:
    """A wrong value in the place of ``owner.attribute``.

    Attributes:
        job: name of a job of tests/vllm/scenarios.py.
        version: of vLLM.
    """

    owner: Any
    attribute: str
    wrong: Any
    job: str
    version: str = "0.33.0"


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    return None


_new_entries = vllm_entries.new_entries
_moe_layer = vllm_layer.Originals.moe_layer
_answer = vllm_guard._Guard._answer


def _without_alphas(*args: Any) -> Any:
    entries = _new_entries(*args)
    return {**entries, "w1_alpha": torch.ones_like(entries["w1_alpha"])}


def _without_global_scale(*args: Any) -> Any:
    entries = _new_entries(*args)
    return {name: value for name, value in entries.items() if name != "input_global_scale"}


def _without_second_input_scale(before: Any, *args: Any) -> Any:
    entries = _new_entries(before, *args)
    return {**entries, "w2_alpha": before.fc2.weight_scale_2.clone()}


def _first_input_scale_twice(*args: Any) -> Any:
    entries = _new_entries(*args)
    return {**entries, "fc2_input_scale": entries["input_global_scale"]}


def _always(scale: ActScale) -> Any:
    return lambda self, _scale: _moe_layer(self, scale)


def _gated_too(self: Any, owner: Any, answer: Any, args: Any, kwargs: Any) -> Any:
    return (False, "") if answer[0] else answer


def _only_monolithic(self: Any, owner: Any, answer: Any, args: Any, kwargs: Any) -> Any:
    if "Monolithic" not in owner.__name__:
        return answer
    return _answer(self, owner, answer, args, kwargs)


def _not_cute(self: Any, owner: Any, answer: Any, args: Any, kwargs: Any) -> Any:
    if "CuteDSL" in owner.__name__:
        return answer
    return _answer(self, owner, answer, args, kwargs)


def _whatever_was_asked(self: Any, owner: Any, answer: Any, args: Any, kwargs: Any) -> Any:
    config = vllm_guard._config_of(args, kwargs)
    return answer if config.is_act_and_mul else (False, "")


def _class_alone(experts: Any, layer: Any, version: str) -> None:
    vllm_cutlass.become_cutlass(experts, version)


def _wants_repair(_self: Any) -> bool:
    return True


class _Passing:
    failed = False
    state = vllm_b12x.VerifyState.PASSED
    layer, words, from_repaired = "", "", 0.0


_b12x = vllm_b12x
MUTANTS: dict[str, Mutant] = {
    "nothing is put back": Mutant(vllm_layer.Originals, "put_back", _nothing, "relu2"),
    "weight_scale_2 is lost": Mutant(_b12x, "new_entries", _without_alphas, "relu2"),
    "FC2's input scale is lost": Mutant(_b12x, "new_entries", _without_second_input_scale, "relu2"),
    "FC1's input scale is used twice": Mutant(
        _b12x, "new_entries", _first_input_scale_twice, "silu"
    ),
    "the global scale is not passed": Mutant(_b12x, "new_entries", _without_global_scale, "silu"),
    "unit in spite of the default": Mutant(
        vllm_layer.Originals, "moe_layer", _always(ActScale.UNIT), "relu2"
    ),
    "calibrated in spite of unit": Mutant(
        vllm_layer.Originals, "moe_layer", _always(ActScale.CALIBRATED), "silu, unit"
    ),
    "scales of a W4A16 checkpoint are believed": Mutant(
        vllm_layer, "is_weight_only", lambda _layer: False, "a16"
    ),
    "all upstreams are taken for baked": Mutant(
        _b12x, "scale_state", lambda *_: ScaleState.BAKED, "repaired"
    ),
    "all upstreams are taken for repaired": Mutant(
        _b12x, "scale_state", lambda *_: ScaleState.INTACT, "relu2"
    ),
    "nobody looks who carries weight_scale_2": Mutant(
        vllm_layer, "_carries", lambda *_: True, "keeps scales loses alphas"
    ),
    "the wrapper is called as upstream does": Mutant(_b12x, "_put_in_place", _nothing, "relu2"),
    "upstream may rename its arguments": Mutant(
        vllm_entries, "REPLACED", (), "other names at the call"
    ),
    "scales are not looked at": Mutant(_b12x, "check_scales", _nothing, "nan"),
    "padded layers are let through": Mutant(_b12x, "_check_sizes", _nothing, "padded"),
    "fp16 is let through": Mutant(_b12x, "_refuse_half", _nothing, "half"),
    "a wrong kernel is let through": Mutant(_b12x, "verify", lambda *_: _Passing(), "wrong kernel"),
    "a layer off b12x is not prepared": Mutant(
        _b12x, "send_to_cutlass", _class_alone, "silu", "0.27.0"
    ),
    "unknown methods are let through": Mutant(
        vllm, "_unknown_work", lambda *_: "", "another signature"
    ),
    "off is not obeyed": Mutant(Mode, "wants_repair", property(_wants_repair), "relu2, off"),
    "an installed package is not asked": Mutant(
        stacks, "stack_of", lambda _name: stacks.TENSORRT_LLM, "relu2"
    ),
    "the plugin waits for nothing": Mutant(vllm_plugin, "register", _nothing, "relu2"),
    "gated layers are guarded, too": Mutant(vllm_guard._Guard, "_answer", _gated_too, "guarded"),
    "the monolithic class alone is refused": Mutant(
        vllm_guard._Guard, "_answer", _only_monolithic, "guarded"
    ),
    "trtllm-gen alone is refused": Mutant(vllm_guard._Guard, "_answer", _not_cute, "guarded"),
    "a backend that was asked for is refused": Mutant(
        vllm_guard._Guard, "_answer", _whatever_was_asked, "guarded"
    ),
    "a module without classes is passed over": Mutant(
        vllm,
        "plan_guard",
        lambda *_: vllm_guard.TargetPlan(),
        "no guarded class",
    ),
}


def _fault(*_: Any) -> Any:
    raise RuntimeError("a fault of ours")


#: No mutants: jobs have them in place on purpose.
_FAULTS = {"a fault of ours": Mutant(vllm, "on_import", _fault, "")}


@contextlib.contextmanager
def in_place(name: str | None) -> Iterator[None]:
    """Put one mutant in its place for a while."""
    if name is None:
        yield
        return
    mutant = {**MUTANTS, **_FAULTS}[name]
    with mock.patch.object(mutant.owner, mutant.attribute, mutant.wrong):
        yield

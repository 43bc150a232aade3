"""Other states of vLLM's classes than the two wheels are in, put onto the real classes.

Each function takes the module of the b12x experts (or of guarded experts) before the plugin sees
it, and changes it; the module is imported anew for the next job.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from tests.vllm import harness
from trtllm_b12x_fix.formats import scale_layout


def repaired(module: Any) -> None:
    """As vllm#48536 proposes: intact block scales, alphas as they are, a global scale of 1.0."""
    owner = module.FlashInferB12xExperts
    ensure = owner._ensure_wrapper

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        self._fc2_input_scale = torch.ones(self.num_local_experts)
        self._one = torch.ones(())
        self.w1_sf_mma = scale_layout.to_mma(self.w1_scale.data)
        self.w2_sf_mma = scale_layout.to_mma(self.w2_scale.data)

    def _ensure_wrapper(self: Any) -> None:
        if self._wrapper is None:
            ensure(self)
            self._wrapper = _WithGlobalScale(self._wrapper, self._one)

    owner.process_weights_after_loading = process_weights_after_loading
    owner._ensure_wrapper = _ensure_wrapper


class _WithGlobalScale:
    def __init__(self, wrapper: Any, one: Tensor) -> None:
        self._wrapper = wrapper
        self._one = one

    def run(self, **kwargs: Any) -> Tensor:
        return self._wrapper.run(input_global_scale=self._one, **kwargs)


def bakes_where_they_lie(module: Any) -> None:
    """The checkpoint's own bytes are overwritten."""
    owner = module.FlashInferB12xExperts
    original = owner.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        scales = {
            name: getattr(layer, name).data for name in ("w13_weight_scale", "w2_weight_scale")
        }
        original(self, layer)
        for name, scale in scales.items():
            scale.copy_(getattr(layer, name).data)
            getattr(layer, name).data = scale

    owner.process_weights_after_loading = process_weights_after_loading


def halves_block_scales(module: Any) -> None:
    """Neither the checkpoint's scales nor the baked ones are handed over."""
    owner = module.FlashInferB12xExperts
    original = owner.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        original(self, layer)
        intact = self.w1_sf_mma.to(torch.float32)
        self.w1_sf_mma = (intact / 2).to(torch.float8_e4m3fn)

    owner.process_weights_after_loading = process_weights_after_loading


def keeps_scales_loses_alphas(module: Any) -> None:
    """Block scales stay intact, and nothing carries weight_scale_2."""
    repaired(module)
    owner = module.FlashInferB12xExperts
    process = owner.process_weights_after_loading

    def process_weights_after_loading(self: Any, layer: nn.Module) -> None:
        process(self, layer)
        layer.w13_weight_scale_2.data.fill_(1.0)

    owner.process_weights_after_loading = process_weights_after_loading


def no_method(module: Any) -> None:
    """The class no longer has the method with the work."""
    del module.FlashInferB12xExperts.process_weights_after_loading


def another_signature(module: Any) -> None:
    """The method with the work takes something else."""

    def process_weights_after_loading(self: Any, weights: Any, scales: Any) -> None:
        raise AssertionError("nobody may call it")

    module.FlashInferB12xExperts.process_weights_after_loading = process_weights_after_loading


def no_class(module: Any) -> None:
    """The class has another name."""
    module.B12xExpertsOfTomorrow = vars(module).pop("FlashInferB12xExperts")


def no_wrapper_method(module: Any) -> None:
    """The wrapper is made elsewhere."""
    del module.FlashInferB12xExperts._ensure_wrapper


def other_names_at_the_call(module: Any) -> None:
    """The wrapper is called with a scale by another name."""

    def apply(self: Any, output: Tensor, hidden_states: Tensor, **_: Any) -> None:
        self._ensure_wrapper()
        output.copy_(self._wrapper.run(x=hidden_states, fc1_alpha=self.g1_alphas))

    module.FlashInferB12xExperts.apply = apply


class Hiding:
    """A configuration that does not tell gated layers from others."""

    def __init__(self, config: Any) -> None:
        self.wrapped = config

    def __getattr__(self, name: str) -> Any:
        if name == "is_act_and_mul":
            raise AttributeError(name)
        return getattr(self.wrapped, name)


def asks_without_a_config(module: ModuleType) -> None:
    """Guarded classes are asked with a :class:`Hiding` configuration."""
    others = [harness.module(f"experts.flashinfer_{name}_moe") for name in _UNGUARDED]
    for one in [one for asked in (module, *others) for one in _classes(asked)]:
        original = one.is_supported_config

        def is_supported_config(
            cls: Any, config: Any, *rest: Any, original: Any = original
        ) -> tuple[bool, str | None]:
            return original(cls, getattr(config, "wrapped", config), *rest)

        one.is_supported_config = staticmethod(is_supported_config)


def answers_with_an_object(module: ModuleType) -> None:
    """Guarded classes answer with something that is no pair."""
    for one in _classes(module):
        original = one.is_supported_config

        def is_supported_config(*args: Any, original: Any = original) -> Any:
            return iter(original(*args))

        one.is_supported_config = staticmethod(is_supported_config)


def no_guarded_class(module: ModuleType) -> None:
    """A guarded module imports its classes from elsewhere."""
    for one in _classes(module):
        one.__module__ = "vllm.somewhere.else"


#: What vLLM asks besides, before it comes to CUTLASS.
_UNGUARDED = ("cutedsl_batched", "cutlass")
#: Of guarded modules; the others are of the b12x module.
GUARDED = ("asks_without_a_config", "answers_with_an_object", "no_guarded_class")


def _classes(module: ModuleType) -> list[Any]:
    return [
        one
        for one in vars(module).values()
        if isinstance(one, type)
        and one.__module__ == module.__name__
        and hasattr(one, "is_supported_config")
    ]

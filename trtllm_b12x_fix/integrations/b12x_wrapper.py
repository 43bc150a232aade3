"""FlashInfer's real b12x kernels through ``flashinfer.B12xMoEWrapper``, one family at a time.

Tensors go in as the wrapper wants them: bf16 activations, fp32 alphas, block scales in the MMA
view, nothing made under inference mode; the output is copied before the next call can reuse it.
Not run on SM120 or SM121 yet: tested with each wheel's own host code on a CPU, kernels emulated.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import KernelContract
from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats import scale_layout
from trtllm_b12x_fix.integrations.b12x_families import (
    NotSelectableError,
    Observer,
    replaced,
    selection,
)
from trtllm_b12x_fix.integrations.cuda_meter import CudaMeter
from trtllm_b12x_fix.layer import ExpertMatrices, MoELayer
from trtllm_b12x_fix.repair import KernelArguments

FORCE_W4A16 = "FLASHINFER_B12X_FORCE_MOE_W4A16"

_DISPATCH = "flashinfer.fused_moe.cute_dsl.blackwell_sm12x.moe_dispatch"
_UTILS = "flashinfer.cute_dsl.utils"
#: How FlashInfer words that a forced family cannot take a call; all else is a failure.
_REFUSALS = (
    "forced direct_micro backend",
    "forced micro backend",
    "micro MoE kernel cannot launch",
)


def describe(error: BaseException) -> str:
    """``Class: message`` of an exception, in one line that is cut where it gets long."""
    return f"{type(error).__name__}: {one_line(str(error))}"[:400].rstrip(": ")


def one_line(text: str) -> str:
    """Text without line breaks."""
    return " ".join(text.split())


@dataclass(frozen=True)
class Symbols:
    """What is used of FlashInfer."""

    wrapper: Any
    dispatch: Any
    convert_scales: Any


def load_symbols() -> Symbols:
    """Import FlashInfer.

    Raises:
        Exception: whatever that brings up; without CuTe, B12xMoEWrapper is missing.
    """
    return Symbols(
        importlib.import_module("flashinfer").B12xMoEWrapper,
        importlib.import_module(_DISPATCH),
        importlib.import_module(_UTILS).convert_sf_to_mma_layout,
    )


class B12xCall:
    """A wrapper with its tensors and one input, ready to be called again and again."""

    def __init__(
        self, run: Callable[[], Tensor], observer: Observer, forced: KernelFamily | None
    ) -> None:
        self._wrapped = run
        self._observer = observer
        self._forced = forced

    @property
    def families(self) -> frozenset[KernelFamily]:
        """Every family launched so far."""
        return frozenset(self._observer.launched)

    def output(self) -> Tensor:
        """Run once; a tensor of the caller's own (the wrapper's may be a reused buffer)."""
        return self._run().clone()

    def launch(self) -> None:
        """Run once for the time it takes."""
        self._run()

    def _run(self) -> Tensor:
        self._observer.begin()
        try:
            output = self._wrapped()
        except (ValueError, RuntimeError) as error:
            if self._forced and any(words in str(error) for words in _REFUSALS):
                raise NotSelectableError(one_line(str(error))) from error
            raise
        family = self._observer.end()
        if self._forced not in (None, family):
            raise NotSelectableError(f"the dispatch launched {family.value} instead")
        return output


class B12xKernels:
    """The installed FlashInfer on one device.

    Args:
        contract: of the installed version.
        device: where the layer lies.
        capacity: ``max_num_tokens`` of a CUDA-graph wrapper; ``None`` builds an eager one.
    """

    def __init__(
        self,
        contract: KernelContract,
        device: torch.device,
        capacity: int | None = None,
    ) -> None:
        if os.environ.get(FORCE_W4A16) == "1":
            raise InputError(f"{FORCE_W4A16}=1 turns every b12x wrapper into W4A16; unset it")
        self.contract = contract
        self.capacity = capacity
        self.meter = CudaMeter(device)
        self._device = device
        self._symbols = load_symbols()

    @property
    def device(self) -> str:
        """Name and architecture of the GPU."""
        major, minor = torch.cuda.get_device_capability(self._device)
        return f"{torch.cuda.get_device_name(self._device)} (SM{major}{minor})"

    @contextmanager
    def session(
        self,
        layer: MoELayer,
        arguments: KernelArguments,
        x: Tensor,
        routing: Routing,
        forced: KernelFamily | None,
        keep_out: frozenset[KernelFamily],
    ) -> Iterator[B12xCall]:
        """Open a wrapper on a layer and an input, with the dispatch held to a family.

        Raises:
            NotSelectableError: the family cannot be forced here; calls raise it too.
            InputError: ``x`` is not bf16 (dynamic takes a bare pointer and would misread it).
        """
        if x.dtype != torch.bfloat16:
            raise InputError(f"b12x kernels take bf16 activations, got {x.dtype}")
        dispatch = self._symbols.dispatch
        changes = selection(dispatch, forced, keep_out)
        # The wrapper's fold asks for tensor versions, which inference tensors do not have.
        with torch.inference_mode(False), torch.no_grad(), replaced(dispatch, changes):
            observer = Observer(dispatch)
            with replaced(dispatch, observer.getters):
                wrapper = self._wrapper(layer, routing.expert_ids.shape[1])
                tensors = self._tensors(layer, arguments, x, routing)
                yield B12xCall(lambda: wrapper.run(**tensors), observer, forced)

    def _wrapper(self, layer: MoELayer, top_k: int) -> Any:
        options: dict[str, Any] = {}
        if self.capacity is not None:
            options = {"use_cuda_graph": True, "max_num_tokens": self.capacity}
        return self._symbols.wrapper(
            num_experts=layer.experts,
            top_k=top_k,
            hidden_size=layer.hidden,
            intermediate_size=layer.intermediate,  # of the tensors, padding included
            device=str(self._device),
            activation=layer.activation.value,
            **options,
        )

    def _tensors(
        self, layer: MoELayer, arguments: KernelArguments, x: Tensor, routing: Routing
    ) -> dict[str, Tensor]:
        tensors = {
            "x": x,
            "w1_weight": layer.fc1.packed,
            "w1_weight_sf": self._scales(layer.fc1, arguments.w1_block_scale),
            "w2_weight": layer.fc2.packed,
            "w2_weight_sf": self._scales(layer.fc2, arguments.w2_block_scale),
            "token_selected_experts": routing.expert_ids.to(torch.int32),
            "token_final_scales": routing.weights,
            "w1_alpha": arguments.w1_alpha,
            "w2_alpha": arguments.w2_alpha,
            "fc2_input_scale": arguments.fc2_input_scale,
        }
        if arguments.input_global_scale is not None:
            tensors["input_global_scale"] = arguments.input_global_scale
        return {name: ordinary(tensor) for name, tensor in tensors.items()}

    def _scales(self, matrices: ExpertMatrices, block_scale: Tensor) -> Tensor:
        swizzled = scale_layout.swizzle(block_scale)
        flat = swizzled.reshape(-1, swizzled.shape[-1]).view(torch.float8_e4m3fn)
        view: Tensor = self._symbols.convert_scales(
            flat, m=matrices.rows, k=matrices.columns, num_groups=matrices.experts
        )
        return view


def ordinary(tensor: Tensor) -> Tensor:
    """The tensor, or a copy with a version counter if it was made under inference mode."""
    if not tensor.is_inference():
        return tensor
    with torch.inference_mode(False):
        return tensor.clone(memory_format=torch.preserve_format)

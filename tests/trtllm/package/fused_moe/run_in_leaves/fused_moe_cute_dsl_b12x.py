"""The b12x backend as two leaves: NVFP4 with prefill on CUTLASS, W4A16_NVFP4 always on b12x."""

from dataclasses import replace

import torch
from tensorrt_llm._torch.utils import ActivationType, Fp4QuantizedTensor
from tensorrt_llm._utils import nvtx_range

from .cutlass import CutlassFusedMoEBase, TrtllmCutlassNvfp4Impl
from .impl_contract import require_comm_plan

#: One output for all layers, by (capacity, hidden size, dtype, device).
_SHARED_MOE_OUTPUT_BUF: dict = {}

_ACTIVATION_MAP = {ActivationType.Relu2: "relu2", ActivationType.Swiglu: "silu"}


class CuteDslB12xFusedMoEBase:
    """What both leaves mix in."""

    def __init__(self, *args, **kwargs):
        self._b12x_use_cuda_graph = bool(
            getattr(kwargs.get("model_config"), "use_cuda_graph", False)
        )
        super().__init__(*args, **kwargs)
        self._b12x_weights = None
        self.b12x_wrapper = None

    def _b12x_nvfp4_quant_method(self):
        if self.quant_config is not None and self.quant_config.layer_quant_mode.has_nvfp4():
            from .quantization import NVFP4CuteDslB12xFusedMoEMethod

            return NVFP4CuteDslB12xFusedMoEMethod()
        return None

    @staticmethod
    def _reject_fp4_input(x, who):
        if isinstance(x, Fp4QuantizedTensor):
            raise ValueError(f"{who} does not accept Fp4QuantizedTensor input")

    @nvtx_range("[b12x] decode")
    def _run_b12x_decode(self, ctx):
        plan = require_comm_plan(self, ctx)
        if self.b12x_wrapper is None or self._b12x_weights is None:
            raise RuntimeError(f"{type(self).__name__} called before its weights were prepared")
        if ctx.x_sf is not None:
            raise ValueError(f"{type(self).__name__} expects unquantized input")
        out = self.b12x_wrapper.run(
            x=ctx.x,
            token_selected_experts=ctx.token_selected_experts,
            token_final_scales=ctx.token_final_scales,
            **self._b12x_weights,
        )
        if plan.moe_output is None:
            return out
        plan.moe_output.copy_(out)
        return plan.moe_output


#: The old name, for isinstance; it cannot be constructed.
CuteDslB12xFusedMoE = CuteDslB12xFusedMoEBase


class CuteDslB12xNvfp4FusedMoE(CuteDslB12xFusedMoEBase, TrtllmCutlassNvfp4Impl):
    """Prefill on CUTLASS, decode on b12x."""

    _PREFILL_VIA_CUTLASS_THRESHOLD = 64

    def _get_quant_method(self):
        return self._b12x_nvfp4_quant_method() or super()._get_quant_method()

    def _route_to_cutlass(self, x):
        return isinstance(x, torch.Tensor) and x.shape[0] >= self._PREFILL_VIA_CUTLASS_THRESHOLD

    @nvtx_range("[b12x] quantize_input")
    def quantize_input(self, x, post_quant_comm=True, **kwargs):
        if self._route_to_cutlass(x):
            return super().quantize_input(x, post_quant_comm=post_quant_comm, **kwargs)
        self._reject_fp4_input(x, type(self).__name__)
        return x, None

    @nvtx_range("[b12x] run_moe")
    def run_moe(self, ctx, *, workspace=None):
        if self._route_to_cutlass(ctx.x):
            with_dtype = replace(ctx, output_dtype=ctx.output_dtype or torch.bfloat16)
            return super().run_moe(with_dtype, workspace=workspace)
        return self._run_b12x_decode(ctx)


class CuteDslB12xW4a16Nvfp4FusedMoE(CuteDslB12xFusedMoEBase, CutlassFusedMoEBase):
    """b12x at every token count."""

    def _get_quant_method(self):
        return self._b12x_nvfp4_quant_method()

    def quantize_input(self, x, post_quant_comm=True, **kwargs):
        self._reject_fp4_input(x, type(self).__name__)
        return x, None

    def run_moe(self, ctx, *, workspace=None):
        return self._run_b12x_decode(ctx)

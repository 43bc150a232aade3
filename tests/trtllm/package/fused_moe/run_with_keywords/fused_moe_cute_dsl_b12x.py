"""The b12x backend: prefill on CUTLASS, decode on FlashInfer's kernel.

``run_moe`` takes keywords.
"""

import torch
from tensorrt_llm._torch.utils import ActivationType, Fp4QuantizedTensor
from tensorrt_llm._utils import nvtx_range

from .fused_moe_cute_dsl import CuteDslFusedMoE
from .fused_moe_cutlass import CutlassFusedMoE

#: One output for all layers, by (capacity, hidden size, dtype, device).
_SHARED_MOE_OUTPUT_BUF: dict = {}

_ACTIVATION_MAP = {ActivationType.Relu2: "relu2", ActivationType.Swiglu: "silu"}


class CuteDslB12xFusedMoE(CuteDslFusedMoE):
    """SM120 and SM121."""

    _PREFILL_VIA_CUTLASS_THRESHOLD = 64

    def __init__(self, *args, **kwargs):
        self._b12x_use_cuda_graph = bool(
            getattr(kwargs.get("model_config"), "use_cuda_graph", False)
        )
        super().__init__(*args, **kwargs)
        if self.activation_type not in _ACTIVATION_MAP:
            name = ActivationType(self.activation_type).name
            raise ValueError(f"CuteDslB12xFusedMoE does not support activation {name}")
        self._b12x_weights = None
        self.b12x_wrapper = None

    def _get_quant_method(self):
        if self.quant_config is not None and self.quant_config.layer_quant_mode.has_nvfp4():
            from .quantization import NVFP4CuteDslB12xFusedMoEMethod

            return NVFP4CuteDslB12xFusedMoEMethod()
        return super()._get_quant_method()

    def _route_to_cutlass(self, x):
        return isinstance(x, torch.Tensor) and x.shape[0] >= self._PREFILL_VIA_CUTLASS_THRESHOLD

    @nvtx_range("[b12x] quantize_input")
    def quantize_input(self, x, post_quant_comm=True, **kwargs):
        if self._route_to_cutlass(x):
            return CutlassFusedMoE.quantize_input(self, x, post_quant_comm, **kwargs)
        if isinstance(x, Fp4QuantizedTensor):
            raise ValueError("CuteDslB12xFusedMoE does not accept Fp4QuantizedTensor input")
        return x, None

    @nvtx_range("[b12x] run_moe")
    def run_moe(
        self,
        x,
        token_selected_experts,
        token_final_scales,
        x_sf=None,
        is_sf_swizzled=True,
        output_dtype=None,
        tuner_num_tokens=None,
        tuner_top_k=None,
        moe_output=None,
        enable_alltoall=None,
    ):
        if self._route_to_cutlass(x):
            return CutlassFusedMoE.run_moe(
                self,
                x,
                token_selected_experts,
                token_final_scales,
                x_sf=x_sf,
                is_sf_swizzled=is_sf_swizzled,
                output_dtype=output_dtype or torch.bfloat16,
            )
        if self.b12x_wrapper is None or self._b12x_weights is None:
            raise RuntimeError(
                "CuteDslB12xFusedMoE.run_moe called before its weights were prepared"
            )
        if x_sf is not None:
            raise ValueError("CuteDslB12xFusedMoE expects unquantized input on the decode path")
        out = self.b12x_wrapper.run(
            x=x,
            token_selected_experts=token_selected_experts,
            token_final_scales=token_final_scales,
            **self._b12x_weights,
        )
        if moe_output is None:
            return out
        moe_output.copy_(out)
        return moe_output

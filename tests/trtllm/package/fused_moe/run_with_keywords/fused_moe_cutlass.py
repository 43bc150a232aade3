"""The CUTLASS backend; ``run_moe`` takes keywords."""

from tensorrt_llm._torch.utils import Fp4QuantizedTensor

from .cutlass_arithmetic import fp4_quantize, fused_moe
from .interface import MoE
from .quantization import NVFP4CutlassFusedMoEMethod


class CutlassFusedMoE(MoE):
    """Every token count on CUTLASS."""

    def _get_quant_method(self):
        return NVFP4CutlassFusedMoEMethod()

    @property
    def has_nvfp4(self):
        assert self._weights_created
        return self.quant_config is not None and self.quant_config.layer_quant_mode.has_nvfp4()

    def quantize_input(self, x, post_quant_comm=True, **kwargs):
        if isinstance(x, Fp4QuantizedTensor):
            return x.fp4_tensor, x.scaling_factor
        return fp4_quantize(x, self.fc31_input_scale)

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
        return fused_moe(self, x, x_sf, token_selected_experts, token_final_scales, output_dtype)

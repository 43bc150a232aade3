"""The CUTLASS backend; ``run_moe`` takes a context."""

from tensorrt_llm._torch.utils import Fp4QuantizedTensor

from .cutlass_arithmetic import fp4_quantize, fused_moe
from .impl_contract import require_comm_plan
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

    def run_moe(self, ctx, *, workspace=None):
        require_comm_plan(self, ctx)
        return fused_moe(
            self,
            ctx.x,
            ctx.x_sf,
            ctx.token_selected_experts,
            ctx.token_final_scales,
            ctx.output_dtype,
        )

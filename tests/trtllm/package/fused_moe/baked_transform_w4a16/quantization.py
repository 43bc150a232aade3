"""Quantization methods; as before, and W4A16_NVFP4 is left alone; sizes are the tensors'."""

from typing import ClassVar

import torch
from tensorrt_llm._torch.utils import ActivationType
from tensorrt_llm.logger import logger
from tensorrt_llm.models.modeling_utils import QuantAlgo

from .method_bases import (
    FusedMoEMethodBase,
    FusedMoEQuantScalesNVFP4,
    NVFP4CutlassFusedMoEMethod,
    NVFP4FusedMoEMethod,
)
from .output_pool import share_output

__all__ = [
    "FusedMoEMethodBase",
    "FusedMoEQuantScalesNVFP4",
    "NVFP4CuteDslB12xFusedMoEMethod",
    "NVFP4CutlassFusedMoEMethod",
    "NVFP4FusedMoEMethod",
]


class NVFP4CuteDslB12xFusedMoEMethod(NVFP4CutlassFusedMoEMethod):
    """The CUTLASS layout, and beside it what b12x takes."""

    _ACTIVATION_MAP: ClassVar = {ActivationType.Relu2: "relu2", ActivationType.Swiglu: "silu"}

    def transform_weights(self, module: torch.nn.Module) -> None:
        super().transform_weights(module)
        try:
            from flashinfer import B12xMoEWrapper
            from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout
        except ImportError as error:
            raise RuntimeError(f"the b12x backend needs flashinfer: {error}") from error
        from .fused_moe_cute_dsl_b12x import _SHARED_MOE_OUTPUT_BUF

        experts, rows, _ = module.w3_w1_weight.shape
        inner = module.w2_weight.shape[2] * 16
        weight_scale_2 = (
            (module.fc31_alpha * module.fc31_input_scale).float(),
            (module.fc2_alpha * module.fc2_input_scale).float(),
        )
        block_scale = [
            scale.view(torch.float8_e4m3fn)
            for scale in (module.w3_w1_weight_scale, module.w2_weight_scale)
        ]
        weight_only = (
            module.quant_config is not None
            and module.quant_config.quant_algo == QuantAlgo.W4A16_NVFP4
        )
        if not weight_only:
            block_scale = [
                (scale.float() * factor[:, None, None]).to(torch.float8_e4m3fn)
                for scale, factor in zip(block_scale, weight_scale_2, strict=True)
            ]
        w1_sf = convert_sf_to_mma_layout(
            block_scale[0], m=rows, k=module.hidden_size, num_groups=experts
        )
        w2_sf = convert_sf_to_mma_layout(
            block_scale[1], m=module.w2_weight.shape[1], k=inner, num_groups=experts
        )
        fc31_scale = 1.0 / module.fc31_input_scale
        fc2_scale = (1.0 / module.fc2_input_scale).float()
        w1_alpha = fc31_scale.expand(module.num_experts).float().contiguous()
        w2_alpha = fc2_scale.expand(module.num_experts).float().contiguous()
        if weight_only:
            w1_alpha, w2_alpha = (factor.contiguous() for factor in weight_scale_2)
            fc2_scale = None
        module._b12x_weights = {
            "w1_weight": module.w3_w1_weight.view(torch.uint8),
            "w1_weight_sf": w1_sf,
            "w1_alpha": w1_alpha,
            "w2_weight": module.w2_weight.view(torch.uint8),
            "w2_weight_sf": w2_sf,
            "w2_alpha": w2_alpha,
            "fc2_input_scale": fc2_scale,
        }
        if module.activation_type not in self._ACTIVATION_MAP:
            name = ActivationType(module.activation_type).name
            raise ValueError(f"NVFP4CuteDslB12xFusedMoEMethod does not support activation {name}")
        module.b12x_wrapper = B12xMoEWrapper(
            num_experts=module.num_experts,
            top_k=module.routing_method.experts_per_token,
            hidden_size=module.hidden_size,
            intermediate_size=inner,
            use_cuda_graph=getattr(module, "_b12x_use_cuda_graph", False),
            max_num_tokens=module.moe_max_num_tokens,
            activation=self._ACTIVATION_MAP[module.activation_type],
            quant_mode="w4a16" if weight_only else "nvfp4",
        )
        share_output(module.b12x_wrapper, _SHARED_MOE_OUTPUT_BUF)
        logger.info_once(
            f"NVFP4CuteDslB12xFusedMoEMethod active: hidden={module.hidden_size}, "
            f"intermediate={inner}, experts={module.num_experts}, "
            f"top_k={module.routing_method.experts_per_token}, "
            f"activation={self._ACTIVATION_MAP[module.activation_type]}, "
            f"quant_mode={'w4a16' if weight_only else 'nvfp4'}.",
            key="cute_dsl_b12x_moe_active",
        )

"""Stands for ``torch.ops.trtllm.fp4_quantize`` and ``torch.ops.trtllm.fused_moe``.

Exact scales throughout, read from the module's own parameters by way of ``quant_scales``: what
prefill computes shows whether anybody touched them. Two fp32 matrix products and one bf16 rounding
at the end; the real kernels' order of additions is not modelled.
"""

import torch

from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED
from trtllm_b12x_fix.emulator.quantize import quantize_rows
from trtllm_b12x_fix.formats import e2m1, nvfp4, scale_layout


def fp4_quantize(x, reciprocal_scale):
    """bf16 [T, H] to packed codes uint8 [T, H/2] and linear E4M3 bytes [T, H/16]."""
    quantized = quantize_rows(x, 1.0 / reciprocal_scale, PUBLISHED)
    return e2m1.pack(quantized.codes), quantized.block_scale


def fused_moe(module, x, x_sf, token_selected_experts, token_final_scales, output_dtype):
    """One NVFP4 MoE layer on quantized activations."""
    scales = module.quant_scales
    hidden, inner = module.hidden_size, module.w2_weight.shape[2] * 16
    rows = module.w3_w1_weight.shape[1]
    operand = nvfp4.operand(x, x_sf)
    out = torch.zeros(x.shape[0], hidden)
    for expert in token_selected_experts.unique().tolist():
        tokens, routes = (token_selected_experts == expert).nonzero(as_tuple=True)
        w1 = _weights(module.w3_w1_weight[expert], scales.fc1_weight_block[expert], rows, hidden)
        w2 = _weights(module.w2_weight[expert], scales.fc2_weight_block[expert], hidden, inner)
        h = operand[tokens] @ w1.t() * scales.fc1_global[expert]
        if module.is_gated_activation:
            up, gate = h.chunk(2, dim=-1)
            h = torch.nn.functional.silu(gate) * up
        else:
            h = h.clamp(min=0).square()
        packed, block_scale = fp4_quantize(h, scales.fc2_act_global)
        y = nvfp4.operand(packed, block_scale) @ w2.t() * scales.fc2_global[expert]
        out.index_add_(0, tokens, y * token_final_scales[tokens, routes].unsqueeze(-1))
    return out.to(output_dtype)


def _weights(codes, block_scale, rows, columns):
    linear = scale_layout.unswizzle(block_scale.view(torch.uint8), rows, columns // 16)
    return nvfp4.operand(codes.view(torch.uint8), linear)

"""What every MoE layer has on itself before its weights exist."""

from tensorrt_llm._torch.utils import is_gated_activation


def set_attributes(
    module, routing_method, num_experts, hidden_size, intermediate_size, model_config, kind
):
    """One rank, no expert parallelism: every expert is local and nothing is sharded."""
    module.routing_method = routing_method
    module.num_experts = num_experts
    module.expert_size_per_partition = num_experts
    module.initial_local_expert_ids = list(range(num_experts))
    module.hidden_size = hidden_size
    module.intermediate_size_per_partition = intermediate_size
    module.activation_type = int(kind)  # a plain integer, which IntEnum keys still match
    module.is_gated_activation = is_gated_activation(kind)
    module.intermediate_size_expand_ratio = 2 if module.is_gated_activation else 1
    module.expand_intermediate_size_per_partition = (
        intermediate_size * module.intermediate_size_expand_ratio
    )
    module.quant_config = model_config.quant_config
    module.force_dynamic_quantization = model_config.force_dynamic_quantization
    module.moe_max_num_tokens = model_config.moe_max_num_tokens
    module.layer_load_balancer = None
    module.tp_size = module.ep_size = 1
    module.tp_rank = module.ep_rank = 0
    module.bias = False

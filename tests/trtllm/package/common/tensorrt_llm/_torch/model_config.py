"""What the MoE layers take from the model's config."""

from dataclasses import dataclass, field

from tensorrt_llm.models.modeling_utils import QuantConfig


@dataclass
class ModelConfig:
    """``use_cuda_graph`` is kept by the b12x backend; the rest configures its layers."""

    quant_config: QuantConfig | None = field(default_factory=QuantConfig)
    use_cuda_graph: bool = False
    moe_max_num_tokens: int = 2048
    force_dynamic_quantization: bool = False

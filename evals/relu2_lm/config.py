"""Sizes of the model, and the same as transformers' ``NemotronHConfig`` writes them."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Any

from evals.relu2_lm import tokenizer


class Block(enum.Enum):
    """What a layer is; values are transformers' names in ``layers_block_type``."""

    MAMBA = "linear_attention"
    ATTENTION = "full_attention"
    MOE = "moe"


@dataclass(frozen=True)
class ModelConfig:
    """Sizes. Attention has no positions: the Mamba layer in front of it tells neighbours apart.

    ``hidden`` and ``intermediate`` are whole tiles of 128, as b12x pads to them.
    """

    blocks: tuple[Block, ...]
    hidden: int = 256
    intermediate: int = 128
    shared_intermediate: int = 128
    experts: int = 16
    top_k: int = 4
    heads: int = 4
    head_size: int = 64
    mamba_heads: int = 4
    mamba_head_size: int = 64
    state: int = 32
    convolution: int = 4
    vocabulary: int = len(tokenizer.vocabulary())
    epsilon: float = 1e-5
    smallest_time_step: float = 1e-3
    longest: int = 512

    @property
    def attention_width(self) -> int:
        return self.heads * self.head_size

    @property
    def mamba_width(self) -> int:
        return self.mamba_heads * self.mamba_head_size

    @property
    def convolved(self) -> int:
        """Channels that Mamba's convolution runs over: x, B and C."""
        return self.mamba_width + 2 * self.state


def full() -> ModelConfig:
    """The model that is trained: four MoE layers, the first three after Mamba and attention."""
    pairs = (Block.MAMBA, Block.ATTENTION, Block.ATTENTION, Block.ATTENTION)
    return ModelConfig(tuple(block for mixer in pairs for block in (mixer, Block.MOE)))


def tiny() -> ModelConfig:
    """For tests: the same parts, a hundredth of the work."""
    return ModelConfig(
        (Block.MAMBA, Block.MOE, Block.ATTENTION, Block.MOE),
        hidden=128,
        experts=4,
        top_k=2,
        heads=2,
        head_size=32,
        mamba_heads=2,
        mamba_head_size=32,
        state=16,
    )


def to_transformers(config: ModelConfig) -> dict[str, Any]:
    """``config.json`` of the same model."""
    return {
        "architectures": ["NemotronHForCausalLM"],
        "model_type": "nemotron_h",
        "dtype": "bfloat16",
        "layers_block_type": [block.value for block in config.blocks],
        "hidden_size": config.hidden,
        "intermediate_size": config.shared_intermediate,
        "moe_intermediate_size": config.intermediate,
        "moe_shared_expert_intermediate_size": config.shared_intermediate,
        "n_routed_experts": config.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": config.top_k,
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
        "mlp_hidden_act": "relu2",
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.heads,
        "head_dim": config.head_size,
        "mamba_num_heads": config.mamba_heads,
        "mamba_head_dim": config.mamba_head_size,
        "ssm_state_size": config.state,
        "n_groups": 1,
        "conv_kernel": config.convolution,
        "chunk_size": 128,
        "use_mamba_kernels": False,
        "time_step_min": config.smallest_time_step,
        "vocab_size": config.vocabulary,
        "layer_norm_epsilon": config.epsilon,
        "max_position_embeddings": config.longest,
        "tie_word_embeddings": False,
        "pad_token_id": tokenizer.PAD_ID,
        "bos_token_id": tokenizer.BEGIN_ID,
        "eos_token_id": tokenizer.END_ID,
    }


def from_transformers(stored: dict[str, Any]) -> ModelConfig:
    """Back from ``config.json``, which :func:`to_transformers` wrote."""
    return ModelConfig(
        tuple(Block(name) for name in stored["layers_block_type"]),
        hidden=stored["hidden_size"],
        intermediate=stored["moe_intermediate_size"],
        shared_intermediate=stored["moe_shared_expert_intermediate_size"],
        experts=stored["n_routed_experts"],
        top_k=stored["num_experts_per_tok"],
        heads=stored["num_attention_heads"],
        head_size=stored["head_dim"],
        mamba_heads=stored["mamba_num_heads"],
        mamba_head_size=stored["mamba_head_dim"],
        state=stored["ssm_state_size"],
        convolution=stored["conv_kernel"],
        vocabulary=stored["vocab_size"],
        epsilon=stored["layer_norm_epsilon"],
        smallest_time_step=stored["time_step_min"],
        longest=stored["max_position_embeddings"],
    )

"""The language model: embeddings, layers, logits, and states for generating."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from evals.relu2_lm.config import Block, ModelConfig
from evals.relu2_lm.layers import Attention, Context, MoE, Norm, State
from evals.relu2_lm.mamba import Mamba

_MIXERS = {Block.MAMBA: Mamba, Block.ATTENTION: Attention, Block.MOE: MoE}


class Layer(nn.Module):
    def __init__(self, config: ModelConfig, block: Block) -> None:
        super().__init__()
        self.norm = Norm(config.hidden, config.epsilon)
        self.mixer = _MIXERS[block](config)

    def forward(self, x: Tensor, state: State | None, context: Context) -> Tensor:
        mixed: Tensor = self.mixer(self.norm(x), state, context)
        return x + mixed


class Backbone(nn.Module):
    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocabulary, config.hidden)
        self.layers = nn.ModuleList(Layer(config, block) for block in config.blocks)
        self.norm_f = Norm(config.hidden, config.epsilon)


class LanguageModel(nn.Module):
    """Parameter names are those of transformers' ``NemotronHForCausalLM``."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.model = Backbone(config)
        self.lm_head = nn.Linear(config.hidden, config.vocabulary, bias=False)

    def forward(
        self,
        ids: Tensor,
        states: list[State] | None = None,
        context: Context | None = None,
    ) -> Tensor:
        """ids int64 [B, T]: logits fp32 [B, T, vocabulary]."""
        context = context or Context()
        x: Tensor = self.model.embeddings(ids)
        for number, layer in enumerate(self.model.layers):
            x = layer(x, None if states is None else states[number], context)
        logits: Tensor = self.lm_head(self.model.norm_f(x))
        return logits.float()

    def moe_layers(self) -> list[tuple[int, MoE]]:
        """(layer number, layer) of every mixture of experts."""
        layers = ((number, layer.mixer) for number, layer in enumerate(self.model.layers))
        return [(number, mixer) for number, mixer in layers if isinstance(mixer, MoE)]

    def empty_states(self, batch: int, longest: int) -> list[State]:
        """States for generating up to ``longest`` positions, padding included."""
        embeddings = self.model.embeddings.weight
        dtype, device = embeddings.dtype, embeddings.device

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(batch, *shape, dtype=dtype, device=device)

        def state(block: Block) -> State:
            if block is Block.MAMBA:
                return State(window=zeros(config.convolution - 1, config.convolved))
            if block is Block.ATTENTION:
                return State(keys=zeros(*cache), values=zeros(*cache))
            return State()

        config = self.config
        cache = (config.heads, longest, config.head_size)
        return [state(block) for block in config.blocks]


def initialize(model: LanguageModel, seed: int) -> None:
    """Gaussian weights: 1/sqrt(inputs), half that where a layer adds to the residual."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1:
            continue
        outputs = name.endswith(
            ("o_proj.weight", "out_proj.weight", "down_proj", "down_proj.weight")
        )
        scale = (0.5 if outputs else 1.0) / parameter.shape[-1] ** 0.5
        if name == "model.embeddings.weight":
            scale = 1.0
        values = torch.empty(parameter.shape).normal_(0, scale, generator=generator)
        with torch.no_grad():
            parameter.copy_(values)

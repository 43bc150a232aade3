"""Real checkpoints, made on the spot: small random models quantized and exported by ModelOpt.

The fixture ``modelopt_export`` makes each once per session (about 2 s each after imports); tests
that use it share the xdist group ``modelopt``.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

EXPERTS = 4
VOCABULARY = 256


@dataclass(frozen=True)
class Projection:
    """One expert projection before quantization.

    Attributes:
        name: exported module name, ``...experts.{e}.{gate_proj,up_proj,down_proj}``.
        weight: bf16 [rows, columns].
        scale_group: bf16 [rows or 2 * rows, columns] whose amax sets weight_scale_2: the stacked
            gate and up for either of them, the projection itself otherwise.
        inputs_amax: fp32 scalar, largest magnitude the calibration run fed to this kind of
            projection, over all experts of the layer.
    """

    name: str
    weight: Tensor
    scale_group: Tensor
    inputs_amax: Tensor


@dataclass(frozen=True)
class Export:
    """What went into one ModelOpt export and what came out of it."""

    projections: list[Projection]
    tensors: dict[str, Tensor]
    folder: Path


def qwen3_moe() -> nn.Module:
    """A gated (SwiGLU) mixture of experts, bf16, random weights."""
    from transformers import AutoModelForCausalLM, Qwen3MoeConfig

    config = Qwen3MoeConfig(
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=64,
        num_experts=EXPERTS,
        num_experts_per_tok=2,
        num_hidden_layers=2,
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.02,
        architectures=["Qwen3MoeForCausalLM"],
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def latent_nemotron_h() -> nn.Module:
    """A relu2 mixture of experts behind a latent projection, as in Nemotron 3 Super."""
    return _nemotron_h(moe_latent_size=64)


def nemotron_h() -> nn.Module:
    """A relu2 mixture of experts whose router limits groups, scales and has a bias that counts."""
    model = _nemotron_h(n_group=2, topk_group=1, routed_scaling_factor=2.5)
    generator = torch.Generator().manual_seed(4)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.normal_(0, 0.03, generator=generator)
    return model


def _nemotron_h(**settings: float) -> nn.Module:
    from transformers import AutoModelForCausalLM, NemotronHConfig

    config = NemotronHConfig(
        hidden_size=128,
        intermediate_size=128,
        moe_shared_expert_intermediate_size=64,
        n_routed_experts=EXPERTS,
        num_experts_per_tok=2,
        # transformers cannot run NemotronH without any attention layer.
        layers_block_type=["moe", "full_attention", "moe"],
        mlp_hidden_act="relu2",
        vocab_size=VOCABULARY,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        initializer_range=0.02,
        architectures=["NemotronHForCausalLM"],
        **{"moe_intermediate_size": 64, **settings},
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


@dataclass(frozen=True)
class Family:
    """How one model family names its experts in memory and in the exported file."""

    build: Callable[[], nn.Module]
    moe_layers: tuple[int, ...]
    loaded: str
    exported: str
    gated: bool


FAMILIES = {
    "qwen3_moe": Family(
        build=qwen3_moe,
        moe_layers=(0, 1),
        loaded="model.layers.{}.mlp.experts",
        exported="model.layers.{}.mlp.experts",
        gated=True,
    ),
    "latent_nemotron_h": Family(
        build=latent_nemotron_h,
        moe_layers=(0, 2),
        loaded="model.layers.{}.mixer.experts",
        exported="backbone.layers.{}.mixer.experts",
        gated=False,
    ),
    "nemotron_h": Family(
        build=nemotron_h,
        moe_layers=(0, 2),
        loaded="model.layers.{}.mixer.experts",
        exported="backbone.layers.{}.mixer.experts",
        gated=False,
    ),
}


#: Not one of a kind, so left out where a test runs over all families: whole tiles of 128 rows,
#: which b12x needs of a layer without gate under vLLM.
WIDE = "wide_nemotron_h"
_ALL = {
    **FAMILIES,
    WIDE: replace(FAMILIES["nemotron_h"], build=lambda: _nemotron_h(moe_intermediate_size=128)),
}


@contextmanager
def recorded_input_amax(model: nn.Module) -> Iterator[dict[str, Tensor]]:
    """Record, per input quantizer of the experts, the largest magnitude it is given.

    Yields:
        Quantizer module name to fp32 scalar; filled while the context is open.
    """
    largest: dict[str, Tensor] = defaultdict(lambda: torch.zeros(()))
    hooks = []
    for name, module in model.named_modules():
        if ".experts." in name and name.endswith("_input_quantizer"):

            def record(_module: nn.Module, args: tuple[Tensor, ...], name: str = name) -> None:
                largest[name] = torch.maximum(largest[name], args[0].float().abs().amax())

            hooks.append(module.register_forward_pre_hook(record))
    yield largest
    for hook in hooks:
        hook.remove()


def calibrate_and_quantize(model: nn.Module) -> dict[str, Tensor]:
    """Run ModelOpt's max calibration on random tokens; return what the experts were fed."""
    import modelopt.torch.quantization as mtq

    recorded: dict[str, Tensor] = {}

    def forward_loop(quantized: nn.Module) -> None:
        tokens = torch.randint(VOCABULARY, (2, 2, 32), generator=torch.Generator().manual_seed(1))
        with recorded_input_amax(quantized) as largest:
            for batch in tokens:
                quantized(input_ids=batch)
        recorded.update(largest)

    mtq.quantize(model, mtq.NVFP4_DEFAULT_CFG, forward_loop)
    return recorded


def projections_of(
    family: Family, weights: dict[str, Tensor], inputs_amax: dict[str, Tensor]
) -> list[Projection]:
    """List every expert projection of every layer under the name it is exported as."""
    found = []
    fc1 = "gate_up_proj" if family.gated else "up_proj"
    for layer in family.moe_layers:
        loaded, exported = family.loaded.format(layer), family.exported.format(layer)
        fc1_amax = inputs_amax[f"{loaded}.{fc1}_input_quantizer"]
        fc2_amax = inputs_amax[f"{loaded}.down_proj_input_quantizer"]
        for expert in range(EXPERTS):
            stacked = weights[f"{loaded}.{fc1}"][expert]
            names = ("gate_proj", "up_proj") if family.gated else ("up_proj",)
            for name, part in zip(names, stacked.chunk(len(names)), strict=True):
                found.append(Projection(f"{exported}.{expert}.{name}", part, stacked, fc1_amax))
            down = weights[f"{loaded}.down_proj"][expert]
            found.append(Projection(f"{exported}.{expert}.down_proj", down, down, fc2_amax))
    return found


def make_export(name: str, folder: Path) -> Export:
    """Quantize and export one family with ModelOpt on the CPU."""
    from modelopt.torch.export import export_hf_checkpoint

    family = _ALL[name]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = family.build()
        weights = {name: value.clone() for name, value in model.state_dict().items()}
        inputs_amax = calibrate_and_quantize(model)
        export_hf_checkpoint(model, export_dir=folder)
    tensors: dict[str, Tensor] = {}
    for file in folder.glob("*.safetensors"):
        tensors.update(load_file(file))
    return Export(projections_of(family, weights, inputs_amax), tensors, folder)

"""A layer of a user's checkpoint as input of a layer check: inputs, routing, the routed experts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from trtllm_b12x_fix.checkpoint import conventions
from trtllm_b12x_fix.checkpoint.assemble import LoadedLayer, largest_input_scales, load_experts
from trtllm_b12x_fix.checkpoint.config import ModelConfig
from trtllm_b12x_fix.checkpoint.discovery import discover
from trtllm_b12x_fix.checkpoint.files import Checkpoint, open_checkpoint
from trtllm_b12x_fix.checkpoint.findings import Finding
from trtllm_b12x_fix.checkpoint.layers import LayerEntry, Layers, Stack, Storage, choose
from trtllm_b12x_fix.checkpoint.own_router import read_router
from trtllm_b12x_fix.checkpoint.recorded import read_recorded
from trtllm_b12x_fix.checkpoint.router import random_routing
from trtllm_b12x_fix.emulator.moe import Routing
from trtllm_b12x_fix.emulator.reference import intermediate_amax
from trtllm_b12x_fix.errors import InputError, ScaleError, ShapeError
from trtllm_b12x_fix.formats.nvfp4 import CALIBRATION_MAX
from trtllm_b12x_fix.layer import Activation, MoELayer, pad_activations, pad_to_tiles
from trtllm_b12x_fix.layer_check.run import LayerInput


@dataclass(frozen=True)
class Request:
    """What to load.

    Attributes:
        layer: block number or prefix.
        experts: a sample of experts, ``None`` for all.
        top_k: overrides the config.
        activation: overrides the config and the tensors' own evidence.
        inputs: ``FILE.safetensors`` or ``FILE.safetensors:TENSOR`` of recorded activations.
        tokens: how many tokens are needed.
        seed: of random inputs and routing.
    """

    path: Path
    layer: str
    tokens: int
    seed: int
    experts: tuple[int, ...] | None = None
    top_k: int | None = None
    activation: Activation | None = None
    inputs: str | None = None


@dataclass(frozen=True)
class Loaded:
    """The layer check's input and what loading brought to light."""

    subject: LayerInput
    findings: tuple[Finding, ...]


def load(request: Request) -> Loaded:
    """Read what one layer's check needs: its router, and the experts that tokens are routed to.

    Raises:
        B12xFixError: the checkpoint or the request cannot be used; the message names what.
    """
    checkpoint = open_checkpoint(request.path)
    entry = choose(discover(checkpoint), request.layer, checkpoint.name)
    checkpoint.require_whole(f"{entry.prefix}.")
    _require_sizes(checkpoint, entry)
    config = ModelConfig(checkpoint.config)
    activation = request.activation or config.activation(entry)
    pool = _pool(request.experts, entry)
    top_k = _top_k(request, config, len(pool))
    generator = torch.Generator().manual_seed(request.seed)
    x, inputs = _inputs(request, checkpoint, entry, generator)
    if x.shape[1] != entry.hidden:
        raise ShapeError(
            f"inputs are [{x.shape[0]}, {x.shape[1]}], {entry.prefix} works on {entry.hidden}"
        )
    route = partial(_route, checkpoint, entry, config, pool=pool, top_k=top_k, seed=request.seed)
    routing, experts, routed = route(x)
    loaded = _load(checkpoint, entry, experts, activation)
    if request.inputs is None:
        x, shrunk = _fit_intermediate(loaded.layer, x, routing)
        if shrunk:  # another input may go elsewhere
            inputs += shrunk
            before = experts
            routing, experts, routed = route(x)
            if experts != before:
                del loaded  # two sets of experts must never be held at once
                loaded = _load(checkpoint, entry, experts, activation)
    subject = _subject(loaded.layer, x, routing, f"{inputs}; {routed}")
    subject = replace(subject, model_experts=entry.experts)
    names = (*checkpoint.findings, *config.contradictions(entry), *entry.findings)
    return Loaded(subject, (*names, *loaded.findings))


#: Tokens that tell nearly how large FC2's input gets, at a fraction of the cost of all.
_PROBE_TOKENS = 4


def _fit_intermediate(layer: MoELayer, x: Tensor, routing: Routing) -> tuple[Tensor, str]:
    """Halve made-up inputs until FC2's input fits its calibration; also in words.

    N(0,1) in every channel is more than a layer with outlier channels ever sees: at the calibrated
    amax its FC2 input would saturate, and a sound layer would look broken.
    """
    limit = CALIBRATION_MAX * float(layer.fc2.largest_input_scale)
    halvings = 0
    for tokens in (min(_PROBE_TOKENS, x.shape[0]), x.shape[0]):
        probe = Routing(routing.expert_ids[:tokens], routing.weights[:tokens])
        while halvings < 20 and intermediate_amax(layer, x[:tokens], probe) > limit:
            x, halvings = x / 2, halvings + 1
    return x, f", / 2^{halvings} so that FC2's input fits its scale" if halvings else ""


def _require_sizes(checkpoint: Checkpoint, entry: LayerEntry) -> None:
    """Name the missing shard of a layer none of whose weights are here.

    Raises:
        InputError: there is such a shard.
    """
    if entry.hidden:
        return
    split = entry.storage is Storage.SPLIT
    matrix = entry.matrix(0, entry.names.up) if split else entry.fused(entry.names.up)
    spelling = conventions.detect(checkpoint, matrix)
    for tensor in (spelling.packed, spelling.block_scale):
        checkpoint.info(tensor)


def _subject(layer: MoELayer, x: Tensor, routing: Routing, inputs: str) -> LayerInput:
    padded = pad_to_tiles(layer)
    return LayerInput(padded, pad_activations(x, padded.hidden), routing, inputs)


def _load(
    checkpoint: Checkpoint, entry: LayerEntry, experts: list[int], activation: Activation
) -> LoadedLayer:
    words = _describe(checkpoint, entry, experts)
    return load_experts(checkpoint, entry, experts, activation, words)


def _describe(checkpoint: Checkpoint, entry: LayerEntry, used: Sequence[int]) -> str:
    some = "" if len(used) == entry.experts else f", {len(used)} of {entry.experts} experts read"
    stack = {True: ", one more block that predicts further tokens", False: ", side stack"}
    side = "" if entry.stack is Stack.MODEL else stack[entry.is_predictor]
    kind = f"{entry.dialect.value}, {entry.storage.value}{side}{some}"
    return f"{checkpoint.name}: {entry.prefix} ({kind})"


def _pool(asked: tuple[int, ...] | None, entry: LayerEntry) -> tuple[int, ...]:
    if asked is None:
        return tuple(range(entry.experts))
    if beyond := [expert for expert in asked if expert >= entry.experts]:
        raise InputError(f"{entry.prefix} has experts 0 to {entry.experts - 1}, not {beyond[0]}")
    return asked


def _top_k(request: Request, config: ModelConfig, experts: int) -> int:
    top_k = request.top_k or config.top_k()
    if top_k is None:
        raise InputError("config.json does not say how many experts a token takes: give --top-k")
    if top_k > experts:
        raise InputError(f"top-k is {top_k}, but only {experts} experts take part")
    return top_k


def _inputs(
    request: Request, checkpoint: Checkpoint, entry: LayerEntry, generator: torch.Generator
) -> tuple[Tensor, str]:
    if request.inputs is not None:
        return read_recorded(request.inputs, request.tokens)
    x = torch.randn(request.tokens, entry.hidden, generator=generator)
    # The calibrated scale says what amax the layer's inputs have: 2688 times it.
    scale, _ = largest_input_scales(checkpoint, entry)
    x = (x * (CALIBRATION_MAX * scale / x.abs().max())).to(torch.bfloat16)
    if not bool(torch.isfinite(x).all()):
        raise ScaleError(
            f"{checkpoint.name}: {entry.prefix}: the largest input_scale is {float(scale)!r}; "
            f"inputs of {CALIBRATION_MAX:g} times that are beyond bf16"
        )
    return x, "N(0,1) scaled so that the largest is 2688 * input_scale"


def _route(
    checkpoint: Checkpoint,
    entry: LayerEntry,
    config: ModelConfig,
    x: Tensor,
    *,
    pool: tuple[int, ...],
    top_k: int,
    seed: int,
) -> tuple[Routing, list[int], str]:
    """Routing with expert ids renumbered to their places in the list of experts that have work,
    that list, and how the routing came about."""
    router, why_not = None, "a sample of experts was asked for"
    if len(pool) == entry.experts:
        router, why_not = read_router(checkpoint, entry, config, top_k)
    if router is not None:
        ids, weights = router.route(x)
        words = f"the layer's own router ({router.spec.scoring.value})"
    else:
        generator = torch.Generator().manual_seed(seed + 1)
        places, weights = random_routing(x.shape[0], len(pool), top_k, generator)
        ids, words = torch.tensor(pool)[places], f"random routing ({why_not})"
    used, local = ids.unique(return_inverse=True)
    return Routing(local, weights), used.tolist(), words


def list_layers(path: Path) -> tuple[Layers, Checkpoint]:
    """The MoE layers of a checkpoint, from headers alone.

    Raises:
        B12xFixError: the checkpoint cannot be used.
    """
    checkpoint = open_checkpoint(path)
    return discover(checkpoint), checkpoint

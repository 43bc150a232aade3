"""Make the experts of a preset, each by itself from (seed, expert), quantized as ModelOpt does.

Only the experts asked for are made, on a few threads, each holding one matrix in fp32: 512 experts
of the reported layer would be 5.6 GB in fp32 and are 1.6 GB packed.

Generator: torch's Mersenne Twister, seeded per expert, and its normal distribution. The bits repeat
with the same torch on the same kind of processor, whatever the number of threads; torch promises
no more, and elsewhere last bits of a few weights may differ, which moves no figure of a report.
"""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass

import torch
from torch import Tensor

from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.formats.nvfp4 import BLOCK, global_scale_from_amax
from trtllm_b12x_fix.layer import Activation, ExpertMatrices, MoELayer
from trtllm_b12x_fix.presets.quantize_rows import Quantizer, choose
from trtllm_b12x_fix.presets.shapes import LayerShape, Preset, WeightLaw

#: Tokens of the made-up calibration set.
CALIBRATION_TOKENS = 512
#: More threads would only wait for memory, and each holds a matrix in fp32.
_MOST_THREADS = 4
_SEEDS = 2**32

Progress = Callable[[str], None]


@dataclass(frozen=True)
class InputScales:
    """Calibrated input scales of a layer, one for all its experts: fp32 [] each.

    ModelOpt writes one for all experts of a fused layer, and TensorRT-LLM takes the layer's largest
    in any case.
    """

    fc1: Tensor
    fc2: Tensor


def stream(seed: int, purpose: str, index: int = 0) -> torch.Generator:
    """A generator of its own for one purpose, and for one expert of it.

    torch's generator takes 32 bits of a seed and drops the rest, so they are mixed first; indices
    are added afterwards, which keeps every expert's seed distinct.
    """
    digest = hashlib.blake2b(f"{purpose}/{seed}".encode(), digest_size=4).digest()
    mixed = (int.from_bytes(digest, "little") + index) % _SEEDS
    return torch.Generator().manual_seed(mixed)


def tokens(shape: LayerShape, seed: int, count: int, purpose: str = "inputs") -> Tensor:
    """N(0, 1) activations, bf16 [count, hidden]; fewer tokens are the head of more."""
    generator = stream(seed, purpose)
    return torch.randn(count, shape.hidden, generator=generator).to(torch.bfloat16)


def calibrate(preset: Preset, shape: LayerShape, seed: int) -> InputScales:
    """Max calibration, amax / 2688, on 512 tokens of their own seed.

    FC1's amax is over the tokens. FC2's is over every token in each of the first ``top_k`` experts:
    as many (token, expert) pairs as those tokens make in service, without a router. Both are
    rounded to bf16 first, as a serving engine sees them.
    """
    calibration = tokens(shape, seed, CALIBRATION_TOKENS, "calibration")
    wide = calibration.float()
    buffer = torch.empty(shape.fc1_rows, shape.hidden)
    largest = torch.zeros(())
    for expert in range(shape.top_k):
        factors = _fc1_normals(preset, seed, expert, buffer)
        h = (wide @ buffer.t()).mul_(factors)
        largest = torch.maximum(largest, _activate(h, shape.activation).bfloat16().abs().amax())
    return InputScales(
        global_scale_from_amax(calibration.abs().amax()), global_scale_from_amax(largest)
    )


def make_layer(
    preset: Preset,
    shape: LayerShape,
    experts: Sequence[int],
    seed: int,
    progress: Progress = lambda _: None,
    quantizer: Quantizer | None = None,
) -> MoELayer:
    """Make the named experts, in this order, and calibrate their inputs.

    Args:
        shape: the preset's own, or another one to which its weight laws are applied.
        experts: distinct, of ``range(shape.experts)``.
        quantizer: ``None`` takes the fastest.

    Raises:
        InputError: an expert that the shape does not have.
    """
    if not experts or not all(0 <= expert < shape.experts for expert in experts):
        raise InputError(f"experts must be some of 0 to {shape.experts - 1}, got {list(experts)}")
    if quantizer is None:
        quantizer = choose(shape.weights_per_expert * len(experts))
    progress("calibrating")
    scales = calibrate(preset, shape, seed)
    fc1 = _empty(len(experts), shape.fc1_rows, shape.hidden, scales.fc1)
    fc2 = _empty(len(experts), shape.hidden, shape.intermediate, scales.fc2)
    maker = _Maker(preset, shape, seed, quantizer, fc1, fc2)
    _run(maker, experts, progress)
    return MoELayer(
        fc1,
        fc2,
        shape.activation,
        f"preset {preset.name}: made up with seed {seed}; {preset.origin}",
        shape.hidden,
        shape.intermediate,
    )


class _Maker:
    """Makes one expert at a time into its place; every thread has its own fp32 buffer."""

    def __init__(
        self,
        preset: Preset,
        shape: LayerShape,
        seed: int,
        quantizer: Quantizer,
        fc1: ExpertMatrices,
        fc2: ExpertMatrices,
    ) -> None:
        self._preset, self._shape, self._seed = preset, shape, seed
        self._quantizer = quantizer
        self._fc1, self._fc2 = fc1, fc2
        self._local = threading.local()

    def make(self, place: int, expert: int) -> None:
        """Make both matrices of ``expert`` at index ``place`` of the layer."""
        shape = self._shape
        normals = self._buffer(shape.fc1_rows, shape.hidden)
        factors = _fc1_normals(self._preset, self._seed, expert, normals)
        self._quantize(self._fc1, place, normals, factors)
        normals = self._buffer(shape.hidden, shape.intermediate)
        factors = _normals(self._preset.fc2, stream(self._seed, "fc2", expert), normals)
        self._quantize(self._fc2, place, normals, factors)

    def _quantize(self, into: ExpertMatrices, place: int, normals: Tensor, factors: Tensor) -> None:
        packed, block_scale = into.packed[place], into.block_scale[place]
        into.weight_scale_2[place] = self._quantizer(normals, factors, packed, block_scale)

    def _buffer(self, rows: int, columns: int) -> Tensor:
        """fp32 [rows, columns] of this thread's memory, reused by its next matrix."""
        if not hasattr(self._local, "memory"):
            largest = max(self._shape.fc1_rows, self._shape.intermediate) * self._shape.hidden
            self._local.memory = torch.empty(largest)
        memory: Tensor = self._local.memory
        return memory[: rows * columns].view(rows, columns)


def _run(maker: _Maker, experts: Sequence[int], progress: Progress) -> None:
    threads = min(_MOST_THREADS, torch.get_num_threads(), len(experts))
    with ThreadPoolExecutor(threads) as pool:
        futures = [pool.submit(maker.make, *place) for place in enumerate(experts)]
        try:
            for done, future in enumerate(as_completed(futures), start=1):
                future.result()
                progress(f"making experts, {done} of {len(experts)}")
        finally:
            # After an error or Ctrl-C, what has not begun must not begin.
            pool.shutdown(cancel_futures=True)


def _fc1_normals(preset: Preset, seed: int, expert: int, out: Tensor) -> Tensor:
    return _normals(preset.fc1, stream(seed, "fc1", expert), out)


def _normals(law: WeightLaw, generator: torch.Generator, out: Tensor) -> Tensor:
    """Fill fp32 [R, C] with N(0, 1); return the factors of its rows, fp32 [R]."""
    rows = torch.randn(out.shape[0], generator=generator)
    out.normal_(generator=generator)
    return rows.mul_(law.spread).exp_().mul_(law.sigma)


def _activate(h: Tensor, activation: Activation) -> Tensor:
    if activation is Activation.RELU2:
        return h.clamp_(min=0).square_()
    up, gate = h.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def _empty(experts: int, rows: int, columns: int, input_scale: Tensor) -> ExpertMatrices:
    return ExpertMatrices(
        torch.empty(experts, rows, columns // 2, dtype=torch.uint8),
        torch.empty(experts, rows, columns // BLOCK, dtype=torch.uint8),
        torch.empty(experts),
        input_scale.expand(experts).clone(),
    )

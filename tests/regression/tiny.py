"""A two-layer random Llama, tokens of single characters: the whole regression in seconds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from evals.regress import __main__ as command
from evals.regress import language_model, statistics, suite
from evals.regress.language_model import LanguageModel
from evals.regress.suite import Suite, SuiteName

VOCABULARY, HIDDEN = 128, 64
SUITE = Suite(SuiteName.SMALL, 6, 3, 60, range(8), 8, 2, new_tokens=6)
#: Without generation, for planted defects.
QUICK = replace(SUITE, prompts=0)


class Characters:
    """One token a character, with offsets: what the regression uses of a tokenizer."""

    def __call__(self, text: str, return_offsets_mapping: bool = False) -> dict[str, Any]:
        ids = [ord(character) % VOCABULARY for character in text]
        return {"input_ids": ids, "offset_mapping": [(n, n + 1) for n in range(len(text))]}

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> list[int]:
        return self(messages[0]["content"])["input_ids"]


@cache
def model() -> LanguageModel:
    """Weights large enough that baking costs little where they are, as small models have them."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=6 * 32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        tie_word_embeddings=True,
        eos_token_id=VOCABULARY - 1,
    )
    torch.manual_seed(3)
    causal = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in causal.model.layers:
            for name in ("gate_proj", "up_proj", "down_proj"):
                getattr(layer.mlp, name).weight.normal_(0, 0.6)
        causal.model.embed_tokens.weight.normal_(0, 0.3)
    causal = causal.to(torch.bfloat16).eval().requires_grad_(False)
    return LanguageModel(causal, Characters(), "tiny.gguf", "0" * 64)


def texts(folder: Path) -> tuple[Path, Path]:
    """Files as GSM8K and HumanEval have them."""
    items = folder / "gsm8k.jsonl"
    items.write_text(
        "\n".join(
            f'{{"question": "How many is {n} and {n + 3}, item {n}?", '
            f'"answer": "It is {2 * n + 3}. #### {2 * n + 3}"}}'
            for n in range(40)
        )
    )
    problems = folder / "problems.jsonl"
    problems.write_text(
        "\n".join(
            f'{{"task_id": "T/{n}", "prompt": "def f{n}(x):\\n", '
            f'"canonical_solution": "    return x + {n}\\n"}}'
            for n in range(8)
        )
    )
    return items, problems


class Bench:
    """The command on the tiny model, in a folder of its own."""

    def __init__(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, chosen: Suite = SUITE
    ) -> None:
        self.folder = folder
        self.items, self.problems = texts(folder)
        self.calibration, self.baseline = folder / "calibration.json", folder / "baseline.json"
        monkeypatch.setattr(language_model, "load", lambda *_: model())
        monkeypatch.setattr(statistics, "DRAWS", 500)  # enough to tell broken from sound
        monkeypatch.setattr(suite, "SUITES", {"small": chosen})

    def run(self, *options: str) -> int:
        return command.main(
            [
                *("--gsm8k", str(self.items), "--human-eval", str(self.problems)),
                *("--calibration", str(self.calibration), "--baseline", str(self.baseline)),
                *options,
            ]
        )

    def prepare(self) -> None:
        assert self.run("--calibrate") == 0
        assert self.run("--write-baseline") == 0

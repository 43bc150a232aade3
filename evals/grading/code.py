"""Finds the program in a reply. Text is only searched here, never parsed or run."""

from __future__ import annotations

import re
from dataclasses import dataclass

#: Where lm-eval's task ``humaneval`` ends a completion.
COMPLETION_STOP = ("\nclass", "\ndef", "\n#", "\nif", "\nprint")
_FENCE = re.compile(r"^(?P<indent>[ \t]*)(?P<marks>`{3,}|~{3,})[ \t]*(?P<info>[^`\n]*)$")
_PYTHON = ("", "python", "python3", "py")
_FUTURE = re.compile(r"^from[ \t]+__future__[ \t]+import[^\n]*$", re.MULTILINE)
_FIRST_CODE_LINE = re.compile(r"^(?:from\s+\S+\s+import\s|(?:import|def|class|async\s+def)\s|@)")


@dataclass(frozen=True)
class Block:
    """A fenced block: its language and its lines, without the fence's own indentation."""

    language: str
    text: str


def complete(prompt: str, completion: str) -> str:
    """The program of a completion: prompt and text up to lm-eval's stop strings."""
    ends = [completion.find(stop) for stop in COMPLETION_STOP if stop in completion]
    return prompt + (completion[: min(ends)] if ends else completion)


def from_chat(prompt: str, entry_point: str, text: str) -> str | None:
    """The program of a chat answer, None where no code in it defines the function.

    The last block that defines it counts: earlier ones are drafts. A block of indented lines alone
    continues the prompt. The prompt goes first, for the imports and helpers that answers leave out.
    """
    blocks = [block.text for block in fenced(text) if block.language in _PYTHON]
    # Last of all the text before any fence: an answer without one, or whose opening one was given
    # in the prompt.
    head = _before_fence(text)
    for code in (*reversed(blocks), _from_first_code_line(head)):
        if defines(entry_point, code):
            return _behind(prompt, code)
    for code in (*reversed(blocks), head):
        if _only_indented(code):
            return prompt + code
    return None


def fenced(text: str) -> list[Block]:
    """The fenced blocks of Markdown; one that is never closed goes to the end."""
    blocks: list[Block] = []
    fence: re.Match[str] | None = None
    lines: list[str] = []
    for line in text.splitlines():
        mark = _FENCE.match(line)
        if fence is None:
            fence, lines = mark, []
        elif mark and not mark["info"].strip() and mark["marks"].startswith(fence["marks"]):
            blocks.append(_block(fence, lines))
            fence = None
        else:
            lines.append(line)
    return blocks if fence is None else [*blocks, _block(fence, lines)]


def defines(entry_point: str, code: str) -> bool:
    """Whether code defines a function of this name at its top level."""
    pattern = rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry_point)}[ \t]*[(\[]"
    return re.search(pattern, code, re.MULTILINE) is not None


def _block(fence: re.Match[str], lines: list[str]) -> Block:
    indent = fence["indent"]
    info = fence["info"].strip().split()
    text = "\n".join(line.removeprefix(indent) for line in lines) + "\n"
    return Block(info[0].lower() if info else "", text)


def _behind(prompt: str, code: str) -> str:
    # A __future__ import has to come first, and the prompt would stand before it.
    futures = [match.group(0) + "\n" for match in _FUTURE.finditer(code)]
    return "".join(futures) + prompt + "\n\n" + _FUTURE.sub("", code)


def _before_fence(text: str) -> str:
    lines = text.splitlines(keepends=True)
    end = next((i for i, line in enumerate(lines) if _FENCE.match(line.rstrip("\r\n"))), len(lines))
    return "".join(lines[:end])


def _only_indented(block: str) -> bool:
    lines = [line for line in block.splitlines() if line.strip()]
    return bool(lines) and all(line[0] in " \t" for line in lines)


def _from_first_code_line(text: str) -> str:
    lines = text.splitlines(keepends=True)
    first = next((number for number, line in enumerate(lines) if _FIRST_CODE_LINE.match(line)), 0)
    return "".join(lines[first:])

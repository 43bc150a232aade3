"""GSM8K answers: lm-eval's two extractions side by side, compared as numbers and as lm-eval does.

The patterns, the clean-up and the comparison are those of lm-eval's task ``gsm8k`` (version 3 of
its YAML); a test holds them against that file and against lm-eval's own filter.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation

from evals.grading.statuses import Verdict
from trtllm_b12x_fix.errors import InputError

STRICT_PATTERN = r"#### (\-?[0-9\.\,]+)"
FLEXIBLE_PATTERN = r"(-?[$0-9.,]{2,})|(-?[0-9]+)"
#: Removed, in this order, from answer and target before they are compared.
IGNORED_PATTERNS = (",", r"\$", r"(?s).*#### ", r"\.$")
STOP = ("Question:", "</s>", "<|im_end|>")
NO_MATCH = "[invalid]"

_STRICT, _FLEXIBLE = re.compile(STRICT_PATTERN), re.compile(FLEXIBLE_PATTERN)


@dataclass(frozen=True)
class NumberScore:
    """One extraction and its verdict.

    Attributes:
        answer: what was extracted, as it stands in the text; None where nothing was.
        verdict: compared as numbers: 18.00 is 18.
        lm_eval: what lm-eval's exact_match says, which compares text: 18.00 is not 18.
    """

    answer: str | None
    verdict: Verdict
    lm_eval: bool


@dataclass(frozen=True)
class Gsm8kScore:
    """Both extractions of one answer."""

    strict: NumberScore
    flexible: NumberScore


def target(answer: str) -> str:
    """The number at the end of a GSM8K solution.

    Raises:
        InputError: there is none.
    """
    number = clean(answer)
    if "#### " not in answer or as_number(number) is None:
        raise InputError(f"a GSM8K answer without '#### number': {answer[-60:]!r}")
    return number


def extract_strict(text: str) -> str | None:
    """The first number after ``####``."""
    match = _STRICT.search(text)
    return match[1].strip() if match else None


def extract_flexible(text: str) -> str | None:
    """The last thing that looks like a number, full stop included."""
    found = [match[0] for match in _FLEXIBLE.finditer(text)]
    return found[-1].strip() if found else None


def clean(text: str) -> str:
    """Text as lm-eval compares it."""
    for pattern in IGNORED_PATTERNS:
        text = re.sub(pattern, "", text)
    return text.lower()


def as_number(text: str) -> Decimal | None:
    """The value of cleaned text, None where it is no number."""
    try:
        number = Decimal(text.strip())
    except InvalidOperation:
        return None
    return number if number.is_finite() else None


def score(text: str, answer: str) -> Gsm8kScore:
    """Judge a reply's text against a solution of the data set."""
    wanted = target(answer)
    return Gsm8kScore(_score(extract_strict(text), wanted), _score(extract_flexible(text), wanted))


def _score(answer: str | None, wanted: str) -> NumberScore:
    if answer is None:
        return NumberScore(None, Verdict.NO_ANSWER, clean(NO_MATCH) == wanted)
    cleaned = clean(answer)
    number = as_number(cleaned)
    if number is None:
        return NumberScore(answer, Verdict.NO_ANSWER, cleaned == wanted)
    right = number == as_number(wanted)
    return NumberScore(answer, Verdict.CORRECT if right else Verdict.WRONG, cleaned == wanted)

"""Argument types: text in, value out, or an error that says what to write."""

from __future__ import annotations

import argparse
import re

#: As in ``presets.shapes``, which needs torch.
PRESET_NAMES = ("super-layer1", "nemotron-3-nano", "qwen3.6-35b-a3b")
ARM_NAMES = ("fix", "baked", "alphas", "fp32-rescale", "unit")


def rows(text: str) -> tuple[int, ...]:
    """``1,2,4``: distinct positive row counts."""
    if not re.fullmatch(r"[0-9]{1,7}(,[0-9]{1,7})*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of integers")
    counts = tuple(int(part) for part in text.split(","))
    if any(count < 1 for count in counts) or len(set(counts)) != len(counts):
        raise argparse.ArgumentTypeError(f"{text!r}: row counts must be positive and distinct")
    return counts


def seed(text: str) -> int:
    """A seed; the check also uses seed + 1, and torch takes 64 signed bits."""
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not an integer of 0 to 10^18 - 1")
    return int(text)


def arms(text: str) -> tuple[str, ...]:
    """``fix,baked``: names of arms, each once."""
    names = tuple(part.strip() for part in text.split(","))
    unknown = [name for name in names if name not in ARM_NAMES]
    if unknown or len(set(names)) != len(names):
        raise argparse.ArgumentTypeError(f"{text!r}: arms are {', '.join(ARM_NAMES)}, each once")
    return names


def gate(text: str) -> tuple[str, float]:
    """``fix:1``: an arm and a limit in percent, returned as a fraction."""
    match = re.fullmatch(r"([a-z0-9-]+):([0-9]{1,6}(?:\.[0-9]*)?|\.[0-9]+)%?", text)
    if not match or match[1] not in ARM_NAMES:
        raise argparse.ArgumentTypeError(
            f"{text!r}: write ARM:PERCENT, such as fix:1 or fp32-rescale:2.5"
        )
    return match[1], float(match[2]) / 100


def experts(text: str) -> tuple[int, ...]:
    """``0-31`` or ``0,5,9-11``: distinct experts in rising order."""
    chosen: set[int] = set()
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,6})(?:\s*-\s*([0-9]{1,6}))?\s*", part)
        if not match or int(match[2] or match[1]) < int(match[1]):
            raise argparse.ArgumentTypeError(f"{text!r}: write experts as 0-31 or 0,5,9-11")
        chosen |= set(range(int(match[1]), int(match[2] or match[1]) + 1))
    return tuple(sorted(chosen))


def positive(text: str) -> int:
    """A positive integer."""
    if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive integer")
    return int(text)


def seconds(text: str) -> float:
    """A duration of at most a day, in seconds."""
    if not re.fullmatch(r"[0-9]{1,5}(\.[0-9]{1,3})?", text) or float(text) > 86400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds up to 86400")
    return float(text)

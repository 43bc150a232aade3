"""Show a text report: plain everywhere, coloured on a terminal where rich is installed."""

from __future__ import annotations

import sys

from trtllm_b12x_fix.report import files

# What a reader looks for first. The text itself never depends on rich being there.
_STYLES = {
    r"VERDICT  good": "bold green",
    r"VERDICT  FINDING": "bold red",
    r"FAILED": "bold red",
    r"\b(exact|passed)\b": "green",
    r"EMULATED": "bold",
}


def show(text: str) -> None:
    """Print a report.

    Raises:
        InputError: standard output is closed.
    """
    if sys.stdout is None or not sys.stdout.isatty():
        files.write(files.STDOUT, text)
        return
    try:
        from rich.console import Console
        from rich.text import Text
    except ImportError:
        files.write(files.STDOUT, text)
        return
    styled = Text(text, end="")
    for pattern, style in _STYLES.items():
        styled.highlight_regex(pattern, style)
    # The terminal wraps by itself: rich would break the columns of a wide table.
    Console(soft_wrap=True).print(styled, end="")

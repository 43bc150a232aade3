"""Pieces of plain-text reports: percentages, aligned grids, wrapped lines."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

WIDTH = 110
_LABEL = 9


def printable(text: str) -> str:
    """Text from files as a terminal may have it: control and escape characters become "?".

    Names come from checkpoints; an escape sequence in one must not reach the terminal.
    """
    return "".join(character if character.isprintable() else "?" for character in text)


def percent(value: float) -> str:
    """A fraction as percent, with enough digits to tell small ones apart."""
    if math.isnan(value):
        return "not finite"
    if math.isinf(value):
        return "infinite"
    if value == 0:
        return "0"
    if value < 0.0001:
        return f"{100 * value:.1e}%"
    return f"{100 * value:.2f}%" if value < 0.1 else f"{100 * value:.1f}%"


def span(values: Sequence[float]) -> str:
    """Smallest to largest of some fractions, as percent."""
    if any(math.isnan(value) for value in values):
        return "not finite"
    low, high = percent(min(values)), percent(max(values))
    return low if low == high else f"{low} to {high}"


def count_rows(rows: int) -> str:
    """Row count in words."""
    return "1 row" if rows == 1 else f"{rows} rows"


def labelled(label: str, text: str) -> str:
    """A wrapped line with a label in the left margin."""
    indent = " " * _LABEL
    return textwrap.fill(
        printable(text), WIDTH, initial_indent=label.ljust(_LABEL), subsequent_indent=indent
    )


def grid(header: list[str], rows: list[list[str]], left: int) -> str:
    """Align columns: the first ``left`` to the left, the others to the right."""
    table = [header, *rows]
    widths = [max(len(row[i]) for row in table) for i in range(len(header))]
    lines = []
    for row in table:
        cells = [
            cell.ljust(width) if i < left or i == len(row) - 1 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        lines.append("  ".join(cells).rstrip())
    lines.insert(1, "  ".join("-" * width for width in widths))
    return "\n".join(lines)


def bullet(text: str) -> str:
    """A wrapped list item."""
    return textwrap.fill(printable(text), WIDTH, initial_indent="  - ", subsequent_indent="    ")


def paragraph(text: str) -> str:
    """A wrapped paragraph."""
    return textwrap.fill(printable(text), WIDTH)

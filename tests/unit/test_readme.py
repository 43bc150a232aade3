"""The README says what the program does: its output, its options, its versions, no gaps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from trtllm_b12x_fix import cli
from trtllm_b12x_fix.commands import parsing
from trtllm_b12x_fix.emulator.contract import KNOWN_VERSIONS
from trtllm_b12x_fix.report.document import SCHEMA

README = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
NUMBER = re.compile(r"\d+(?:\.\d+)?(?:e[-+]\d+)?")


def block_after(marker: str) -> str:
    """The fenced block that follows a marker comment."""
    return README.partition(marker)[2].partition("```\n")[2].partition("\n```")[0]


def words(text: str) -> list[str]:
    """Text without numbers and without spacing, which follows from the widths of numbers."""
    return NUMBER.sub("#", re.sub(r"-{2,}", "", text)).split()


def test_the_output_of_make_check_is_the_programs(capsys):
    assert cli.main(["check-layer"]) == 0
    printed, shown = capsys.readouterr().out.rstrip("\n"), block_after("<!-- check-output -->")
    assert words(shown) == words(printed)
    for ours, theirs in zip(NUMBER.findall(shown), NUMBER.findall(printed), strict=True):
        # Another CPU sums in another order: last digits may move.
        assert float(ours) == pytest.approx(float(theirs), rel=0.03, abs=0.02)


def test_no_gap_was_left_to_fill():
    assert not re.findall(r"@[A-Z_]+@|TODO|FIXME|XXX", README)


def test_options_arms_versions_and_schema_are_named():
    parser = cli.build_parser()
    (subcommands,) = (a for a in parser._actions if hasattr(a, "choices") and a.choices)
    options = [
        option
        for action in subcommands.choices["check-layer"]._actions
        for option in action.option_strings
        if option.startswith("--") and option != "--help"
    ]
    for name in (*options, *parsing.ARM_NAMES, *KNOWN_VERSIONS, SCHEMA):
        assert name in README, name

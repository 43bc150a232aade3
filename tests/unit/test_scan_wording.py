"""A finding says what, where, how much and what to do, in every report."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.checkpoints import save
from tests.scan_cases import CONFIG, FLOAT8, PREFIX, command, run, sound, tensor
from trtllm_b12x_fix.scan.findings import RULES, Code

NAME = tensor("up_proj", "weight_scale", 2)


@pytest.fixture
def folder(tmp_path) -> Path:
    """NaN in two experts' scales: three bytes, the first two in expert 2; a far input scale."""
    tensors = sound()
    for expert, places in ((2, (5, 77)), (3, (9,))):
        scales = tensors[tensor("up_proj", "weight_scale", expert)].view(torch.uint8).clone()
        scales.view(-1)[list(places)] = 0x7F
        tensors[tensor("up_proj", "weight_scale", expert)] = scales.view(FLOAT8)
    tensors[tensor("down_proj", "input_scale", 1)] = torch.tensor(0.75)
    return save(tmp_path / "damaged", tensors, config=CONFIG)


def test_a_finding_has_all_of_it(folder):
    nan, far = run(folder).findings[::-1]
    assert (nan.code, nan.layer, nan.tensor, nan.expert, nan.count, nan.file) == (
        "nan-block-scales", PREFIX, NAME, 2, 2, "model.safetensors",
    )  # fmt: skip
    assert nan.message == (
        "block scales that are NaN (bytes 0x7F, 0xFF); 3 blocks in 2 places, first "
        f"{NAME} (expert 2: 2 of 128)"
    )
    assert nan.advice == RULES[Code.NAN_SCALE].advice
    assert (far.code, far.tensor, far.expert, far.count) == (
        "input-scale-far-above-others", tensor("down_proj", "weight_scale", 1), 1, 1,
    )  # fmt: skip
    assert "expert 1: multiplier 0.75" in far.message
    assert far.advice == RULES[Code.LARGE_INPUT].advice


def as_table(folder: Path) -> str:
    return command(folder)[1]


def as_html(folder: Path) -> str:
    page = command(folder, "--html", "-")[1]
    return html.unescape(re.sub(r"<[^>]+>", " ", page.partition("</style>")[2]))


def as_json(folder: Path) -> str:
    findings = json.loads(command(folder, "--json", "-")[1])["findings"]
    return " ".join(str(value) for finding in findings for value in finding.values())


REPORTS: dict[str, Callable[[Path], str]] = {"table": as_table, "html": as_html, "json": as_json}


@pytest.mark.parametrize("report", REPORTS)
def test_every_report_says_it(folder, report):
    told = " ".join(REPORTS[report](folder).split())
    for words in (
        "damage",
        "nan-block-scales",
        "3 blocks in 2 places",
        f"first {NAME}",
        "expert 2: 2 of 128",
        RULES[Code.NAN_SCALE].advice,
        "input-scale-far-above-others",
        "expert 1: multiplier 0.75",
        RULES[Code.LARGE_INPUT].advice,
    ):
        assert words.lower() in told.lower(), words

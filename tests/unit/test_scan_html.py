"""The page: one file, no script, nothing fetched, nothing of a checkpoint's own markup."""

from __future__ import annotations

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest
import torch

from tests.checkpoints import save
from tests.scan_cases import CONFIG, SMALL, command, run, sound, tensor, with_dense
from trtllm_b12x_fix.report.scan_html import to_html
from trtllm_b12x_fix.scan.result import BLIND

VOID = {"meta", "rect", "polyline"}
EVIL = "<script>alert(1)</script>\"'&<img src=x onerror=y>"


class Page(HTMLParser):
    """Tags, attributes and text; unbalanced tags are an error."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self._open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag):
        assert self._open.pop() == tag

    def handle_data(self, data):
        if self._open and self._open[-1] != "style":
            self.text += data


@pytest.fixture
def affected(tmp_path) -> Path:
    tensors = sound(scale=SMALL)
    tensors[tensor("gate_proj", "input_scale")] *= 2
    return save(tmp_path / "affected", tensors, config=CONFIG)


def page_of(*paths: Path) -> Page:
    return Page(to_html([run(path) for path in paths]))


def test_everything_is_on_it(affected):
    page = page_of(affected)
    for words in (
        "affected", "moe_config.backend: CUTLASS", "Worst projections", "Layers", "Findings",
        "input-scales-differ", "Backends", "trtllm-gen", "subnormal", BLIND,
    ):  # fmt: skip
        assert words in page.text
    assert page.tags.count("svg") == 3
    assert page.tags.count("rect") >= 3


def test_nothing_is_fetched_and_nothing_runs(affected):
    text = to_html([run(affected)])
    page = Page(text)
    assert not set(page.tags) & {"script", "link", "img", "iframe", "object", "embed", "a", "base"}
    names = {name for name, _ in page.attributes}
    assert not names & {"src", "href", "style", "xlink:href", "srcset", "action"}
    assert not any(name.startswith("on") for name in names)
    assert "default-src 'none'" in text
    assert not re.search(r"https?:|url\(|@import", text)


def test_names_from_a_file_are_text(tmp_path):
    tensors = {n.replace("mlp", f"mlp{EVIL}\x1b\u202e"): t for n, t in with_dense().items()}
    for name in list(tensors):
        if name.endswith("down_proj.weight_scale_2"):
            tensors[name] = torch.tensor(float("nan"))
    path = save(tmp_path / "evil & <b>", tensors, config=CONFIG)
    text = to_html([run(path)], [(f"/x/{EVIL}", EVIL)])
    page = Page(text)
    assert not set(page.tags) & {"script", "img", "b"}
    assert EVIL in page.text
    assert "evil & <b>" in page.text
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_several_checkpoints_and_an_unusable_one(affected, tmp_path):
    clean = save(tmp_path / "clean", sound(), config=CONFIG)
    code, out, _ = command(affected, clean, tmp_path / "nowhere", "--html", "-")
    assert code == 2
    page = Page(out)
    assert page.tags.count("h1") == 3
    assert "unusable" in page.text


def test_a_checkpoint_without_nvfp4(tmp_path):
    page = page_of(save(tmp_path, {"model.norm.weight": torch.zeros(4)}))
    assert "not-applicable" in page.text
    assert "svg" not in page.tags


def test_bars_stand_for_what_is_baked(affected):
    """Every bar lies inside its figure; heights follow the counts."""
    result = run(affected)
    text = to_html([result])
    number = r'"([\d.]+)"'
    bars = re.findall(
        rf"<rect class=(\w+) x={number} y={number} width={number} height={number}", text
    )
    expected = sum(int((one.baked > 0).sum()) for one in result.projections)
    assert len(bars) == expected
    for _, _, top, _, height in bars:
        assert 0 <= float(top) <= 96
        assert float(top) + float(height) == pytest.approx(96, abs=0.2)
    assert {kind for kind, *_ in bars} <= {"zero", "sub", "norm"}
    assert any(kind == "sub" for kind, *_ in bars)

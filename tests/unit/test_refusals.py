"""Refusals that stand apart: a damaged data file, no memory, a figure's name, odd routers."""

from __future__ import annotations

import pytest

from trtllm_b12x_fix import cli
from trtllm_b12x_fix.checkpoint import embedded
from trtllm_b12x_fix.checkpoint.config import ModelConfig
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.layer_check import check


def test_a_flipped_bit_in_the_embedded_layer_is_noticed(tmp_path, monkeypatch):
    copy = tmp_path / embedded.PATH.name
    data = bytearray(embedded.PATH.read_bytes())
    copy.write_bytes(data)
    provenance = embedded.PATH.with_suffix(".json").read_bytes()
    copy.with_suffix(".json").write_bytes(provenance)
    monkeypatch.setattr(embedded, "PATH", copy)
    assert embedded.load()[0].experts == 6  # sound as it stands
    data[-1000] ^= 4
    copy.write_bytes(data)
    with pytest.raises(InputError, match="damaged"):
        embedded.load()


@pytest.mark.parametrize(
    ("error", "code"),
    [(MemoryError("x"), 2), (RuntimeError("CUDA out of memory. Tried to allocate"), 2)],
)
def test_running_out_of_memory_is_no_finding(monkeypatch, capsys, error, code):
    def fail(*_args, **_kwargs):
        raise error

    monkeypatch.setattr(check, "check", fail)
    assert cli.main(["check-layer", "--rows", "1"]) == code
    assert "out of memory" in capsys.readouterr().err


def test_another_runtime_error_is_not_called_memory(monkeypatch):
    def fail(*_args, **_kwargs):
        raise RuntimeError("a bug")

    monkeypatch.setattr(check, "check", fail)
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["check-layer", "--rows", "1"])


def test_a_figure_is_svg(tmp_path, capsys):
    assert cli.main(["check-layer", "--rows", "1", "--plot", str(tmp_path / "x.png")]) == 2
    assert "ends in .svg" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "llama4_text"},
        {"text_config": {"model_type": "gpt_oss"}},
        {"model_type": "deepseek_v2", "topk_method": "group_limited_greedy"},
    ],
)
def test_routing_that_is_not_emulated_says_so(config):
    assert "not emulated" in ModelConfig(config).unknown_routing()


@pytest.mark.parametrize("config", [{}, {"model_type": "qwen3_moe"}, {"topk_method": "noaux_tc"}])
def test_routing_that_is_emulated_is_used(config):
    assert ModelConfig(config).unknown_routing() == ""

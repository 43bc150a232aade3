"""What running processes really did about the scales: read from the records they left.

Each process that imports TensorRT-LLM's or vLLM's MoE module records what became of the patched
class, and looks again at each layer loaded and at its end. State and layer counts are as of then;
whether a process still runs, and the same program, is looked up now. A process forked by one with a
record leaves its own (up to 32 of each parent); one that runs exec with the same program cannot be
told from before, until it imports the module.

A process that cannot write its record is not listed; --require-live makes a finding of no live one.

exit codes
  0  every live process that imported the module is repaired, or needs no repair; or none is live
  1  one is not: switched off, failed, replaced by someone else, or a layer failed its check; with
     --require-live also if none is live
  2  the records cannot be used, or a live process's record cannot be read
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from trtllm_b12x_fix.fix_state import FixState
from trtllm_b12x_fix.ledger import PASSED
from trtllm_b12x_fix.ledger_entries import ProcessStatus, read_processes
from trtllm_b12x_fix.processes import Life
from trtllm_b12x_fix.report import files
from trtllm_b12x_fix.report.text import bullet, grid, paragraph, printable
from trtllm_b12x_fix.settings import LEDGER, ledger_directory

NAME = "status"
HELP = "what running processes really did: repaired, off, failed, replaced"

SCHEMA = "trtllm-b12x-fix/status/1"
GOOD, FINDING, UNUSABLE = 0, 1, 2
_VERDICTS = {GOOD: "good", FINDING: "finding", UNUSABLE: "unusable"}
_ENDED_SHOWN = 5
_COMMAND_WIDTH = 38
_HEADER = ["pid", "age / wrote", "state", "mode", "layers", "verify", "command"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of status."""
    parser.add_argument(
        "--json", metavar="FILE", help="write everything that was recorded (- for stdout)"
    )
    parser.add_argument(
        "--require-live",
        action="store_true",
        help="no live process is a finding, too (exit 1): for health checks",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"show every process that has ended, not just the last {_ENDED_SHOWN}",
    )


def run(args: argparse.Namespace) -> int:
    """Print the table, write the JSON; returns the exit code.

    Raises:
        InputError: the ledger's folder cannot be used, or the JSON not be written.
    """
    folder = ledger_directory()
    if args.json is not None:
        files.check_writable(args.json)
    processes = read_processes(folder)
    code = exit_code(processes)
    if args.require_live and not any(process.life is Life.LIVE for process in processes):
        code = max(code, FINDING)
    if args.json != files.STDOUT:
        print(render(processes, folder, show_all=args.all))
    if args.json is not None:
        files.write(args.json, json.dumps(_as_json(processes, folder, code), indent=2) + "\n")
    return code


def exit_code(processes: Sequence[ProcessStatus]) -> int:
    """0, 1 or 2, by the live processes alone."""
    live = [process for process in processes if process.life is Life.LIVE]
    if any(process.state is FixState.UNKNOWN for process in live):
        return UNUSABLE
    return GOOD if all(process.is_good for process in live) else FINDING


def render(processes: Sequence[ProcessStatus], folder: Path, *, show_all: bool) -> str:
    """The table, what to know about single processes, and the verdict."""
    ended = [process for process in processes if process.life is Life.ENDED]
    ended.sort(key=lambda process: process.recorded_s_ago or 0.0)
    hidden = set() if show_all else {id(process) for process in ended[_ENDED_SHOWN:]}
    shown = [process for process in processes if id(process) not in hidden]
    parts = []
    if shown:
        parts.append(grid(_HEADER, [_row(process) for process in shown], left=1))
    notes = [line for process in shown for line in _notes(process)]
    if notes:
        parts.append("\n".join(bullet(note) for note in notes))
    if hidden:
        parts.append(f"and {len(hidden)} more that have ended (--all shows them)")
    parts.append(paragraph(_verdict(processes, folder)))
    return "\n\n".join(parts)


def _row(process: ProcessStatus) -> list[str]:
    state = process.state.value
    if process.mode:
        state = state.removesuffix(f": {process.mode}")  # the next column says it
    if process.life is not Life.LIVE:
        state = f"{process.life.value}; was {state}"
    command = process.command
    if len(command) > _COMMAND_WIDTH:
        command = "..." + command[3 - _COMMAND_WIDTH :]
    row = [
        str(process.pid),
        _times(process),
        state,
        process.mode or "-",
        _counted(process.layers),
        _counted(process.checks),
        command or "-",
    ]
    return [printable(cell) for cell in row]


def _times(process: ProcessStatus) -> str:
    if process.age_s is not None:
        return _duration(process.age_s)
    wrote = process.recorded_s_ago
    return "-" if wrote is None else f"- / {_duration(wrote)} ago"


def _counted(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items())) or "-"


def _notes(process: ProcessStatus) -> list[str]:
    lines = [f"{process.pid}: {process.note}"] if process.note else []
    lines += [
        f"{process.pid}: layer {check.get('layer')}: {check.get('detail')}"
        for check in process.checked
        if check.get("outcome") != PASSED
    ]
    return lines + [f"{process.pid}: {warning}" for warning in process.warnings]


def _verdict(processes: Sequence[ProcessStatus], folder: Path) -> str:
    live = [process for process in processes if process.life is Life.LIVE]
    elsewhere = sum(process.life is Life.ELSEWHERE for process in processes)
    where = f" {elsewhere} of other hosts or containers were not judged." if elsewhere else ""
    if not live:
        return (
            f"No live process has left a record in {folder}. A process leaves one when it imports "
            f"TensorRT-LLM's or vLLM's MoE module; another TMPDIR, {LEDGER} or container has its "
            "own. One that could not write has said so in its log (with --require-live this is "
            "exit code 1)." + where
        )
    unknown = sum(process.state is FixState.UNKNOWN for process in live)
    if unknown:
        return f"Record cannot be read: {unknown} of {_live(live)}.{where}"
    bad = sum(not process.is_good for process in live)
    if bad:
        return f"WITHOUT the repair: {bad} of {_live(live)}.{where}"
    idle = sum(process.state is FixState.WAITING for process in live)
    waiting = f" {idle} of them have not imported TensorRT-LLM's MoE module." if idle else ""
    return f"{_live(live)}, none without the repair.{waiting}{where}"


def _live(live: Sequence[ProcessStatus]) -> str:
    return "1 live process" if len(live) == 1 else f"{len(live)} live processes"


def _as_json(processes: Sequence[ProcessStatus], folder: Path, code: int) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "verdict": _VERDICTS[code],
        "ledger": printable(str(folder)),
        "exit_code": code,
        "processes": [
            {
                "pid": process.pid,
                "life": process.life.value,
                "state": process.state.value,
                "note": process.note,
                "age_s": process.age_s,
                "recorded_s_ago": process.recorded_s_ago,
                "record": dict(process.record),
            }
            for process in processes
        ],
    }


def _duration(seconds: float) -> str:
    for unit, size in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f}{unit}"
    return f"{seconds:.0f}s"

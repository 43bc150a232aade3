"""`make bench`: run every bench_*.py beside this file and print one line for each result."""

from __future__ import annotations

import argparse
import importlib
import json
import multiprocessing
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from tests.benchmarks.result import BenchResult


def _run(module: str) -> list[BenchResult]:
    returned = importlib.import_module(f"tests.benchmarks.{module}").run()
    results = returned if isinstance(returned, list) else [returned]
    for result in results:
        if not isinstance(result, BenchResult):
            raise TypeError(f"{module}.run() returned {type(result).__name__}, not BenchResult")
    return results


def run_isolated(module: str) -> list[BenchResult]:
    """Run in a process of its own: one benchmark's peer must not slow or shadow another's."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=spawn) as pool:
        return pool.submit(_run, module).result()


def main(argv: Sequence[str] | None = None) -> int:
    found = sorted(path.stem for path in Path(__file__).parent.glob("bench_*.py"))
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.run")
    parser.add_argument("modules", nargs="*", default=found, help="such as bench_layer")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    arguments = parser.parse_args(argv)
    if not arguments.modules:
        print("bench: no benchmark to run", file=sys.stderr)
        return 1

    results: list[BenchResult] = []
    failed = False
    for module in arguments.modules:
        try:
            measured = run_isolated(module)
        except Exception as error:  # one broken benchmark must not hide the others
            print(f"{module}: failed: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
            failed = True
        else:
            for result in measured:
                print(result.line(), flush=True)
            results += measured
    if arguments.json is not None:
        text = json.dumps([result.as_json() for result in results], indent=2)
        arguments.json.write_text(text + "\n", encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())

"""Placeholder for `python -m evals`: says what is missing instead of pretending to run."""

import sys

MESSAGE = """\
evals: the A/B runner is not built yet.
It will serve one model twice, with and without the fix, and compare both paired, item by item.
Nothing was run and nothing was measured.
"""


def main() -> int:
    sys.stderr.write(MESSAGE)
    return 2


if __name__ == "__main__":
    sys.exit(main())

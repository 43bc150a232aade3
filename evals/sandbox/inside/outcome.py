"""What became of a program: shared by the checker in the sandbox and the runner outside."""

from __future__ import annotations

import enum


class CodeOutcome(enum.Enum):
    """Only PASSED counts as solved; the others say why not."""

    PASSED = "passed"
    WRONG = "wrong"
    """An assertion of the test failed."""
    RAISED = "raised"
    """The function raised."""
    TEST_RAISED = "test-raised"
    """The test could not use what the function returned."""
    LOAD_FAILED = "load-failed"
    """A syntax error, or the program raised before its function could be called."""
    NO_FUNCTION = "no-function"
    MEMORY_LIMIT = "memory-limit"
    TIME_LIMIT = "time-limit"
    OUTPUT_LIMIT = "output-limit"
    CRASHED = "crashed"
    """The process ended, or closed its channel, before the test did."""
    BAD_REPLY = "bad-reply"
    """An answer too large, or not one that the harness writes."""
    NO_CALL = "no-call"
    """The test never called the function: it proves nothing."""


#: Written by the checker once the guest has reported in, before any of its own code ran.
STARTED = "started"

"""The judge that grading uses: a sandbox that has been tried, with its limits."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from evals.sandbox.judge import CodeVerdict, FunctionTest, judge
from evals.sandbox.limits import Limits
from evals.sandbox.probe import Proven, prove


@dataclass(frozen=True)
class Sandboxed:
    """Judges programs in a proven sandbox."""

    proven: Proven
    limits: Limits

    def judge(self, function_test: FunctionTest, program: str) -> CodeVerdict:
        """The verdict on one program.

        Raises:
            SandboxError: the sandbox failed.
        """
        return judge(self.proven.sandbox, function_test, program, self.limits)

    @property
    def described(self) -> dict[str, Any]:
        """What a record says about how its verdict came about."""
        return {
            "bubblewrap": self.proven.bubblewrap,
            "python": self.proven.python,
            "limits": asdict(self.limits),
        }


def sandboxed_judge(limits: Limits | None = None) -> Sandboxed:
    """Try the sandbox of this machine.

    Raises:
        SandboxUnavailableError: with the block and what to do about it.
    """
    return Sandboxed(prove(), limits or Limits())

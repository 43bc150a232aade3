"""Names for everything that can happen to a request other than a right or a wrong answer."""

from __future__ import annotations

import enum


class ReplyStatus(enum.Enum):
    """What came back. Only ANSWERED is judged; no other counts as a wrong answer."""

    ANSWERED = "answered"
    TIMEOUT = "timeout"
    """No reply in time, after all retries."""
    CONNECTION = "connection"
    """Refused, reset or cut off, after all retries."""
    HTTP_ERROR = "http-error"
    """A status other than 200, after all retries."""
    ERROR_BODY = "error-body"
    """HTTP 200 around an error."""
    MALFORMED = "malformed"
    """HTTP 200 around something that is no completion."""
    LENGTH = "length"
    """Cut off at the token limit within the answer."""
    LENGTH_IN_THINKING = "length-in-thinking"
    """Cut off at the token limit before the answer began."""
    STOP_IN_THINKING = "stop-in-thinking"
    """A stop string came up in the thinking and ended the reply there."""
    UNCLOSED_THINKING = "unclosed-thinking"
    """The model ended its reply without ending its thinking."""
    REASONING_ONLY = "reasoning-only"
    """The server's reasoning field is filled and the content is not."""
    NULL_CONTENT = "null-content"
    EMPTY = "empty"
    """Nothing but white space."""
    UNFINISHED = "unfinished"
    """No finish reason: the server did not say that this is all."""
    OTHER_FINISH = "other-finish"
    """A finish reason such as content_filter, tool_calls or abort."""
    UNGRADED = "ungraded"
    """Answered, but the sandbox failed: nothing was learned about the answer."""


class Verdict(enum.Enum):
    """What the answer is worth."""

    CORRECT = "correct"
    WRONG = "wrong"
    NO_ANSWER = "no-answer"
    """The text holds no answer in the form that is asked for; a failure, as lm-eval has it."""
    NOT_JUDGED = "not-judged"
    """The status is not ANSWERED."""

    @property
    def correct(self) -> bool | None:
        """True, False, or None where nothing was judged."""
        return None if self is Verdict.NOT_JUDGED else self is Verdict.CORRECT


class TransportFailure(enum.Enum):
    """Why there was no HTTP reply at all."""

    TIMEOUT = "timeout"
    CONNECTION = "connection"


class Kind(enum.Enum):
    """Which of the two OpenAI routes was asked."""

    COMPLETION = "completion"
    CHAT = "chat"


class Thinking(enum.Enum):
    """Where the model's thinking begins."""

    TAGGED = "tagged"
    """In the reply, with a tag, if at all."""
    OPENED = "opened"
    """In the prompt: the chat template ends with the opening tag."""

"""What is asked, as data: continuations that any healthy language model knows.

The first three continuations are those of vllm#52308, word for word. The others are as easy:
SmolLM2-135M, a hundredth of the models this is for, knows all but one of either list. None holds
its own answer, so that a model that merely repeats its prompt answers nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

from trtllm_b12x_fix.canary.protocol import Candidate


@dataclass(frozen=True)
class Probe:
    """One thing to ask.

    Attributes:
        prompt: what the model gets, raw or as the user's message.
        expected: any of these, as a whole word and in any case, is the answer.
    """

    prompt: str
    expected: tuple[str, ...]


#: So many of each list, from the first, are the report's own.
REPORTED = 3

#: For the completions route: raw text, no template.
CONTINUATIONS = (
    Probe("The capital of France is", ("Paris",)),
    Probe("What is 2+2?", ("4", "four")),
    Probe("1, 2, 3, 4,", ("5", "five")),
    Probe("The capital of Germany is", ("Berlin",)),
    Probe("The capital of Japan is", ("Tokyo",)),
    Probe("The capital of England is", ("London",)),
    Probe("The opposite of hot is", ("cold",)),
    Probe("The opposite of up is", ("down",)),
    Probe("The Earth orbits around the", ("sun",)),
    Probe("The chemical symbol for water is", ("H2O", "H₂O", "H_2O")),
    Probe("Romeo and Juliet was written by William", ("Shakespeare",)),
    Probe("The quick brown fox jumps over the lazy", ("dog",)),
    Probe("Twinkle, twinkle, little", ("star",)),
    Probe("A triangle has three", ("sides", "angles", "corners")),
    Probe("There are 60 minutes in an", ("hour",)),
    Probe("Monday, Tuesday, Wednesday,", ("Thursday",)),
    Probe("The United States of", ("America",)),
    Probe("The Eiffel Tower is located in the city of", ("Paris",)),
)

#: For the chat route: the same three as questions, and what small chat models know.
QUESTIONS = (
    Probe("What is the capital of France? One word.", ("Paris",)),
    Probe("What is 2+2?", ("4", "four")),
    Probe("Count from 1 to 10.", ("5", "five")),
    Probe("What is the capital of Germany? One word.", ("Berlin",)),
    Probe("What is the capital of Japan? One word.", ("Tokyo",)),
    Probe("What is the capital of England? One word.", ("London",)),
    Probe("What is the opposite of hot?", ("cold",)),
    Probe("What is the opposite of up?", ("down",)),
    Probe("Which star does the Earth orbit?", ("sun",)),
    Probe("What is the chemical formula of water?", ("H2O", "H₂O", "H_2O")),
    Probe("Who wrote Romeo and Juliet?", ("Shakespeare",)),
    Probe("Who wrote Hamlet?", ("Shakespeare",)),
    Probe("How many sides does a triangle have?", ("3", "three")),
    Probe("What color is the sky on a clear day?", ("blue",)),
    Probe("Name the days of the week.", ("Thursday",)),
    Probe("Name the months of the year.", ("April",)),
    Probe("In which city is the Eiffel Tower?", ("Paris",)),
)

#: Long enough for a text to fall into a loop (vllm#47241: right at first, then repetition).
STORY = Probe("The history of bread begins", ())
STORY_QUESTION = Probe("Tell me the history of bread in a few sentences.", ())


@dataclass(frozen=True)
class ReportedAnswer:
    """The best candidates at the first position, as a public report gives them, in nats."""

    source: str
    prompt: str
    top: tuple[Candidate, ...]


#: vllm#52308: Nemotron-3-Nano-30B-A3B-NVFP4, vLLM 0.27.0 on B200, greedy, deterministic.
REPORTED_BROKEN = ReportedAnswer(
    "vllm#52308, trtllm_fp4_block_scale_moe",
    "The capital of France is",
    (
        Candidate(" **", -2.0724),
        Candidate(".", -2.3224),
        Candidate(" ", -2.5099),
        Candidate(",", -2.7599),
        Candidate("**", -2.8849),
    ),
)
#: The same model on the same GPU; of this top-5 the report's best candidate alone is known here.
REPORTED_HEALTHY = ReportedAnswer(
    "vllm#52308, flashinfer_cutlass",
    "The capital of France is",
    (Candidate(" Paris", -0.0278),),
)

"""What must be true of a worker's record; used by the tests, and by the mutants' tests to fail."""

from __future__ import annotations

from typing import Any

import torch

from tests.vllm import harness
from tests.vllm.scenarios import FEW, SELECTED, TOKENS, UNKNOWN, Subject, expected
from trtllm_b12x_fix.integrations.targets import VLLM_B12X
from trtllm_b12x_fix.repair import Strategy

Record = dict[str, Any]

#: Jobs whose layer is repaired although something is unusual about it, each with one case.
ALSO_REPAIRED = ("three times", "late", "inference mode", "undone", "every layer checked")
B12X_MODULE = VLLM_B12X
CUTLASS = "FlashInferExperts"
B12X = "FlashInferB12xExperts"


def flashinfer_of(version: str) -> str:
    """FlashInfer's version under a vLLM."""
    return harness.PAIRS[version]


def has_exact_form(version: str, subject: Subject) -> bool:
    """Whether b12x can have the layer at all: not SwiGLU below FlashInfer 0.6.17."""
    return not (subject.layer.activation.is_gated and version == "0.27.0")


def ran(record: Record) -> None:
    """The job did not fail."""
    assert "error" not in record, record["error"]


def untouched(record: Record) -> None:
    """What others read is as it was before the experts object prepared itself."""
    ran(record)
    assert record["class"] == B12X
    for name, value in record["before"].items():
        assert torch.equal(_bytes(record["after"][name]), _bytes(value)), name
    assert record["places after"] == record["places"]
    assert torch.equal(record["a2_gscale"], record["a2_gscale before"])


def repaired(
    record: Record, version: str, subject: Subject, tokens: tuple[int, ...], **arm: Any
) -> None:
    """Outputs are the emulated repaired arm's, bit for bit, and nothing else was changed."""
    untouched(record)
    assert len(record["cases"]) == len(tokens)
    for count, case in zip(tokens, record["cases"], strict=True):
        family, output = expected(subject, flashinfer_of(version), count, **arm)
        assert case["family"] == family, count
        assert torch.equal(case["output"], output), count
    assert record["state"] == "active"
    assert record["good"]


def shares_memory(record: Record) -> None:
    """What b12x is handed is a view of the parameter: no second copy of the block scales."""
    assert record["view"] == record["places"]["w13_weight_scale"]


def baked(record: Record, version: str, subject: Subject, tokens: tuple[int, ...]) -> None:
    """Outputs are those of upstream as it is: baked scales, input scales of 1.0."""
    ran(record)
    assert record["class"] == B12X
    for count, case in zip(tokens, record["cases"], strict=True):
        _, output = expected(
            subject, flashinfer_of(version), count, strategy=Strategy.BAKED, unit=True
        )
        assert torch.equal(case["output"], output), count
    assert bool((record["after"]["w13_weight_scale_2"] == 1).all())


def on_cutlass(record: Record, native: Record) -> None:
    """The layer runs on CUTLASS, with what vLLM itself would have given to CUTLASS."""
    ran(record)
    assert record["class"] == native["class"] == CUTLASS
    for name, value in native["after"].items():
        assert torch.equal(_bytes(record["after"][name]), _bytes(value)), name
    assert record["cutlass"].keys() == native["cutlass"].keys()
    for name, value in native["cutlass"].items():
        assert torch.equal(_bytes(record["cutlass"][name]), _bytes(value)), name


def said(record: Record, *words: str) -> None:
    """One line of the log has all the words."""
    lines = [line for _, line in record["log"]]
    assert any(all(word in line for word in words) for line in lines), lines


def refused(record: Record, *words: str) -> None:
    """Loading stopped, by an error of ours that names what it is about and a way out."""
    error = record.get("error", "nothing was raised")
    for word in ("vLLM" if "vLLM" in words else "", *words, "TRTLLM_B12X_FIX"):
        assert word in error, error
    assert "Traceback" not in error


def left_alone(record: Record, version: str, subject: Subject) -> None:
    """A vLLM that ships its own repair: what it prepared is what runs."""
    ran(record)
    (case,) = record["cases"]
    _, output = expected(subject, flashinfer_of(version), 4, strategy=Strategy.UNIT, unit=True)
    assert torch.equal(case["output"], output)
    assert record["ledger"]["layers"] == {"unchanged": 1}
    assert record["good"]


def guarded(record: Record) -> None:
    """Non-gated layers end at CUTLASS unless a backend is named; gated ones where they ended."""
    ran(record)
    trtllm = {"backend": "FLASHINFER_TRTLLM", "class": "TrtLlmNvFp4ExpertsMonolithic"}
    cutlass = {"backend": "FLASHINFER_CUTLASS", "class": CUTLASS}
    cute = {"backend": "FLASHINFER_CUTEDSL", "class": "FlashInferCuteDSLExperts"}
    named = {"flashinfer_trtllm": trtllm, "flashinfer_cutedsl": cute, "flashinfer_cutlass": cutlass}
    for (activation, hidden, backend), chosen in zip(SELECTED, record["chosen"], strict=True):
        auto = cutlass if activation == "relu2" else trtllm
        assert chosen == named.get(backend, auto), (activation, hidden, backend)
    said(record, "FLASHINFER_CUTLASS", "vllm#52308", "TRTLLM_B12X_FIX=off")
    for backend in ("flashinfer_trtllm", "flashinfer_cutedsl"):
        said(record, f"--moe-backend {backend} is obeyed")
    told = [line for _, line in record["log"] if "TRTLLM_B12X_FIX=off" in line]
    assert len(told) == 1, told


def unguarded(record: Record) -> None:
    """As vLLM chooses by itself."""
    ran(record)
    for (_, _, backend), chosen in zip(SELECTED, record["chosen"], strict=True):
        if backend == "auto":
            assert chosen["class"] == "TrtLlmNvFp4ExpertsMonolithic"
    assert not record["log"]


def not_guarded_and_said(record: Record) -> None:
    """A module without its classes: the process says so, and its status is bad."""
    ran(record)
    said(record, "has no class with is_supported_config", "--moe-backend flashinfer_cutlass")
    assert not record["good"]


def check_job(name: str, version: str, record: Record, subjects: dict[str, Subject]) -> None:
    """The check of one job that has a mutant."""
    relu2, silu = subjects["relu2"], subjects["silu"]
    if name in ("relu2", "silu"):
        subject = subjects[name]
        if has_exact_form(version, subject):
            repaired(record, version, subject, TOKENS[: len(record["cases"])])
        else:
            assert record["class"] == CUTLASS
            assert bool((record["after"]["w13_weight_scale_2"] < 1e-6).all())
        return
    checks = {
        "silu, unit": lambda: repaired(record, version, silu, FEW, unit=True),
        "relu2, off": lambda: baked(record, version, relu2, FEW),
        "a16": lambda: repaired(record, version, relu2, (4,), unit=True),
        "repaired": lambda: left_alone(record, version, relu2),
        "nan": lambda: refused(record, "expert 1", "NaN"),
        "padded": lambda: refused(record, "vLLM", version, "intermediate size 64"),
        "half": lambda: refused(record, "float16"),
        "wrong kernel": lambda: refused(record, "from the emulated repair"),
        "other names at the call": lambda: refused(record, "B12xMoEWrapper.run"),
        "guarded": lambda: guarded(record),
        "no guarded class": lambda: not_guarded_and_said(record),
        **{
            state: lambda words=words: refused(record, "vLLM", version, words)
            for state, words in UNKNOWN.items()
        },
    }
    checks[name]()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)

"""``python -m evals.regress``: measure, judge, report. Exit 0 good, 1 a regression, 2 unusable."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from evals.make_embedded_layer import sha256_of_file
from evals.regress import documents, experts, generate, judge, language_model, suite, table
from evals.regress.arms import STATIC, Arm, Variant
from evals.regress.document import Run, dump, load_baseline, to_document
from evals.regress.documents import Document, Text
from evals.regress.generate import Generation
from evals.regress.language_model import LanguageModel
from evals.regress.layer_errors import measure, record_inputs
from evals.regress.suite import Scored, Subjects, Suite
from evals.regress.summary import Summary
from trtllm_b12x_fix.errors import B12xFixError, InputError
from trtllm_b12x_fix.law import Powers

BASELINES = documents.ROOT / "tests/regression/baselines"
SEED = 21461


def parser() -> argparse.ArgumentParser:
    built = argparse.ArgumentParser(prog="python -m evals.regress", description=__doc__)
    built.add_argument("--suite", choices=sorted(suite.SUITES), default="small")
    built.add_argument("--device", default="cpu", help="cpu (default) or cuda")
    built.add_argument("--model", type=Path, default=language_model.GGUF, help="GGUF file")
    built.add_argument("--gsm8k", type=Path, default=documents.GSM8K_SAMPLE, help="JSON lines")
    built.add_argument("--human-eval", type=Path, default=documents.HUMAN_EVAL, help="JSON lines")
    built.add_argument("--calibration", type=Path, default=experts.CALIBRATION)
    built.add_argument("--calibrate", action="store_true", help="only write --calibration anew")
    built.add_argument("--baseline", type=Path, help="default: the suite's in tests/regression")
    built.add_argument(
        "--write-baseline", action="store_true", help="write --baseline instead of comparing"
    )
    built.add_argument("--json", metavar="FILE", help="write the results there (- for stdout)")
    built.add_argument(
        "--time-limit", type=float, default=3600, help="seconds after which no arm is begun"
    )
    return built


def main(argv: Sequence[str] | None = None) -> int:
    arguments = parser().parse_args(argv)
    try:
        return _calibrate(arguments) if arguments.calibrate else _regress(arguments)
    except B12xFixError as error:
        print(f"regress: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"regress: {error}", file=sys.stderr)
        return 2


def _regress(arguments: argparse.Namespace) -> int:
    began = time.monotonic()
    chosen = suite.SUITES[arguments.suite]
    run = _measure(arguments, chosen, began)
    document = dump(to_document(run))
    if arguments.json == "-":
        print(document, end="")
    else:
        print(table.to_text(run))
    if arguments.json not in (None, "-"):
        Path(arguments.json).write_text(document, encoding="utf-8")
    if arguments.write_baseline:
        _baseline_path(arguments).write_text(document, encoding="utf-8")
    return 0 if run.verdict is judge.Verdict.GOOD else 1


def _measure(arguments: argparse.Namespace, chosen: Suite, began: float) -> Run:
    deadline = began + arguments.time_limit
    _writable(arguments)  # before minutes of work
    texts = _texts(arguments)
    model = _load(arguments)
    subjects, inputs = _subjects(arguments, chosen, model, texts)
    baseline = None
    if not arguments.write_baseline:
        baseline = load_baseline(_baseline_path(arguments), chosen, inputs)
    moved = suite.reported_magnitude(subjects.layers)
    recorded = record_inputs(subjects, chosen.layer_tokens, SEED)
    layers = measure(subjects.layers, recorded, chosen.sweep)
    _say(f"every layer at {len(chosen.sweep)} magnitudes: {time.monotonic() - began:.0f} s so far")
    scored = suite.run(subjects, suite.variants(chosen, moved), deadline, _say)
    generations = _generate(subjects, chosen, moved, texts, deadline)
    summary = Summary(scored, subjects.documents, subjects.where, SEED)
    checks = [
        *judge.law_of_models(summary),
        *judge.law_of_layers(layers, moved),
        *judge.law_of_generations(generations),
    ]
    if baseline is not None:
        checks += judge.against_baseline(summary, baseline)
    return Run(
        suite=chosen,
        inputs=inputs,
        moved=moved,
        seed=SEED,
        device=model.device,
        scored=scored,
        summary=summary,
        layers=layers,
        checks=checks,
        verdict=judge.verdict(checks, [*scored, *generations]),
        seconds=time.monotonic() - began,
        generations=generations,
        comparisons=summary.comparisons(),
        same_bits=_same_bits(scored, subjects),
    )


def _same_bits(scored: Sequence[Scored], subjects: Subjects) -> dict[str, list[str]]:
    """Kernels that ran, and which others have the same bits."""
    kernels = dict.fromkeys(each.variant.kernel for each in scored)
    return {
        str(kernel): [str(each) for each in suite.same_bits(kernel, subjects.layers[0])]
        for kernel in kernels
        if kernel
    }


def _texts(arguments: argparse.Namespace) -> tuple[list[Text], list[Text]]:
    items = documents.gsm8k(arguments.gsm8k)
    return items, documents.human_eval(arguments.human_eval)


def _load(arguments: argparse.Namespace) -> LanguageModel:
    try:
        device = torch.device(arguments.device)
    except RuntimeError as error:
        raise InputError(f"--device {arguments.device}: not a device torch knows") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: torch sees no CUDA GPU here")
    return language_model.load(arguments.model, device)


def _subjects(
    arguments: argparse.Namespace,
    chosen: Suite,
    model: LanguageModel,
    texts: tuple[list[Text], list[Text]],
) -> tuple[Subjects, dict[str, Any]]:
    items, problems = texts
    scored = documents.tokenize(items[documents.CALIBRATION_ITEMS :], model.tokenizer)
    code = documents.tokenize(problems, model.tokenizer)
    try:
        together = [
            *documents.choose(scored, chosen.gsm8k, chosen.token_limit),
            *documents.choose(code, chosen.human_eval, chosen.token_limit),
        ]
    except InputError as error:
        hint = "GSM8K's whole test split is its test.jsonl: --gsm8k FILE"
        raise InputError(f"{error}; {hint}") from error
    layers = experts.quantize(model, experts.load_calibration(arguments.calibration, model))
    subjects = Subjects(model, layers, together)
    return subjects, _inputs(arguments, model, together)


def _inputs(
    arguments: argparse.Namespace, model: LanguageModel, together: list[Document]
) -> dict[str, Any]:
    return {
        "model": model.name,
        "model_sha256": model.sha256,
        "calibration_sha256": sha256_of_file(arguments.calibration),
        "documents": len(together),
        "tokens": sum(len(each.tokens) for each in together),
        "scored_tokens": sum(each.scored for each in together),
        "documents_sha256": documents.fingerprint(together),
    }


def _generate(
    subjects: Subjects,
    chosen: Suite,
    moved: Powers,
    texts: tuple[list[Text], list[Text]],
    deadline: float,
) -> list[Generation]:
    if not chosen.prompts:
        return []
    items, problems = texts
    half = chosen.prompts // 2
    first = items[documents.CALIBRATION_ITEMS :][:half]
    prompts = generate.chat_prompts([*first, *problems[:half]], subjects.model.tokenizer)
    wanted = [
        Variant(Arm.BF16),
        Variant(Arm.ALPHAS, STATIC),
        Variant(Arm.BAKED, STATIC, moved),
        Variant(Arm.ALPHAS, STATIC),  # does the device repeat itself?
        Variant(Arm.ALPHAS, STATIC, moved),
        Variant(Arm.ALPHAS, STATIC, seed=suite.OTHER_ORDER),
        Variant(Arm.BAKED, STATIC),
        Variant(Arm.REFERENCE),
    ]
    found = []
    for variant in wanted:
        if time.monotonic() > deadline:
            found.append(Generation(variant, [], not_run=suite.TIME_LIMIT))
            continue
        began = time.monotonic()
        tokens = generate.generate(
            subjects.model, subjects.layers, prompts, variant, chosen.new_tokens
        )
        found.append(Generation(variant, tokens, time.monotonic() - began))
        _say(f"generation, {variant.name}: {found[-1].seconds:.1f} s")
    return found


def _writable(arguments: argparse.Namespace) -> None:
    """Refuse results that have no folder to go to."""
    wanted = [Path(arguments.json)] if arguments.json not in (None, "-") else []
    wanted += [_baseline_path(arguments)] if arguments.write_baseline else []
    for path in wanted:
        if not path.parent.is_dir() or path.is_dir():
            raise InputError(f"{path}: not a file in a folder that exists")


def _calibrate(arguments: argparse.Namespace) -> int:
    model = _load(arguments)
    items = documents.gsm8k(arguments.gsm8k)[: documents.CALIBRATION_ITEMS]
    tokenized = documents.tokenize(items, model.tokenizer)
    calibration = experts.calibrate(model, tokenized)
    about = {
        "what": "largest magnitudes of the bf16 model's MLP inputs and intermediates",
        "text": f"GSM8K test items 0 to {documents.CALIBRATION_ITEMS - 1} (MIT licence)",
        "tokens": sum(len(each.tokens) for each in tokenized),
        "torch": torch.__version__,
        "made_by": "python -m evals.regress --calibrate",
    }
    text = json.dumps(experts.to_document(calibration, about), indent=1)
    arguments.calibration.write_text(text + "\n", encoding="utf-8")
    print(f"wrote {arguments.calibration}")
    return 0


def _baseline_path(arguments: argparse.Namespace) -> Path:
    return arguments.baseline or BASELINES / f"{arguments.suite}.json"


def _say(text: str) -> None:
    print(f"regress: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

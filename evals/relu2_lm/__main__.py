"""``python -m evals.relu2_lm``: train, evaluate, export, regress.

Exit 0: done, or good. 1: a regression. 2: input that cannot be used.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from evals.relu2_lm import checkpoint, data, evaluate, export, quantize, regress, train
from evals.relu2_lm.config import full, tiny
from evals.relu2_lm.problems import Split, generate
from evals.relu2_lm.record import device_name, record
from trtllm_b12x_fix.errors import B12xFixError

TRAINING_SEED = 1000


def parser() -> argparse.ArgumentParser:
    built = argparse.ArgumentParser(prog="python -m evals.relu2_lm", description=__doc__)
    commands = built.add_subparsers(dest="command", required=True)
    made = commands.add_parser("train", help="train from scratch, for a given time")
    made.add_argument("--seconds", type=float, required=True)
    made.add_argument("--problems", type=int, default=1_000_000)
    made.add_argument("--workers", type=int, default=2)
    made.add_argument("--batch-size", type=int, default=512)
    made.add_argument("--size", choices=("full", "tiny"), default="full")
    judged = commands.add_parser("evaluate", help="accuracy and KL of every arm")
    judged.add_argument("--problems", type=int, default=800, help="of each of the three splits")
    judged.add_argument("--seconds", type=float, default=600.0, help="no arm is begun after that")
    written = commands.add_parser("export", help="write a folder for another program")
    written.add_argument("--format", choices=("nvfp4", *(t.value for t in export.Twin)))
    for command in (judged, written):
        command.add_argument("--checkpoint", type=Path, default=checkpoint.KEPT)
    for command in (made, judged, written):
        command.add_argument("--out", type=Path, required=True)
    for command in (made, judged):
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    small = commands.add_parser("regress", help="200 problems on a CPU, judged")
    small.add_argument("--json", help="write the results there (- for stdout)")
    small.add_argument("--write-baseline", action="store_true")
    return built


def main(argv: Sequence[str] | None = None) -> int:
    given = parser().parse_args(argv)
    commands = {"train": _train, "evaluate": _evaluate, "export": _export, "regress": _regress}
    try:
        return commands[given.command](given)
    except (B12xFixError, OSError, ValueError) as error:
        print(f"relu2_lm: {error}", file=sys.stderr)
        return 2


def _train(given: argparse.Namespace) -> int:
    device = torch.device(given.device)
    start = time.monotonic()
    corpus = data.training_corpus(TRAINING_SEED, given.problems, given.workers)
    validation = data.encode([p for s in evaluate.SPLITS for p in generate(s, 1, 256)])
    _tell(f"{len(corpus)} problems in {time.monotonic() - start:.1f} s")
    recipe = train.Recipe(given.seconds, batch_size=given.batch_size)
    entries = []

    def tell(entry: train.LogEntry) -> None:
        entries.append(entry)
        _tell(str(entry))

    config = full() if given.size == "full" else tiny()
    model = train.train(config, recipe, corpus, validation, device, tell)
    fed = generate(Split.TRAIN, quantize.CALIBRATION_SEED, quantize.CALIBRATION_PROBLEMS)
    checkpoint.save(model, quantize.calibrate(model, data.encode(list(fed)).to(device)), given.out)
    log = {
        "device": device_name(device),
        "torch": torch.__version__,
        "parameters": sum(p.numel() for p in model.parameters()),
        "training_seed": TRAINING_SEED,
        "problems": len(corpus),
        "recipe": asdict(recipe),
        "log": [asdict(entry) for entry in entries],
    }
    _write(given.out / "training_log.json", log)
    return 0


def _evaluate(given: argparse.Namespace) -> int:
    device = torch.device(given.device)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    model = checkpoint.load(given.checkpoint, device, dtype)
    layers = quantize.quantize(model, checkpoint.load_calibration(given.checkpoint))
    subject = evaluate.subject(model, layers, evaluate.problems_of(given.problems))
    outcomes, left_out = evaluate.run(subject, evaluate.cases(), given.seconds, _tell)
    _write(given.out, record(subject, outcomes, left_out))
    return 0


def _export(given: argparse.Namespace) -> int:
    if given.format == "nvfp4":
        export.write_nvfp4(given.checkpoint, given.out)
    else:
        export.write_twin(export.Twin(given.format), given.checkpoint, given.out)
    return 0


def _regress(given: argparse.Namespace) -> int:
    if given.write_baseline:
        _write(regress.BASELINE, regress.new_baseline(_tell))
        return 0
    result = regress.run(_tell)
    if given.json == "-":
        print(json.dumps(result.document, indent=1))
    elif given.json:
        _write(Path(given.json), result.document)
    for finding in result.findings:
        _tell(f"relu2 LM: REGRESSION: {finding}")
    return 1 if result.findings else 0


def _write(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=1) + "\n")


def _tell(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())

"""Why TRTLLM_B12X_FIX_ACT_SCALE is `calibrated`: true error of the repair under vLLM, emulated.

    python -m evals.act_scale [--rows 8,64] [--powers=-6,-3,0,2,4] [--presets 1] [--seed 0]

Each layer runs with the checkpoint's input scales (the layer's largest, as vLLM has them) and with
1.0 (vLLM's own), on the FlashInfer versions that vLLM 0.27.0 and 0.33.0 pin. Activations are those
of the layer's calibration times 2^power: 0 is what the scales were made for, above that calibrated
scales saturate, far below it 1.0 leaves block scales subnormal. Figures are relative RMS from fp64
on dequantized weights and unquantized activations; no kernel runs.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.contract import (
    InputQuantization,
    InputScaleArgument,
    KernelContract,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.layer_check import embedded, from_preset
from trtllm_b12x_fix.layer_check.run import LayerInput
from trtllm_b12x_fix.metrics import distance
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales, plan
from trtllm_b12x_fix.settings import ActScale

#: vLLM to the FlashInfer that it pins.
PINNED = {"0.27.0": "0.6.16.post3", "0.33.0": "0.7.2.post1"}
#: Experts of a preset that are made: enough for its top-k, and minutes fewer.
PRESETS = {"super-layer1": 64, "nemotron-3-nano": 32, "qwen3.6-35b-a3b": 32}
ROWS = (8, 64)
POWERS = (-6, -3, 0, 2, 4)
_HEADER = (
    f"{'layer':24} {'FlashInfer':12} {'strategy':12} {'rows':>4} {'kernel':12} {'power':>5} "
    f"{'calibrated':>10} {'unit':>8}"
)


@dataclass(frozen=True)
class Figure:
    """True errors of one layer, version, row count and magnitude of its activations."""

    layer: str
    version: str
    strategy: str
    rows: int
    kernel: str
    power: int
    errors: dict[ActScale, float]

    def line(self) -> str:
        """As a row of the table."""
        return (
            f"{self.layer:24} {self.version:12} {self.strategy:12} {self.rows:4} {self.kernel:12} "
            f"{self.power:5} {self.errors[ActScale.CALIBRATED]:10.2%} "
            f"{self.errors[ActScale.UNIT]:8.2%}"
        )


def measure(
    name: str, subject: LayerInput, contract: KernelContract, rows: int, power: int
) -> Figure | None:
    """Both true errors; ``None`` where the layer has no exact form and leaves b12x."""
    planned = plan(contract, subject.layer.activation)
    if planned.strategy is Strategy.CUTLASS:
        return None
    layer = subject.layer
    x = torch.ldexp(subject.x[:rows], torch.tensor(power)).to(torch.bfloat16)
    routing = moe.Routing(subject.routing.expert_ids[:rows], subject.routing.weights[:rows])
    shape = Shape(
        tokens=rows,
        top_k=routing.expert_ids.shape[1],
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=layer.experts,
        activation=layer.activation,
        sharing=InputQuantization.SHARED
        if contract.input_scale is InputScaleArgument.SEPARATE
        else InputQuantization.PER_ROUTE,
    )
    family = contract.without(*planned.keep_out).select(shape)
    arithmetic = contract.arithmetic(family, shape)
    truth = reference.truth(layer, x, routing)

    def error(scale: ActScale) -> float:
        launch = arguments(planned.strategy, layer, *_scales(subject, scale), contract)
        output = moe.run(launch.launch(layer), x, routing, arithmetic, 0).output
        return distance(output.double(), truth).relative_rms

    errors = {scale: error(scale) for scale in ActScale}
    return Figure(name, contract.version, planned.strategy.value, rows, family.value, power, errors)


def _scales(subject: LayerInput, scale: ActScale) -> tuple[Tensor, Tensor]:
    calibrated = input_scales(subject.layer, InputScales.LAYER)
    if scale is ActScale.CALIBRATED:
        return calibrated
    return torch.ones_like(calibrated[0]), torch.ones_like(calibrated[1])


def subjects(presets: bool, rows: int, seed: int) -> dict[str, LayerInput]:
    """The embedded real layer at both magnitudes, and layers made at published shapes."""
    moved, own = embedded.load_inputs()
    found = {"SmolLM2 layer 1": own, "SmolLM2 layer 1, moved": moved}
    if presets:
        for name, experts in PRESETS.items():
            request = from_preset.Request(name, rows, seed, experts=experts)
            found[name] = from_preset.load(request).subject
    return {name: replace(one, x=one.x[:rows]) for name, one in found.items()}


def figures(
    presets: bool = True,
    rows: tuple[int, ...] = ROWS,
    powers: tuple[int, ...] = POWERS,
    seed: int = 0,
) -> list[Figure]:
    """All of them, printed as they come."""
    found = []
    for name, subject in subjects(presets, max(rows), seed).items():
        for version in PINNED.values():
            for count in rows:
                for power in powers:
                    figure = measure(name, subject, contract_for(version), count, power)
                    if figure is not None:
                        found.append(figure)
                        print(figure.line(), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rows", type=_numbers, default=ROWS)
    parser.add_argument("--powers", type=_numbers, default=POWERS)
    parser.add_argument("--presets", type=int, choices=(0, 1), default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    print(_HEADER)
    found = figures(bool(args.presets), args.rows, args.powers, args.seed)
    for power in args.powers:
        here = [one.errors for one in found if one.power == power]
        shown = ", ".join(
            f"{scale.value} {min(e[scale] for e in here):.1%} to {max(e[scale] for e in here):.1%}"
            for scale in ActScale
        )
        print(f"activations * 2^{power}: {shown}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split(","))


if __name__ == "__main__":
    main()

"""Emulated figures at the shape of the report (TensorRT-LLM#21461): hidden 1024, intermediate 2688,
top-22, relu2. Prints what the README says about "2-6%" and about fp32-rescale.

    python -m evals.reported_shape [--experts 64] [--seeds 5] [--device cuda]

Experts are Gaussian (sigma 0.013): a stand-in for a layer nobody here has. A GPU makes it a minute;
on a CPU take fewer seeds.
"""

from __future__ import annotations

import argparse

import torch

from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator.contract import contract_for
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.run import LayerInput, Settings, run_arms
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.repair import InputScales

HIDDEN, INTERMEDIATE, TOP_K, SIGMA = 1024, 2688, 22, 0.0130
ROWS = (1, 2, 4, 8, 17, 64)
VERSIONS = ("0.6.18", "0.7.2")
ARMS = (Arm.ALPHAS, Arm.FP32_RESCALE, Arm.BAKED)
HEADER = (
    f"{'version':8} {'rows':>4} {'kernel':8} {'alphas vs published':>20} {'order':>7} {'sum':>7} "
    f"{'noise':>7} {'rescale':>8} {'its true error':>15} {'baked':>7}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    print(HEADER)
    for seed in range(args.seeds):
        layer = make_layer(
            Activation.RELU2,
            experts=args.experts,
            hidden=HIDDEN,
            intermediate=INTERMEDIATE,
            sigma=SIGMA,
            seed=seed,
        )
        x, routing = make_inputs(layer, tokens=max(ROWS), top_k=TOP_K, seed=seed + 50)
        subject = LayerInput(layer, x, routing, "synthetic", model_experts=512)
        report(subject.to(torch.device(args.device)))


def relative(value: Distance | None) -> float:
    """Relative RMS of a measured distance; every arm here is available on both versions."""
    if value is None:
        raise RuntimeError("an arm without figures")
    return value.relative_rms


def report(subject: LayerInput) -> None:
    """One line per version, row count and kernel."""
    for version in VERSIONS:
        settings = Settings(contract_for(version), ARMS, ROWS, None, InputScales.LAYER, 0)
        results, families = run_arms(subject, settings, lambda _: None)
        for family in families:
            arms = {r.arm: r for r in results if (r.rows, r.family) == (family.rows, family.family)}
            alphas, rescaled, baked = (arms[arm] for arm in ARMS)
            ratio = relative(rescaled.true_error) / family.true_error.relative_rms - 1
            print(
                f"{version:8} {family.rows:4} {family.family.value:8} "
                f"{relative(alphas.published):20.2%} {family.evaluation_order:7.2%} "
                f"{family.summation:7.2%} {family.noise:7.2%} "
                f"{relative(rescaled.fidelity):8.2%} {ratio:+15.2%} "
                f"{relative(baked.fidelity):7.1%}",
                flush=True,
            )


if __name__ == "__main__":
    main()

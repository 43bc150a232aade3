"""A tiny random model, calibrated and quantized, shared by the tests."""

from functools import cache

import torch

from evals.relu2_lm import config, data, evaluate, quantize
from evals.relu2_lm.model import LanguageModel, initialize
from evals.relu2_lm.problems import Split, generate


def random_model(seed: int = 0) -> LanguageModel:
    """fp32, with a router bias that counts."""
    model = LanguageModel(config.tiny())
    initialize(model, seed)
    generator = torch.Generator().manual_seed(seed)
    for _, moe in model.moe_layers():
        moe.gate.e_score_correction_bias.normal_(0, 0.1, generator=generator)
    # What a bf16 file can hold.
    for parameter in model.parameters():
        parameter.data = parameter.data.bfloat16().float()
    return model.eval().requires_grad_(False)


@cache
def subject() -> evaluate.Subject:
    """The random model with 9 problems."""
    model = random_model()
    corpus = data.encode(list(generate(Split.TRAIN, quantize.CALIBRATION_SEED, 8)))
    layers = quantize.quantize(model, quantize.calibrate(model, corpus))
    return evaluate.subject(model, layers, evaluate.problems_of(3))

"""What the installed FlashInfer's routing kernels do with weights, read from its CUDA source."""

from __future__ import annotations

import importlib
from importlib.metadata import version
from pathlib import Path

from trtllm_b12x_fix.errors import UnsupportedVersionError
from trtllm_b12x_fix.parity.routing import WeightRecovery

#: In the source since flashinfer#3875.
_RECOMPUTES = "kNeedsRawScores"
_POLICY = "data/include/flashinfer/trtllm/fused_moe/RoutingCustomPolicy.cuh"


def weight_recovery() -> WeightRecovery:
    """How a chosen expert's sigmoid is had.

    Raises:
        UnsupportedVersionError: the source is not where it is known to be.
    """
    package = importlib.import_module("flashinfer")
    policy = Path(str(package.__file__)).parent / _POLICY
    try:
        source = policy.read_text(encoding="utf-8")
    except OSError as error:
        raise UnsupportedVersionError(
            f"FlashInfer {version('flashinfer-python')}: {_POLICY} cannot be read "
            f"({error.strerror}), so its routing is not known"
        ) from error
    return WeightRecovery.RECOMPUTED if _RECOMPUTES in source else WeightRecovery.SUBTRACTED

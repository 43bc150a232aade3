"""A stand-in for TensorRT-LLM, written from its contract: only what its b12x MoE backend touches.

The real package pulls in CUDA libraries, MPI and a compiled extension as soon as it is imported.
"""

from .version import __version__

__all__ = ["__version__"]

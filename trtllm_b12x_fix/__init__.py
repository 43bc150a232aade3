"""Exact NVFP4 mixture-of-experts scales for TensorRT-LLM's CUTEDSL (b12x) backend."""

__version__ = "0.1.0"

"""Exact NVFP4 mixture-of-experts scales for TensorRT-LLM's CUTEDSL (b12x) backend.

The bug (TensorRT-LLM#21461). On SM120/121, ``moe_config.backend: CUTEDSL`` decodes with
FlashInfer's b12x kernel. Below FlashInfer 0.6.17 that kernel took ONE scale for two jobs, so
TensorRT-LLM multiplies each expert's E4M3 block scales by ``weight_scale_2`` (about 2e-5) and
rounds the products to E4M3 again. They are subnormal there: on a reported layer the mean scale is
14% off, 0.8% of the scales are exactly 0, and so are their weights. The layer's output is wrong by
8 to 9.5%; nothing is logged. The repair leaves the block scales as the checkpoint has them and
hands ``weight_scale_2`` to the kernel where it is fp32.

``apply()`` switches the repair on for this process and its children, ``remove()`` takes it out,
``status()`` tells what is true now. ``import trtllm_b12x_fix.auto`` is ``apply()``.
"""

# Every start of Python imports this module (see startup.py): `typing`, `importlib` and even
# `__future__` would cost more here than all the rest.

__version__ = "0.1.0"

__all__ = ["__version__", "apply", "remove", "status"]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from trtllm_b12x_fix.fix import apply, remove, status


def __getattr__(name: str) -> object:
    if name in __all__:
        from trtllm_b12x_fix import fix

        return getattr(fix, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

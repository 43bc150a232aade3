"""Write a stand-in for TensorRT-LLM to disk, as one of its states ("eras").

TensorRT-LLM's wheel on the index cannot be installed without CUDA, so its contract with the b12x
kernels is re-written here from what its sources do: class and attribute names, shapes, layouts, the
order of the hooks, and what reaches FlashInfer's wrapper. The sources lie under ``package/`` as
overlays that an era combines; every file is whole, so it reads as a state of the package would.

What the states share:

* ``NVFP4CuteDslB12xFusedMoEMethod`` sits in ``quantization.py`` beside its bases and is imported
  inside the backend's ``_get_quant_method`` or a helper of it: at the first layer, not at import.
* Loading leaves the CUTLASS layout on the layer (``fused_moe/every_era/loading.py`` has the table
  of parameters) and one hook adds ``module._b12x_weights`` (the keywords of
  ``B12xMoEWrapper.run``) and ``module.b12x_wrapper``.
* The scales are baked: multiplied by ``alpha * input_scale`` and cast back to E4M3.
* Fewer than 64 tokens go to b12x in bf16, the rest to CUTLASS, which reads the loaded parameters.
* No hook is decorated, and none runs under ``torch.inference_mode`` (the forward pass does).

What differs is in :class:`EraFacts`. Left out: other ranks, the load balancer, LoRA, and
``can_implement``, which decides between backends before any layer exists.
"""

from __future__ import annotations

import enum
import shutil
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parent / "package"


@dataclass(frozen=True)
class EraFacts:
    """One state of the package.

    Attributes:
        version: what the distribution calls itself. Only 1.4.0rc1 comes from a report; the other
            numbers are made up, in order.
        parent: ``modules`` or ``moe``, the package under ``tensorrt_llm._torch`` that holds
            ``fused_moe``.
        hook: the method in which :attr:`quantization_module`'s class prepares b12x.
        overlays: folders under ``package/fused_moe``, in the order in which they are copied.
        backend: the backend's class for NVFP4.
        takes_context: whether ``run_moe`` takes one context instead of keywords.
        tensor_sizes: whether the wrapper is told ``quant_mode`` and the size of the (padded)
            tensors; else it is told the logical intermediate size.
        bakes: whether the scales are damaged.
    """

    version: str
    parent: str
    hook: str
    overlays: tuple[str, ...]
    backend: str = "CuteDslB12xFusedMoE"
    takes_context: bool = False
    tensor_sizes: bool = True
    bakes: bool = True

    @property
    def fused_moe(self) -> str:
        return f"tensorrt_llm._torch.{self.parent}.fused_moe"

    @property
    def quantization_module(self) -> str:
        return f"{self.fused_moe}.quantization"

    @property
    def backend_module(self) -> str:
        return f"{self.fused_moe}.fused_moe_cute_dsl_b12x"


_OLD = ("every_era", "one_hook", "run_with_keywords")
_STAGED = ("every_era", "staged_hooks", "run_with_keywords")
_NEW = ("every_era", "staged_hooks", "context", "run_with_context")


class Era(enum.Enum):
    """States of TensorRT-LLM, oldest first."""

    #: All work in ``post_load_weights(self, module)``; transform_weights does not exist.
    MODULES_POST_LOAD = EraFacts(
        "1.3.0rc17",
        "modules",
        "post_load_weights",
        (*_OLD, "baked_post_load"),
        tensor_sizes=False,
    )
    #: The same with W4A16_NVFP4 on b12x, which is not baked.
    MODULES_POST_LOAD_W4A16 = EraFacts(
        "1.3.0rc18", "modules", "post_load_weights", (*_OLD, "baked_post_load_w4a16")
    )
    #: The hook split into transform_weights and cache_derived_state, W4A16 unknown.
    MODULES_TRANSFORM = EraFacts(
        "1.3.0rc19",
        "modules",
        "transform_weights",
        (*_STAGED, "baked_transform"),
        tensor_sizes=False,
    )
    #: Moved to ``_torch.moe``; a context carries the call. The reported state.
    MOE_TRANSFORM = EraFacts(
        "1.4.0rc1",
        "moe",
        "transform_weights",
        (*_NEW, "baked_transform_w4a16"),
        takes_context=True,
    )
    #: The backend split by format; its old name is an alias that cannot be constructed.
    MOE_LEAVES = EraFacts(
        "1.4.0rc4",
        "moe",
        "transform_weights",
        ("every_era", "staged_hooks", "context", "run_in_leaves", "baked_transform_w4a16"),
        backend="CuteDslB12xNvfp4FusedMoE",
        takes_context=True,
    )
    #: Made up: an upstream that has stopped baking. A fix must leave it alone.
    FIXED = EraFacts(
        "1.5.0",
        "moe",
        "transform_weights",
        (*_NEW, "intact_transform"),
        takes_context=True,
        bakes=False,
    )


def write_stand_in(folder: Path, era: Era) -> Path:
    """Write the package and its metadata into ``folder``, which is to go on ``sys.path``.

    ``importlib.metadata.version("tensorrt_llm")`` then answers the era's version.
    """
    facts = era.value
    shutil.copytree(PACKAGE / "common", folder, dirs_exist_ok=True, ignore=_no_caches)
    package = folder / "tensorrt_llm"
    (package / "version.py").write_text(f'__version__ = "{facts.version}"\n')
    parent = package / "_torch" / facts.parent
    parent.mkdir()
    (parent / "__init__.py").touch()
    for overlay in facts.overlays:
        source = PACKAGE / "fused_moe" / overlay
        shutil.copytree(source, parent / "fused_moe", dirs_exist_ok=True, ignore=_no_caches)
    metadata = folder / f"tensorrt_llm-{facts.version}.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: tensorrt_llm\nVersion: {facts.version}\n"
    )
    return folder


_no_caches = shutil.ignore_patterns("__pycache__")

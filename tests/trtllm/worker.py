"""Run layers through stand-ins and one FlashInfer wheel on a CPU (one process per wheel).

    python -m tests.trtllm.worker --version 0.7.4 --job job.pt --out out.pt \
        [--setup module:function] [--backend module:function]

``--setup`` names functions that are called for each stand-in, in order, once it is on the path but
before anything of it is imported. ``job.pt`` holds a list of {era, stand_in, jobs}: the name of the
era, the folder that tests/trtllm/stand_in.py wrote, and a list of jobs:

    checkpoint        tensors of tests/trtllm/layers.py, or a list of such parts, loaded in turn
    activation        "relu2" | "silu"
    top_k, hidden, intermediate, experts
    quant_algo        default "NVFP4"
    inference_mode    default False: build and load under torch.inference_mode
    use_cuda_graph    default False
    max_num_tokens    default 64
    dynamic           default False: force_dynamic_quantization
    walks             default 1: how often the hook of the layer is called (2 in the real package,
                      whose wrapper module and backend module both pass it on)
    reload            checkpoint (or parts) loaded into the same layer before the cases are run
    cases             list of {x, expert_ids, expert_weights}

``out.pt`` holds a list of records for each stand-in, one record per job: ``cases`` (output, and
what reached the kernel: family, block scales, alphas), ``parameters`` (after everything ran),
``loaded`` (digests of the parameters before the hook and after all calls), ``weights`` (what each
entry of ``_b12x_weights`` is), ``fold`` (whether the wrapper had its folded alphas before the first
case, and kept that product through it), ``rebuilt`` (whether a second walk made a new wrapper),
``log``, and ``error`` in the place of cases when the hook or a call raised.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import torch

from tests.flashinfer import harness
from tests.trtllm.stand_in import Era, EraFacts

PARAMETERS = (
    "w3_w1_weight",
    "w3_w1_weight_scale",
    "w2_weight",
    "w2_weight_scale",
    "fc31_alpha",
    "fc2_alpha",
    "fc31_input_scale",
    "fc2_input_scale",
)
_KERNEL_TENSORS = (
    "w1_block_scale",
    "w2_block_scale",
    "input_gs",
    "w1_alpha",
    "w2_alpha",
    "down_input_scale",
)


def resolve(spec: str) -> Any:
    module, _, name = spec.partition(":")
    return getattr(importlib.import_module(module), name)


def default_to_cpu(wrapper: Any) -> None:
    """TensorRT-LLM names no device, so the wrapper's own default has to be this machine's."""
    inspect.unwrap(wrapper.__init__).__kwdefaults__["device"] = "cpu"


@contextlib.contextmanager
def installed(folder: str, setups: list[str]) -> Iterator[list[Callable[[], None]]]:
    """Put one stand-in on the path for a while; forget its modules afterwards.

    Yields what the set-ups returned: to be called when all jobs are done.
    """
    sys.path.insert(0, folder)
    try:
        yield [end for end in [resolve(setup)() for setup in setups] if end]
    finally:
        sys.path.remove(folder)
        for name in [n for n in sys.modules if n.split(".")[0] == "tensorrt_llm"]:
            del sys.modules[name]
        importlib.invalidate_caches()


class Runner:
    """Builds layers of one era and keeps what reached the kernel."""

    def __init__(self, facts: EraFacts, calls: list[harness.KernelCall]) -> None:
        self.facts = facts
        self.calls = calls

    def build(self, job: dict[str, Any]) -> Any:
        """A layer with weights, no hook run yet."""
        from tensorrt_llm._torch.model_config import ModelConfig
        from tensorrt_llm._torch.utils import ActivationType
        from tensorrt_llm.models.modeling_utils import QuantAlgo, QuantConfig

        kinds = {"relu2": ActivationType.Relu2, "silu": ActivationType.Swiglu}
        backend = getattr(importlib.import_module(self.facts.backend_module), self.facts.backend)
        module = backend(
            routing_method=SimpleNamespace(experts_per_token=job["top_k"]),
            num_experts=job["experts"],
            hidden_size=job["hidden"],
            intermediate_size=job["intermediate"],
            model_config=ModelConfig(
                quant_config=QuantConfig(QuantAlgo(job.get("quant_algo", "NVFP4"))),
                use_cuda_graph=job.get("use_cuda_graph", False),
                moe_max_num_tokens=job.get("max_num_tokens", 64),
                force_dynamic_quantization=job.get("dynamic", False),
            ),
            activation_type=kinds[job["activation"]],
        )
        load(module, job["checkpoint"])
        return module

    def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
        from tensorrt_llm.logger import logger

        first_line = len(logger.lines)
        record: dict[str, Any] = {}
        cases: list[dict[str, Any]] = []
        with torch.inference_mode(job.get("inference_mode", False)):
            module = self.build(job)
        loaded = digest(module)
        try:
            with torch.inference_mode(job.get("inference_mode", False)):
                module.post_load_weights()
                first = module.b12x_wrapper
                for _ in range(job.get("walks", 1) - 1):
                    module.post_load_weights()
                record["rebuilt"] = module.b12x_wrapper is not first
                if "reload" in job:
                    module.pre_reload_weights()
                    load(module, job["reload"])
                    module.post_load_weights()
                    loaded = digest(module)
            before = getattr(module.b12x_wrapper, "_folded_w1_alpha", None)
            # The forward pass always runs so.
            with torch.inference_mode():
                for place, case in enumerate(job["cases"]):
                    cases.append(self.run_case(module, case))
                    if place == 0:
                        after = getattr(module.b12x_wrapper, "_folded_w1_alpha", None)
                        record["fold"] = (before is not None, after is before)
            record["cases"] = cases
        except Exception as error:
            record["error"] = f"{type(error).__name__}: {error}"
        return record | {
            "loaded": (loaded, digest(module)),
            "parameters": {name: getattr(module, name).detach().clone() for name in PARAMETERS},
            "weights": describe(module),
            "log": logger.lines[first_line:],
        }

    def run_case(self, module: Any, case: dict[str, Any]) -> dict[str, Any]:
        self.calls.clear()
        x, x_sf = module.quantize_input(case["x"], post_quant_comm=False)
        routing = (case["expert_ids"].int(), case["expert_weights"])
        if self.facts.takes_context:
            contract = importlib.import_module(f"{self.facts.fused_moe}.impl_contract")
            plan = contract.MoECommPlan()
            output = module.run_moe(
                contract.MoERunContext(x, *routing, x_sf, torch.bfloat16, comm_plan=plan)
            )
        else:
            output = module.run_moe(x, *routing, x_sf=x_sf, output_dtype=torch.bfloat16)
        result: dict[str, Any] = {"output": output.clone(), "family": None}
        if self.calls:
            (call,) = self.calls
            result |= {"family": call.family, "tile": call.mma_tiler_mn, "n": call.n}
            result |= {name: getattr(call, name).clone() for name in _KERNEL_TENSORS}
        return result


def load(module: Any, checkpoint: Any) -> None:
    """A whole checkpoint, or parts of one with the finishing left to the end."""
    if isinstance(checkpoint, dict):
        module.load_weights([checkpoint])
        return
    for part in checkpoint:
        module.load_weights([part], allow_partial_loading=True)
    module.process_weights_after_loading()


def digest(module: Any) -> dict[str, str]:
    return {
        name: hashlib.sha256(
            getattr(module, name).detach().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name in PARAMETERS
    }


def describe(module: Any) -> dict[str, Any]:
    """Dtype, shape, memory shared with a parameter, and values of the short ones."""
    owners = {getattr(module, name).data_ptr(): name for name in PARAMETERS}
    return {
        key: tensor
        if tensor is None
        else {
            "dtype": str(tensor.dtype),
            "shape": tuple(tensor.shape),
            "shares": owners.get(tensor.data_ptr()),
            "inference": tensor.is_inference(),
            "values": tensor.clone() if tensor.dim() < 2 else None,
        }
        for key, tensor in (module._b12x_weights or {}).items()
    }


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", required=True, choices=harness.VERSIONS)
    parser.add_argument("--job", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--setup", action="append", default=[])
    parser.add_argument("--backend", default="tests.kernel_backend:emulate")
    args = parser.parse_args(argv)

    ns = harness.load(args.version)
    default_to_cpu(ns.B12xMoEWrapper)
    calls: list[harness.KernelCall] = []
    emulate = resolve(args.backend)

    def on_call(call: harness.KernelCall) -> None:
        calls.append(call)
        emulate(call)

    harness.install(ns, on_call)
    results = []
    for part in torch.load(args.job, weights_only=True):
        with installed(part["stand_in"], args.setup) as endings:
            runner = Runner(Era[part["era"]].value, calls)
            records = [runner.run_job(job) for job in part["jobs"]]
            logger = importlib.import_module("tensorrt_llm.logger").logger
            said = len(logger.lines)
            for end in endings:
                end()
            records[-1]["log"] += logger.lines[said:]
            results.append(records)
    torch.save(results, args.out)


if __name__ == "__main__":
    main()

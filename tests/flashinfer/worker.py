"""Run jobs through one FlashInfer version on a CPU (one process per version).

    python worker.py --version 0.7.4 --job job.pt --out out.pt [--backend mod:function]

``job.pt`` holds a job (a dict) or a list of jobs, saved with ``torch.save``:

    w1_packed, w2_packed            uint8 [E, R1, H/2], [E, H, I/2]; gated: up, then gate
    w1_block_scale, w2_block_scale  uint8, linear [E, R1, H/16], [E, H, I/16]
    w1_alpha, w2_alpha, fc2_input_scale, input_global_scale (or None)
    activation                      "relu2" | "silu"
    top_k                           int
    use_cuda_graph                  bool, default False
    max_num_tokens                  int, used with use_cuda_graph
    dump_calls                      bool, default False: return the captured tensors too
    cases                           list of {x, expert_ids, expert_weights,
                                             forced_family, direct_micro_max_n}

``forced_family`` is one of FlashInfer's own names ("direct_micro", "micro",
"static", "dynamic") or None for the dispatch's own choice.  ``out.pt`` holds, per
job, the version and per case the family, the kernel, the output and a digest of
everything the kernel got.  What a version cannot do raises; nothing is skipped.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import harness
import torch

_TENSOR_FIELDS = (
    "x",
    "expert_ids",
    "expert_weights",
    "w1_packed",
    "w1_block_scale",
    "w2_packed",
    "w2_block_scale",
    "input_gs",
    "w1_alpha",
    "w2_alpha",
    "down_input_scale",
)
_FLAG_FIELDS = (
    "version",
    "family",
    "kernel_class",
    "mma_tiler_mn",
    "launch_size",
    "activation",
    "fast_math",
    "input_scales_are_reciprocal",
    "input_gs_shared",
    "n",
)


def write_zeros(call: harness.KernelCall) -> None:
    """The default backend: only proves that the launch was reached."""
    call.output.zero_()


def load_backend(spec: str) -> harness.Backend:
    # A backend may live in this folder, in the package, or under tests.
    sys.path.append(str(Path(__file__).resolve().parents[2]))
    module, _, name = spec.partition(":")
    backend: harness.Backend = getattr(importlib.import_module(module), name)
    return backend


class Runner:
    """Runs jobs with one backend and keeps the calls of the current case."""

    def __init__(self, ns: SimpleNamespace, backend: harness.Backend) -> None:
        self.ns = ns
        self.backend = backend
        self.calls: list[harness.KernelCall] = []
        harness.install(ns, self._on_call)

    def _on_call(self, call: harness.KernelCall) -> None:
        self.calls.append(call)
        self.backend(call)

    def run_job(self, job: dict[str, Any]) -> dict[str, Any]:
        wrapper = make_wrapper(self.ns, job)
        weights = weight_arguments(self.ns, job)
        cases = [self.run_case(wrapper, weights, job, case) for case in job["cases"]]
        return {"version": self.ns.version, "cases": cases}

    def run_case(
        self, wrapper: Any, weights: dict[str, Any], job: dict[str, Any], case: dict[str, Any]
    ) -> dict[str, Any]:
        self.calls.clear()
        forced = case.get("forced_family")
        with dispatch_overrides(self.ns.dispatch, forced, case.get("direct_micro_max_n")):
            output = wrapper.run(
                x=case["x"],
                token_selected_experts=case["expert_ids"],
                token_final_scales=case["expert_weights"],
                **weights,
            )
        if len(self.calls) != 1:
            raise RuntimeError(f"one kernel launch expected, saw {len(self.calls)}")
        call = self.calls[0]
        if forced is not None and call.family != forced.replace("_", "-"):
            # A CUDA graph wrapper without a dynamic workspace ignores the request.
            raise RuntimeError(f"forced {forced}, but the dispatch launched {call.family}")
        result = {
            "family": call.family,
            "output": output.clone(),  # graph wrappers reuse their buffer
            "flags": flags(call),
            "digest": digest(call),
        }
        if job.get("dump_calls"):
            result["call"] = {name: getattr(call, name).clone() for name in _TENSOR_FIELDS}
        return result


def flags(call: harness.KernelCall) -> dict[str, Any]:
    return {name: getattr(call, name) for name in _FLAG_FIELDS}


def digest(call: harness.KernelCall) -> str:
    """One hash over every tensor and flag that reached the kernel."""
    state = hashlib.sha256(repr(sorted(flags(call).items())).encode())
    for name in _TENSOR_FIELDS:
        tensor = getattr(call, name).contiguous()
        state.update(f"{name}{tensor.dtype}{tuple(tensor.shape)}".encode())
        state.update(tensor.view(torch.uint8).numpy().tobytes())
    return state.hexdigest()


@contextlib.contextmanager
def dispatch_overrides(
    dispatch: Any, forced: str | None, direct_micro_max_n: int | None
) -> Iterator[None]:
    wanted = {"_FORCED_BACKEND": forced, "_DIRECT_MICRO_MAX_N": direct_micro_max_n}
    saved: dict[str, Any] = {}
    for name, value in wanted.items():
        if value is None:
            continue
        if not hasattr(dispatch, name):
            raise ValueError(f"this FlashInfer version has no {name}")
        saved[name] = getattr(dispatch, name)
        setattr(dispatch, name, value)
    try:
        yield
    finally:
        for name, value in saved.items():
            setattr(dispatch, name, value)


def make_wrapper(ns: SimpleNamespace, job: dict[str, Any]) -> Any:
    experts, hidden, packed = job["w2_packed"].shape
    options: dict[str, Any] = {}
    if job.get("use_cuda_graph", False):
        options = {"use_cuda_graph": True, "max_num_tokens": job["max_num_tokens"]}
    return ns.B12xMoEWrapper(
        num_experts=experts,
        top_k=job["top_k"],
        hidden_size=hidden,
        intermediate_size=packed * 2,
        device="cpu",
        activation=job["activation"],
        **options,
    )


def weight_arguments(ns: SimpleNamespace, job: dict[str, Any]) -> dict[str, Any]:
    w1, w2 = job["w1_packed"], job["w2_packed"]
    arguments = {
        "w1_weight": w1,
        "w1_weight_sf": swizzled_scale(ns, job["w1_block_scale"], w1.shape[1], w1.shape[2] * 2),
        "w2_weight": w2,
        "w2_weight_sf": swizzled_scale(ns, job["w2_block_scale"], w2.shape[1], w2.shape[2] * 2),
        "w1_alpha": job["w1_alpha"],
        "w2_alpha": job["w2_alpha"],
        "fc2_input_scale": job["fc2_input_scale"],
    }
    if job.get("input_global_scale") is not None:
        # 0.6.16 does not know the argument and raises a TypeError, as it should.
        arguments["input_global_scale"] = job["input_global_scale"]
    return arguments


def swizzled_scale(
    ns: SimpleNamespace, linear: torch.Tensor, rows: int, columns: int
) -> torch.Tensor:
    """Linear block scales to the kernel's view, with FlashInfer's own functions."""
    swizzled = ns.helpers.swizzle_block_scale(linear)
    flat = swizzled.reshape(-1, swizzled.shape[-1]).view(torch.float8_e4m3fn)
    view: torch.Tensor = ns.utils.convert_sf_to_mma_layout(
        flat, m=rows, k=columns, num_groups=linear.shape[0]
    )
    return view


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--version", required=True, choices=harness.VERSIONS)
    parser.add_argument("--job", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--backend", default="worker:write_zeros", help="dotted.module:function")
    args = parser.parse_args(argv)

    job = torch.load(args.job, weights_only=True)
    jobs = job if isinstance(job, list) else [job]
    runner = Runner(harness.load(args.version), load_backend(args.backend))
    results = [runner.run_job(one) for one in jobs]
    torch.save(results if isinstance(job, list) else results[0], args.out)


if __name__ == "__main__":
    main()

"""What the repair adds to TensorRT-LLM's preparation of one layer of the reported shape.

The stand-in's hook runs as patched, on FlashInfer's real wrapper (its kernels are never reached),
each wheel in a process of its own. Both sides come from the same calls: upstream's method is timed
inside the patched one, and what is left is the repair with its validation. Memory is counted in
further calls, by watching every storage that torch makes and frees. Random bytes serve as weights:
no step looks at their distribution.

Freeing upstream's baked copies, 176 MB here, makes the system take back their pages: 12 ms that no
GPU's caching allocator has. They are printed, and not held against the limit of 2%.

Times are of this machine's CPU and noisy where others use it; shares are medians of pairs measured
within one call. Bytes are exact.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.benchmarks.result import BenchResult

ROOT = Path(__file__).parents[2]
VERSIONS = ("0.6.18", "0.7.4")
EXPERTS, HIDDEN, INTERMEDIATE, TOP_K = 512, 1024, 2688, 22
REPEATS, WARMUPS = 7, 2
#: The limits: added time and temporaries as shares, bytes that stay beside upstream's.
TIME_LIMIT, TEMPORARY_LIMIT, RESIDENT_LIMIT = 0.02, 0.01, 64 * 1024
_SETTINGS = {
    "TRTLLM_B12X_FIX": "off",  # the start-up file of an installed package must not patch first
    # Of the machine's cores, as a loading process has them.
    "OMP_NUM_THREADS": "2",
}


class StorageMeter(TorchDispatchMode):
    """Bytes of the storages that operations make while this is entered, until they are freed.

    Attributes:
        live, peak: bytes now, and at most since :meth:`start_peak`.
        made: bytes of every storage made, in order.
        begins: bytes by the address at which a storage begins.
        operations: how often each operation did work. In inference mode ``contiguous`` arrives
            whole and calls itself a view; it is none where it makes a storage.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.made: list[int] = []
        self.begins: dict[int, int] = {}
        self.operations: Counter[str] = Counter()
        self._known: set[int] = set()

    def start_peak(self) -> int:
        """Forget the peak so far; returns the bytes alive now."""
        self.peak = self.live
        return self.live

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for tensor in _tensors((args, kwargs)):
            self._note(tensor.untyped_storage(), made=False)
        before = len(self.made)
        out = func(*args, **kwargs)
        for tensor in _tensors(out):
            self._note(tensor.untyped_storage(), made=True)
        if not func.is_view or len(self.made) > before:
            self.operations[str(func)] += 1
        return out

    def _note(self, storage: torch.UntypedStorage, made: bool) -> None:
        key = storage._cdata
        if key in self._known:
            return
        self._known.add(key)
        size = storage.nbytes() if made else 0
        if made:
            self.made.append(size)
            self.begins[storage.data_ptr()] = size
            self.live += size
            self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._freed, key, size)

    def _freed(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live -= size


def _tensors(tree: object) -> list[torch.Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


@dataclass
class Upstream:
    """Upstream's own method, with what it cost and a mark of where it ended."""

    hook: Callable[[Any, Any], None]
    seconds: float = 0.0
    at_end: Callable[[], None] = field(default=lambda: None)

    def __call__(self, method: Any, module: Any) -> None:
        began = time.perf_counter()
        self.hook(method, module)
        self.seconds = time.perf_counter() - began
        self.at_end()


def measure(version: str, folder: str) -> dict[str, float]:
    """Figures of one wheel; call it in a fresh process."""
    from tests.flashinfer import harness
    from tests.trtllm.stand_in import Era, write_stand_in
    from tests.trtllm.worker import Runner, default_to_cpu, installed

    facts = Era.MOE_TRANSFORM.value
    write_stand_in(Path(folder), Era.MOE_TRANSFORM)
    ns = harness.load(version)
    default_to_cpu(ns.B12xMoEWrapper)
    harness.install_raw(ns, lambda launch: None)
    with installed(folder, []):
        module = Runner(facts, []).build(
            {
                "top_k": TOP_K,
                "experts": EXPERTS,
                "hidden": HIDDEN,
                "intermediate": INTERMEDIATE,
                "activation": "relu2",
                "checkpoint": [],
            }
        )
        _fill(module)
        upstream, patched = _patched(facts)
        times = _times(module, upstream, patched)
        memory = _memory(module, upstream, patched)
    scales = EXPERTS * INTERMEDIATE * HIDDEN // 16 * 2
    return {**times, **memory, "scales": scales}


def _fill(module: Any) -> None:
    for name in ("w3_w1_weight_scale", "w2_weight_scale"):
        getattr(module, name).data.view(torch.uint8).random_(0x30, 0x7F)
    for alpha, reciprocal in (
        (module.fc31_alpha, module.fc31_input_scale),
        (module.fc2_alpha, module.fc2_input_scale),
    ):
        reciprocal.data.fill_(2688 / 5.0)
        alpha.data.copy_((1 + torch.rand(EXPERTS)) * 2e-5 / reciprocal.data)


def _patched(facts: Any) -> tuple[Upstream, Callable[[Any, Any], None]]:
    import importlib

    from trtllm_b12x_fix.integrations import tensorrt_llm
    from trtllm_b12x_fix.settings import Mode, Settings, Verify

    quantization = importlib.import_module(facts.quantization_module)
    plan = tensorrt_llm.on_import(quantization, Settings(mode=Mode.AUTO, verify=Verify.OFF))
    (patch,) = [one for one in plan.patches if one.attribute == facts.hook]
    owner = getattr(quantization, tensorrt_llm.CLASS)
    upstream = Upstream(getattr(owner, facts.hook))
    return upstream, patch.replacement(upstream)


def _times(module: Any, upstream: Upstream, patched: Callable) -> dict[str, float]:
    pairs, holding = [], []
    for _ in range(WARMUPS + REPEATS):
        pairs.append(_pair(module, upstream, patched, hold=False))
        holding.append(_pair(module, upstream, patched, hold=True))
    first = pairs[0][1]
    pairs, holding = pairs[WARMUPS:], holding[WARMUPS:]
    return {
        "ours": statistics.median(inside + added for inside, added in pairs),
        "upstream": statistics.median(inside for inside, _ in pairs),
        "added": statistics.median(added for _, added in pairs),
        "share": statistics.median(added / inside for inside, added in pairs),
        "share_without_freeing": statistics.median(added / inside for inside, added in holding),
        "first": first,
    }


def _pair(module: Any, upstream: Upstream, patched: Callable, hold: bool) -> tuple[float, float]:
    """Seconds of upstream's method and of what is added to it.

    ``hold`` keeps the baked copies alive past the measurement: what the system takes to have their
    pages back is not counted then. A GPU's allocator keeps them, at no cost.
    """
    held: list[dict[str, Any]] = []
    upstream.at_end = lambda: held.append(dict(module._b12x_weights)) if hold else None
    began = time.perf_counter()
    patched(module.quant_method, module)
    added = time.perf_counter() - began - upstream.seconds
    upstream.at_end = lambda: None
    return upstream.seconds, added


def _memory(module: Any, upstream: Upstream, patched: Callable) -> dict[str, float]:
    """Bytes over what a layer without b12x holds: after upstream, after ours, and on the way."""
    module._b12x_weights = module.b12x_wrapper = None
    with StorageMeter() as meter:
        upstream(module.quant_method, module)
        baked, upstream_peak = meter.live, meter.peak
    module._b12x_weights = module.b12x_wrapper = None
    with StorageMeter() as meter:
        begun = []
        upstream.at_end = lambda: begun.append(meter.start_peak())
        patched(module.quant_method, module)
        upstream.at_end = lambda: None
        return {
            "baked": baked,
            "upstream_peak": upstream_peak,
            "resident": meter.live,
            "temporary": meter.peak - begun[0],
            "made": len(meter.made),
        }


def in_process(version: str) -> dict[str, float]:
    """:func:`measure` in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        environ = os.environ | _SETTINGS | {"TRTLLM_B12X_FIX_LEDGER": f"{folder}/ledger"}
        command = [sys.executable, "-m", "tests.benchmarks.bench_trtllm_repair", version, folder]
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=ROOT, env=environ
        )
    if done.returncode:
        raise RuntimeError(f"FlashInfer {version}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def broken_limits(found: dict[str, float]) -> list[str]:
    """Limits that these figures do not keep, in words."""
    checks = {
        f"adds {found['share_without_freeing']:.1%} of upstream's time": (
            found["share_without_freeing"] < TIME_LIMIT
        ),
        f"holds {found['resident']:.0f} bytes": found["resident"]
        < found["baked"] - found["scales"] + RESIDENT_LIMIT,
        f"temporaries {found['temporary'] / found['scales']:.2%} of the scales": found["temporary"]
        < TEMPORARY_LIMIT * found["scales"],
    }
    return [words for words, kept in checks.items() if not kept]


def result(version: str, found: dict[str, float]) -> BenchResult:
    broken = broken_limits(found)
    scales = found["scales"]
    parts = (
        f"adds {found['share_without_freeing']:.2%} of upstream's time",
        f"{found['share']:.2%} ({found['added'] * 1e3:.1f} ms) with the baked copies' pages back",
        f"resident {found['baked'] / 1e6:.2f} MB upstream",
        f"{found['resident'] / 1e3:.1f} kB repaired",
        f"scales {scales / 1e6:.2f} MB",
        f"temporaries {found['temporary'] / 1e6:.2f} MB, {found['temporary'] / scales:.2%} of them",
        f"upstream's peak {found['upstream_peak'] / scales:.1f} times them",
        f"the first layer of a process adds {found['first'] * 1e3:.0f} ms",
        f"limits {'broken: ' + ', '.join(broken) if broken else 'kept'}",
    )
    return BenchResult(
        name=f"preparing a layer, FlashInfer {version}",
        ours_s=found["ours"],
        peer_s=found["upstream"],
        peer="upstream's method in the same calls (TensorRT-LLM stand-in 1.4.0rc1)",
        note="; ".join(parts),
    )


def run() -> list[BenchResult]:
    return [result(version, in_process(version)) for version in VERSIONS]


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(measure(sys.argv[1], sys.argv[2])))
    else:
        for one in run():
            print(one.line())
            print(one.note)

"""Run vLLM's real preparation on the CPU, sound and with its own functions broken.

    python vllm_worker.py --out OUT.json --site DIR ...

One process per vLLM version: importing it is the dear part. OUT holds ``sound``, the cases of a
small grid as `parity --json` writes them; ``planted``, the suspects and details per broken
function; ``index``, whether FlashInfer's own index functions give the package's rows.
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path as File
from typing import Any

sys.path.insert(0, str(File(__file__).resolve().parents[2]))

from trtllm_b12x_fix.commands.parity import _add_sites

EXPERTS, TOP_K, TOKENS = 4, 2, 8
HIDDEN, INTERMEDIATE = 1152, 80


@dataclass(frozen=True)
class Plant:
    """A real function replaced: (module, attribute or "Class.attribute", wrong version)."""

    name: str
    activation: str
    path: str
    items: Callable[[], list[tuple[Any, str, Any]]]
    replay: bool = False


def module(name: str) -> Any:
    return importlib.import_module(name)


_CORE = "flashinfer.fused_moe.core"
_PREPARE = "vllm.model_executor.layers.quantization.utils.flashinfer_fp4_moe"
_MOE = "vllm.model_executor.layers.fused_moe"
_ORACLE = f"{_MOE}.oracle.nvfp4"


def _rows_stay() -> list[tuple[Any, str, Any]]:
    import torch

    def stay(tensor: Any, *_: Any, **__: Any) -> Any:
        return torch.arange(tensor.shape[0])

    return [(module(_CORE), "get_shuffle_matrix_a_row_indices", stay)]


def _halves_stay() -> list[tuple[Any, str, Any]]:
    import torch

    name = "get_reorder_rows_for_gated_act_gemm_row_indices"
    return [(module(_CORE), name, lambda tensor: torch.arange(tensor.shape[0]))]


def _gate_first() -> list[tuple[Any, str, Any]]:
    return [(module(_PREPARE), "reorder_w1w3_to_w3w1", lambda codes, scales: (codes, scales))]


def _padding_filled() -> list[tuple[Any, str, Any]]:
    owner = module(_PREPARE)
    names = ("align_trtllm_fp4_moe_hidden_dim_for_fi", "align_fp4_moe_hidden_dim_for_fi")
    name = next(name for name in names if hasattr(owner, name))
    sound = getattr(owner, name)

    def filled(codes: Any, *rest: Any, **more: Any) -> Any:
        result = sound(codes, *rest, **more)
        result[0][:, :, codes.shape[2] :] = 0x22
        result[1].view(codes.dtype)[:, :, codes.shape[2] // 8 :] = 0x38
        return result

    return [(owner, name, filled)]


def _not_interleaved() -> list[tuple[Any, str, Any]]:
    host = module("trtllm_b12x_fix.integrations.vllm_host")
    return [(host, "interleave", lambda scales: scales.reshape(-1))]


def _gated_formula() -> list[tuple[Any, str, Any]]:
    owner = module(f"{_MOE}.experts.trtllm_nvfp4_moe").TrtLlmNvFp4ExpertsBase
    sound = owner.process_weights_after_loading

    def wrong(self: Any, layer: Any) -> None:
        sound(self, layer)
        self.g1_scale_c = self.g1_scale_c * self.quant_config.g1_alphas

    return [(owner, "process_weights_after_loading", wrong)]


def _config(change: Callable[[dict[str, Any]], None]) -> list[tuple[Any, str, Any]]:
    owner = module(_ORACLE)
    sound = owner.nvfp4_moe_quant_config

    def wrong(**arguments: Any) -> Any:
        change(arguments)
        return sound(**arguments)

    return [(owner, "nvfp4_moe_quant_config", wrong)]


def _inverted(name: str) -> Callable[[], list[tuple[Any, str, Any]]]:
    return lambda: _config(lambda arguments: arguments.update({name: 1 / arguments[name]}))


def _swizzled() -> list[tuple[Any, str, Any]]:
    return _config(lambda arguments: arguments.update(is_scale_swizzled=True))


def _another_method() -> list[tuple[Any, str, Any]]:
    owner = module(f"{_MOE}.config")
    return [(owner, "get_routing_method_type", lambda **_: owner.RoutingMethodType.Renormalize)]


def _experts_shifted() -> list[tuple[Any, str, Any]]:
    owner = module(f"{_MOE}.router.grouped_topk_router")
    sound = owner.grouped_topk

    def wrong(**arguments: Any) -> Any:
        weights, ids = sound(**arguments)
        return weights, (ids + 1) % EXPERTS

    return [(owner, "grouped_topk", wrong)]


def _replay_of_int32() -> list[tuple[Any, str, Any]]:
    kernel = module(f"{_MOE}.modular_kernel")
    owner = kernel.FusedMoEExpertsMonolithic
    if hasattr(owner, "_maybe_make_routing_replay_buffer"):
        name = "_maybe_make_routing_replay_buffer"
        sound = getattr(owner, name)
        return [(owner, name, lambda self, **more: sound(self, **more).int())]
    capturer = module(f"{_MOE}.routed_experts_capturer")
    sink = capturer.RoutedExpertsSink

    def wrong(config: Any, capture: Any) -> Any:
        made = sink(config, capture)
        made.buffer = made.buffer.int()
        return made

    return [(capturer, "RoutedExpertsSink", wrong)]


PLANTS = (
    Plant("rows stay where they are", "relu2", "monolithic", _rows_stay),
    Plant("halves are not laid row by row", "silu", "monolithic", _halves_stay),
    Plant("gate stays first", "silu", "modular", _gate_first),
    Plant("padding is filled", "relu2", "monolithic", _padding_filled),
    Plant("scales are not interleaved", "relu2", "modular", _not_interleaved),
    Plant("gated formula", "relu2", "monolithic", _gated_formula),
    Plant("a1_gscale inverted", "relu2", "monolithic", _inverted("a1_gscale")),
    Plant("a2_gscale inverted", "relu2", "modular", _inverted("a2_gscale")),
    Plant("activation scales swizzled", "relu2", "monolithic", _swizzled),
    Plant("another routing method", "relu2", "monolithic", _another_method),
    Plant("experts shifted", "relu2", "modular", _experts_shifted),
    Plant("replay buffer of int32", "relu2", "monolithic", _replay_of_int32, replay=True),
)


@contextmanager
def planted(plant: Plant) -> Iterator[None]:
    from trtllm_b12x_fix.integrations.vllm_host import replaced

    with replaced(*plant.items()):
        yield


def judge(preparation: Any, plant: Plant, layer: Any, x: Any) -> list[list[str]]:
    from trtllm_b12x_fix.errors import B12xFixError
    from trtllm_b12x_fix.parity import kernel
    from trtllm_b12x_fix.parity.call import Path
    from trtllm_b12x_fix.parity.contract import Replay
    from trtllm_b12x_fix.parity.judge import Case, judge_call
    from trtllm_b12x_fix.parity.judge_weights import judge_weights
    from trtllm_b12x_fix.parity.result import NEAR
    from trtllm_b12x_fix.parity.run import Grid, make_router

    grid = Grid((), (), (), (TOKENS,), (), EXPERTS, TOP_K, 0)
    case = Case(layer, x, make_router(NEAR, grid, TOKENS), preparation.recovery)
    seen = []

    def launch(call: Any) -> Any:
        seen.append(call)
        try:
            return kernel.launch(call, preparation.recovery)
        except B12xFixError:  # a routing that cannot be emulated is judged, not run
            return x.new_zeros(TOKENS, call.hidden)

    with planted(plant):
        prepared = preparation.prepare(layer, Path(plant.path), TOP_K)
        prepared.run(x, case.router, Replay.GIVEN if plant.replay else Replay.ABSENT, launch)
    faults = (*judge_weights(seen[0], layer), *judge_call(seen[0], case))
    return [[fault.suspect.value, fault.detail] for fault in faults]


def index_functions() -> dict[str, bool]:
    import torch

    from trtllm_b12x_fix.parity import layout

    core = module(_CORE)
    same = {}
    for rows in (128, 384, 1920, 3712):
        for gated in (False, True):
            codes = torch.zeros(rows, 64, dtype=torch.uint8)
            theirs = core._maybe_get_cached_w3_w1_permute_indices(
                {}, codes, 128, is_gated_act_gemm=gated
            )
            ours = layout.row_index(rows, layout.contract(gated=gated))
            same[f"{rows}, gated {gated}"] = torch.equal(theirs, ours)
            scales = core._maybe_get_cached_w3_w1_permute_indices(
                {}, codes, 128, num_elts_per_sf=16, is_gated_act_gemm=gated
            )
            same[f"scales {rows}, gated {gated}"] = torch.equal(scales, ours)
    return same


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=File, required=True)
    parser.add_argument("--site", action="append", default=[])
    args = parser.parse_args()
    _add_sites(args.site)

    import torch

    torch.set_num_threads(1)
    from trtllm_b12x_fix.integrations.vllm_preparation import VllmPreparation
    from trtllm_b12x_fix.layer import Activation
    from trtllm_b12x_fix.parity import run
    from trtllm_b12x_fix.parity.call import Path
    from trtllm_b12x_fix.presets import generate
    from trtllm_b12x_fix.presets.shapes import NEMOTRON_3_NANO, LayerShape
    from trtllm_b12x_fix.report.parity_document import _preparation

    def source(activation: Activation, hidden: int, intermediate: int) -> Any:
        shape = LayerShape(hidden, intermediate, EXPERTS, TOP_K, activation)
        layer = generate.make_layer(NEMOTRON_3_NANO, shape, range(EXPERTS), 0)
        return layer, generate.tokens(shape, 0, TOKENS)

    preparation = VllmPreparation(torch.device("cpu"))
    # 64 needs no padding where gated, 80 does; 1024 is no padding of the hidden size, 1152 is.
    grid = run.Grid(
        tuple(Activation), (1024, 1152), (64, 80), (1, TOKENS), tuple(Path), EXPERTS, TOP_K, 0
    )
    sound = run.run(grid, source, preparation)
    layers = {activation.value: source(activation, HIDDEN, 64) for activation in Activation}
    found = {plant.name: judge(preparation, plant, *layers[plant.activation]) for plant in PLANTS}
    args.out.write_text(
        json.dumps(
            {
                "sound": _preparation(sound, ""),
                "verdict": sound.verdict.value,
                "planted": found,
                "index": index_functions(),
            }
        )
    )


if __name__ == "__main__":
    main()

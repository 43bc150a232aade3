"""What the repair costs while serving: memory per layer, operations and memory per decode call.

Nothing here is a clock: storages, addresses and operations are counted on FlashInfer's real
wrappers, whose kernels are left out, with the repair and without. This file is also the program
that each wheel's process runs.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests import warm
from tests.benchmarks.bench_trtllm_repair import StorageMeter
from tests.layers import make_inputs, make_layer
from tests.trtllm.layers import to_checkpoint
from tests.trtllm.stand_in import Era, write_stand_in
from tests.trtllm.test_stand_in import VERSIONS, make_job
from trtllm_b12x_fix.layer import Activation, MoELayer

RELU2, SILU = Activation.RELU2, Activation.SILU
EXPERTS, HIDDEN, TOP_K = 32, 256, 20
#: With 20 routes: direct micro or micro, micro, static, dynamic.
TOKENS = (1, 2, 8, 63)
CALLS = 3
SHAPES = [(RELU2, 256), (SILU, 256), (RELU2, 384), (SILU, 192), (RELU2, 128)]
PARAMETERS = ("w3_w1_weight_scale", "w2_weight_scale", "w3_w1_weight", "w2_weight")
_SCALE_ARGUMENTS = ("sfb_w13_ptr", "sfb_down_ptr", "w1_blockscale", "w2_blockscale")
_WEIGHT_ARGUMENTS = ("b_w13", "b_down", "w1_fp4", "w2_fp4")
SIDES = ("baked", "repaired")
pytestmark = pytest.mark.slow


# ---- in the process of one wheel


def made(kind: Activation = RELU2, size: int = 256, experts: int = EXPERTS, **more) -> MoELayer:
    return make_layer(kind, experts=experts, hidden=HIDDEN, intermediate=size, **more)


class Process:
    """Layers of one wheel and the launches that a call ends in."""

    def __init__(self, version: str, folder: Path) -> None:
        from tests.flashinfer import harness
        from tests.trtllm.worker import Runner, default_to_cpu

        write_stand_in(folder, Era.MOE_TRANSFORM)
        ns = harness.load(version)
        default_to_cpu(ns.B12xMoEWrapper)
        self.kept: list[Any] = []
        self.launches: list[harness.Launch] = []
        harness.install_raw(ns, self.launches.append)
        self.runner = Runner(Era.MOE_TRANSFORM.value, [])

    def layer(self, layer: MoELayer) -> Any:
        """The layer in the stand-in, prepared by whatever hook is installed now."""
        module = self.runner.build(make_job(layer, top_k=TOP_K))
        module.post_load_weights()
        return module

    def call(self, module: Any, layer: MoELayer, tokens: int, **other: Any) -> dict[str, Any]:
        """One decode step."""
        x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K, seed=tokens)
        ids = routing.expert_ids.int()
        arguments = module._b12x_weights | other
        self.launches.clear()
        with StorageMeter() as meter:
            module.b12x_wrapper.run(
                x=x, token_selected_experts=ids, token_final_scales=routing.weights, **arguments
            )
        (launch,) = self.launches
        return {
            "family": launch.family,
            "operations": dict(meter.operations),
            "made": meter.made,
            "scales": _addresses(launch.args, _SCALE_ARGUMENTS),
            "weights": _addresses(launch.args, _WEIGHT_ARGUMENTS),
            "begins": meter.begins,
        }

    def survey(self) -> dict[tuple[str, int], dict[str, Any]]:
        """Every shape, token count and repetition with the hook that is installed now."""
        found = {}
        for activation, intermediate in SHAPES:
            layer = made(activation, intermediate)
            module = self.layer(layer)
            self.kept.append(module)  # a freed layer's addresses would be given out again
            if module.b12x_wrapper is None:
                continue
            with torch.inference_mode():
                calls = {
                    tokens: [self.call(module, layer, tokens) for _ in range(CALLS)]
                    for tokens in TOKENS
                }
            own = [getattr(module, name) for name in PARAMETERS]
            found[activation.value, intermediate] = {
                "calls": calls,
                "own": [tensor.data_ptr() for tensor in own],
                "scale bytes": [tensor.numel() * 4 for tensor in own[:2]],
            }
        return found

    def fold(self) -> dict[str, Any]:
        """Which tensor the wrapper keeps as its folded alpha, over calls and a reload."""
        found: dict[str, Any] = {}
        # Workspaces made in inference mode cannot be written outside it: the order matters.
        for experts, modes in ((22, (False, True, False, True)), (23, (True, True, True))):
            for loading in (False, True):
                layer = made(experts=experts)
                with torch.inference_mode(loading):
                    module = self.layer(layer)
                folds = [self._folded(module, layer, mode) for mode in modes]
                found[f"{modes} {loading}"] = len({id(one) for one in folds})
        entries = module._b12x_weights
        before = folds[0]
        entries["w1_alpha"].mul_(2)
        changed = self._folded(module, layer, True)
        found["changed in place"] = bool(changed is not before and (changed == 2 * before).all())
        other = made(experts=23, sigma=0.1)
        with torch.inference_mode():
            module.pre_reload_weights()
            module.load_weights([to_checkpoint(other)])
            module.post_load_weights()
        after, entries = self._folded(module, other, True), module._b12x_weights
        product = entries["w1_alpha"] * entries["input_global_scale"]
        found["reloaded"] = torch.equal(after, product) and not torch.equal(after, before)
        return found

    def _folded(self, module: Any, layer: MoELayer, inference: bool) -> torch.Tensor:
        with torch.inference_mode(inference):
            self.call(module, layer, 8)
        return module.b12x_wrapper._folded_w1_alpha

    def inference_tensors(self) -> dict[str, Any]:
        """What the same call costs with scales that were made in inference mode."""
        layer = made()
        module = self.layer(layer)
        with torch.inference_mode():
            names = ("w1_alpha", "input_global_scale")
            scales = {name: module._b12x_weights[name].clone() for name in names}
            try:
                return [self.call(module, layer, 8, **scales) for _ in range(CALLS)][-1]
            except RuntimeError as error:
                return {"error": str(error)}


def _addresses(arguments: dict[str, Any], names: tuple[str, ...]) -> list[int]:
    values = [arguments[name] for name in names if name in arguments]
    return [value if isinstance(value, int) else value.data_ptr() for value in values]


def main(argv: list[str]) -> None:
    version, folder = argv[0], Path(argv[1])
    from tests.trtllm.fixed import install
    from tests.trtllm.worker import installed

    process = Process(version, folder / "stand-in")
    found: dict[str, Any] = {}
    with installed(str(folder / "stand-in"), []):
        found["baked"] = process.survey()
        os.environ["TRTLLM_B12X_FIX"] = "auto"
        install()
        found["repaired"] = process.survey()
        if version != "0.6.16":
            found["fold"] = process.fold()
            found["inference tensors"] = process.inference_tensors()
    torch.save(found, folder / "found.pt")


# ---- tests


@pytest.fixture(scope="module", params=VERSIONS)
def survey(request, oracle_dir, tmp_path_factory) -> tuple[str, dict[str, Any]]:
    version = request.param
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    folder = tmp_path_factory.mktemp(f"costs-{version}")
    (folder / "stand-in").mkdir()
    environ = os.environ | {
        "TRTLLM_B12X_FIX": "off",  # the start-up file of an installed package waits, too
        "TRTLLM_B12X_FIX_ON_UNKNOWN": "cutlass",
        "TRTLLM_B12X_FIX_VERIFY": "off",
        "TRTLLM_B12X_FIX_LEDGER": str(folder / "ledger"),
        "OMP_NUM_THREADS": "1",
    }
    done = warm.run(version, "tests.trtllm.test_costs", [version, str(folder)], environ)
    assert done.returncode == 0, done.stderr[-4000:]
    return version, torch.load(folder / "found.pt", weights_only=True)


def shapes_of(version: str) -> list[tuple[str, int]]:
    """What b12x serves once repaired: gated layers need input_global_scale."""
    return [
        (activation.value, size)
        for activation, size in SHAPES
        if version != "0.6.16" or activation is RELU2
    ]


def copies(record: dict[str, Any], what: str) -> dict[int, int]:
    """Bytes by address of what kernels got that the layer's parameters do not hold."""
    calls = [call for some in record["calls"].values() for call in some]
    begins = {at: size for call in calls for at, size in call["begins"].items()}
    used = {at for call in calls for at in call[what]} - set(record["own"])
    return {at: begins.get(at, 0) for at in used}


def test_the_calls_reach_every_family(survey):
    version, found = survey
    for side in SIDES:
        calls = [record["calls"] for record in found[side].values()]
        families = {some[0]["family"] for one in calls for some in one.values()}
        assert families >= {"micro", "static", "dynamic"}
        direct = version in ("0.7.2", "0.7.4") or (version == "0.6.18" and side == "baked")
        assert ("direct-micro" in families) == direct, (side, families)


def test_whole_pairs_of_tiles_have_no_second_copy(survey):
    """I % 256 == 0: all families of all wheels read the parameters' own bytes."""
    version, found = survey
    for shape in shapes_of(version):
        if shape[1] % 256:
            continue
        record = found["repaired"][shape]
        assert not copies(record, "scales"), shape
        assert not copies(record, "weights"), shape
        # The baked side, whose scales are copies of upstream's making, is a control.
        assert len(copies(found["baked"][shape], "scales")) == 2, shape


#: Multiples of the parameters that FlashInfer keeps beside them: (scales, weights).
COPIES = {
    ("relu2", 384): {"0.7.2": (4 / 3, 4 / 3)},
    ("silu", 192): {"0.6.18": (4 / 3, 4 / 3), "0.7.2": (4 / 3, 4 / 3), "0.7.4": (4 / 3, 4 / 3)},
    ("relu2", 128): {"0.7.2": (2, 2), "0.7.4": (2, 2)},
}


@pytest.mark.parametrize("shape", COPIES, ids=str)
def test_where_flashinfer_pads_it_keeps_a_copy_of_its_own(survey, shape):
    """Not the repair's doing: the baked side has a copy of the same size."""
    version, found = survey
    if shape not in shapes_of(version):
        return
    record, baked = found["repaired"][shape], found["baked"][shape]
    scale_bytes = sum(record["scale bytes"])
    scales, weights = (
        sum(copies(record, what).values()) / size
        for what, size in (("scales", scale_bytes), ("weights", scale_bytes * 8))
    )
    print(f"{version} {shape}: copies of {scales:.2f}x the scales, {weights:.2f}x the weights")
    assert (scales, weights) == pytest.approx(COPIES[shape].get(version, (0, 0)), rel=0.01)
    assert sum(copies(baked, "weights").values()) == sum(copies(record, "weights").values())


def test_a_decode_call_costs_at_most_one_small_copy_more(survey):
    version, found = survey
    for shape in shapes_of(version):
        for tokens in TOKENS:
            pair = [found[side][shape]["calls"][tokens] for side in SIDES]
            for baked, repaired in list(zip(*pair, strict=True))[1:]:
                more = Counter(repaired["operations"])
                if baked["family"] != repaired["family"]:
                    continue  # direct micro is kept out of 0.6.18: another family's own work
                more.subtract(baked["operations"])
                more = {name: count for name, count in more.items() if count}
                # 4 * E bytes: the scalar input_global_scale. 0.6.16's fc2_input_scale is [E]
                # already, which spares the copy that a scalar costs.
                expected = -1 if version == "0.6.16" else 1
                assert more == {"aten.contiguous.default": expected}, (shape, tokens)
                assert sum(repaired["made"]) - sum(baked["made"]) == expected * EXPERTS * 4


def test_no_decode_call_makes_a_tensor_of_the_scales_size(survey):
    version, found = survey
    for shape in shapes_of(version):
        record = found["repaired"][shape]
        for calls in record["calls"].values():
            for call in calls[1:]:
                assert max(call["made"]) < min(record["scale bytes"]) / 2, shape


def test_the_fold_is_made_once_and_renewed_with_the_weights(survey):
    version, found = survey
    if version != "0.6.16":  # which has nothing to fold
        fold = found["fold"]
        assert fold.pop("changed in place")
        assert fold.pop("reloaded")
        assert list(fold.values()) == [1, 1, 1, 1]


def test_inference_tensors_would_cost_a_multiplication_or_the_call(survey):
    """The control for the two tests above: what ordinary tensors spare."""
    version, found = survey
    if version == "0.6.16":
        return
    seen = found["inference tensors"]
    if version != "0.7.4":
        assert "version counter" in seen["error"]
        return
    usual = Counter(found["repaired"]["relu2", 256]["calls"][8][-1]["operations"])
    assert Counter(seen["operations"]) - usual == {"aten.mul.out": 1}


if __name__ == "__main__":
    main(sys.argv[1:])

"""Routed rows times packed experts: every backend against numpy in fp64, and against each other."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests import oracle
from tests.layers import make_inputs, make_layer
from trtllm_b12x_fix.emulator import grouped, moe, packed_numba, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED, KernelFamily
from trtllm_b12x_fix.emulator.contract import Shape, contract_for
from trtllm_b12x_fix.emulator.grouped import MatmulBackend, forced, grouped_matmul
from trtllm_b12x_fix.errors import InputError, MissingDependencyError, ShapeError
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.layer_check import run as layer_check_run
from trtllm_b12x_fix.layer_check.embedded import load_inputs
from trtllm_b12x_fix.metrics import distance

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
BACKENDS = (MatmulBackend.TORCH, MatmulBackend.NUMBA)
# (experts, weight rows, columns, routed rows of each expert, ranges of columns)
SHAPES = [
    (1, 1, 16, (1,), ((0, 16),)),
    (3, 7, 48, (0, 4, 1), ((0, 16), (16, 48))),
    (5, 33, 80, (3, 0, 9, 1, 5), ((0, 80),)),
    (4, 130, 272, (2, 2, 0, 17), ((0, 128), (128, 256), (256, 272))),
    (2, 19, 32, (0, 6), ((16, 32),)),
]


@pytest.fixture(params=BACKENDS, ids=lambda backend: backend.value)
def backend(request):
    with forced(request.param):
        yield request.param


@pytest.fixture
def threads():
    """Restores torch's thread count."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def make(shape, dtype=torch.float32, scale_bytes=(1, 0x7F), seed=0):
    """Arguments of grouped_matmul: random codes, and rows that several routes share."""
    experts, height, width, counts, ranges = shape
    generator = torch.Generator().manual_seed(seed)
    routes = sum(counts)
    operand = torch.randint(-12, 13, (routes + 2, width), generator=generator).to(dtype) / 8
    return (
        operand,
        torch.randint(0, routes + 2, (routes,), generator=generator),
        torch.randint(
            0, 256, (experts, height, width // 2), dtype=torch.uint8, generator=generator
        ),
        torch.randint(
            *scale_bytes, (experts, height, width // 16), dtype=torch.uint8, generator=generator
        ),
        list(enumerate(torch.randperm(routes, generator=generator).split(list(counts)))),
        [slice(*part) for part in ranges],
    )


def weights(packed, scales):
    """fp64 by ml-dtypes, nothing of the package."""
    codes = np.stack([packed.numpy() & 15, packed.numpy() >> 4], -1)
    codes = codes.reshape(*packed.shape[:-1], -1)
    values = oracle.e2m1_values(codes).astype(np.float64)
    return values * oracle.e4m3_values(scales.numpy()).astype(np.float64).repeat(16, -1)


def expected(operand, rows, packed, scales, groups, columns):
    w = weights(packed, scales)
    out = np.full((len(rows), len(columns), packed.shape[1]), np.inf)
    for expert, routes in groups:
        for route in routes.tolist():
            row = operand[rows[route]].double().numpy()
            for number, part in enumerate(columns):
                out[route, number] = w[expert][:, part] @ row[part]
    return torch.from_numpy(out)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_every_scale_byte_times_every_code_byte(backend, dtype):
    """Row s holds scale byte s and all 256 code bytes; unit rows read the weights back."""
    packed = torch.arange(256, dtype=torch.uint8).expand(1, 256, 256).contiguous()
    scales = torch.arange(256, dtype=torch.uint8).view(1, 256, 1).expand(1, 256, 32).contiguous()
    every = torch.arange(512)
    out = grouped_matmul(
        torch.eye(512, dtype=dtype), every, packed, scales, [(0, every)], [slice(0, 512)]
    )
    wanted = weights(packed, scales)[0]
    assert np.isnan(wanted).sum() == 2 * 512  # the two NaN bytes, and nothing else
    np.testing.assert_array_equal(out[:, 0].t().double().numpy(), wanted)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_products_are_the_plain_formula(backend, dtype, shape):
    arguments = make(shape, dtype)
    out = grouped_matmul(*arguments)
    assert out.dtype is dtype
    assert distance(out, expected(*arguments)).relative_rms < (
        1e-6 if dtype is torch.float32 else 1e-14
    )


def test_a_nan_scale_reaches_its_own_outputs_and_no_other(backend):
    operand, rows, packed, scales, groups, columns = make(SHAPES[3])
    packed[3] &= 0x88  # zero codes: NaN times zero is NaN
    scales[3, 5, 9], scales[3, 6, 0] = 0x7F, 0xFF
    out = grouped_matmul(operand, rows, packed, scales, groups, columns)
    bad = torch.zeros_like(out, dtype=torch.bool)
    bad[groups[3][1], 1, 5] = bad[groups[3][1], 0, 6] = True
    assert torch.equal(out.isnan(), bad)
    assert int(bad.sum()) == 2 * 17


def test_a_nan_row_reaches_its_own_outputs_and_no_other(backend):
    operand, _, packed, scales, groups, columns = make(SHAPES[3])
    rows = torch.arange(21)
    operand[7, 200] = torch.nan
    out = grouped_matmul(operand, rows, packed, scales, groups, columns)
    assert out[7, 1].isnan().all()
    assert int(out.isnan().sum()) == out.shape[2]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_thread_counts_change_no_bit(threads, count):
    arguments = make(SHAPES[3])
    with forced(MatmulBackend.NUMBA):
        torch.set_num_threads(1)
        one = grouped_matmul(*arguments)
        torch.set_num_threads(count)
        assert torch.equal(grouped_matmul(*arguments), one)


@pytest.mark.parametrize("counts", [[], [0], [1], [0, 1, 64, 3], [1] * 500, [700, 1]])
@pytest.mark.parametrize("height", [1, 5, 2688])
def test_tasks_hold_every_weight_row_once(counts, height):
    tasks = packed_numba._tasks(counts, height, threads=2)
    seen = np.zeros((len(counts), height), int)
    for group, first, last in tasks:
        seen[group, first:last] += 1
    assert (seen == (np.array(counts, int) > 0)[:, None]).all()


def test_tasks_are_of_about_equal_cost():
    counts = [64, *[1] * 20, 7]
    tasks = packed_numba._tasks(counts, 2688, threads=2)
    costs = [(4 + counts[group]) * (last - first) for group, first, last in tasks]
    assert max(costs) < sum(costs) / 20  # a thread waits for the other a tenth of the time at most


def test_what_is_not_contiguous_is_read_right(backend):
    operand, rows, packed, scales, groups, columns = arguments = make(SHAPES[2])
    strided = (
        operand.t().contiguous().t(),
        rows,
        packed.repeat(1, 1, 2)[:, :, : packed.shape[2]],
        scales.transpose(0, 1).contiguous().transpose(0, 1),
        groups,
        columns,
    )
    assert torch.equal(grouped_matmul(*strided), grouped_matmul(*arguments))


def test_scales_may_come_as_float8(backend):
    arguments = list(make(SHAPES[2]))
    wanted = grouped_matmul(*arguments)
    arguments[3] = arguments[3].view(torch.float8_e4m3fn)
    assert torch.equal(grouped_matmul(*arguments), wanted)


def test_no_work_is_no_output(backend):
    operand, rows, packed, scales, _, columns = make(SHAPES[2])
    out = grouped_matmul(operand, rows[:0], packed, scales, [], columns)
    assert out.shape == (0, 1, 33)


def _launches():
    for activation in Activation:
        layer = make_layer(activation, experts=5, hidden=128, intermediate=384)
        x, routing = make_inputs(layer, tokens=9, top_k=3)
        scales = layer.fc1.input_scale, layer.fc2.input_scale
        yield layer, reference.exact_launch(layer, *scales), x, routing
        shared = layer.fc1.input_scale.max(), layer.fc2.input_scale.max()
        yield layer, reference.exact_launch(layer, *shared), x, routing
    for subject in load_inputs():
        layer, (x, routing) = subject.layer, subject.head(17)
        scales = layer.fc1.largest_input_scale, layer.fc2.largest_input_scale
        yield layer, reference.exact_launch(layer, *scales), x, routing


def _arithmetics(layer, routing):
    tokens, top_k = routing.expert_ids.shape
    shape = Shape(tokens, top_k, layer.hidden, layer.intermediate, layer.experts, layer.activation)
    yield PUBLISHED
    for version in ("0.6.16", "0.6.18", "0.7.2"):
        for family in (KernelFamily.STATIC, KernelFamily.DYNAMIC):
            yield contract_for(version).arithmetic(family, shape)


def test_backends_give_the_same_codes_on_layers():
    compared = 0
    for layer, launch, x, routing in _launches():
        for arithmetic in _arithmetics(layer, routing):
            traces = []
            for backend in BACKENDS:
                with forced(backend):
                    traces.append(moe.run(launch, x, routing, arithmetic, 0))
            one, other = traces
            for ours, theirs in (
                (one.input, other.input),
                (one.intermediate_quantized, other.intermediate_quantized),
            ):
                assert torch.equal(ours.codes, theirs.codes)
                assert torch.equal(ours.block_scale, theirs.block_scale)
                compared += ours.codes.numel()
            assert distance(one.fc1, other.fc1).relative_rms < 1e-6
            assert distance(one.fc2, other.fc2).relative_rms < 1e-6
    assert compared > 500_000


def test_backends_give_the_same_truth():
    for layer, _, x, routing in _launches():
        results, largest = [], []
        for backend in BACKENDS:
            with forced(backend):
                results.append(reference.truth(layer, x, routing))
                largest.append(reference.intermediate_amax(layer, x, routing))
        assert distance(*results).relative_rms < 1e-13
        assert largest[0] == pytest.approx(largest[1], rel=1e-12)


def _without(arguments, place, value):
    return [*arguments[:place], value, *arguments[place + 1 :]]


@pytest.mark.parametrize(
    ("place", "change", "error", "word"),
    [
        (0, lambda t: t[:, :64], ShapeError, "belong together"),
        (0, lambda t: t[0], ShapeError, "belong together"),
        (2, lambda t: t[:, :, :8], ShapeError, "belong together"),
        (3, lambda t: t[:, :1], ShapeError, "belong together"),
        (5, lambda c: [slice(0, 24)], ShapeError, "whole blocks"),
        (5, lambda c: [slice(0, 96)], ShapeError, "whole blocks"),
        (5, lambda c: [slice(-16, 16)], ShapeError, "whole blocks"),
        (1, lambda t: t + 20, InputError, "row is not"),
        (1, lambda t: t - 20, InputError, "row is not"),
        (4, lambda g: [(5, g[0][1]), *g[1:]], InputError, "expert is not"),
        (4, lambda g: [(-1, g[0][1]), *g[1:]], InputError, "expert is not"),
        (4, lambda g: g[1:], InputError, "18 routes once"),
        (4, lambda g: [*g, g[0]], InputError, "18 routes once"),
    ],
)
def test_wrong_arguments_are_named(backend, place, change, error, word):
    arguments = make(SHAPES[2])
    with pytest.raises(error, match=word):
        grouped_matmul(*_without(arguments, place, change(arguments[place])))


class TestChoice:
    def test_size_alone_decides(self):
        small, large = grouped.NUMBA_FROM_WEIGHTS - 1, grouped.NUMBA_FROM_WEIGHTS
        assert grouped.backend_for(CPU, torch.float32, small) is MatmulBackend.TORCH
        assert grouped.backend_for(CPU, torch.float32, large) is MatmulBackend.NUMBA
        assert grouped.backend_for(CPU, torch.float64, large) is MatmulBackend.NUMBA
        assert grouped.backend_for(CPU, torch.bfloat16, large) is MatmulBackend.TORCH
        assert grouped.backend_for(torch.device("cuda"), torch.bfloat16, 1) is MatmulBackend.CUDA

    def test_forcing_ends_with_its_block(self):
        with forced(MatmulBackend.TORCH):
            assert grouped.backend_for(CPU, torch.float32, 2**40) is MatmulBackend.TORCH
            with forced(None):
                assert grouped.backend_for(CPU, torch.float32, 2**40) is MatmulBackend.NUMBA
        assert grouped.backend_for(CPU, torch.float32, 2**40) is MatmulBackend.NUMBA

    def test_large_products_really_take_numba(self, monkeypatch):
        seen = []

        def spy(*arguments):
            seen.append(arguments)
            return torch.zeros(18, 1, 33)

        monkeypatch.setattr(packed_numba, "grouped", spy)
        grouped_matmul(*make(SHAPES[2]))
        assert seen == []
        monkeypatch.setattr(grouped, "NUMBA_FROM_WEIGHTS", 5 * 33 * 80)
        grouped_matmul(*make(SHAPES[2]))
        assert len(seen) == 1

    def test_the_name_says_what_multiplies(self):
        assert grouped.describe(CPU) == f"numba {packed_numba.VERSION}"
        assert grouped.describe(CPU, 1) == "torch"
        with forced(MatmulBackend.TORCH):
            assert grouped.describe(CPU) == "torch"

    def test_without_numba_torch_multiplies_and_says_so(self, monkeypatch):
        wanted = grouped_matmul(*make(SHAPES[2]))
        monkeypatch.setattr(grouped, "_numba_module", lambda: None)
        monkeypatch.setattr(grouped, "NUMBA_FROM_WEIGHTS", 0)
        assert grouped.describe(CPU) == "torch"
        assert torch.equal(grouped_matmul(*make(SHAPES[2])), wanted)
        with forced(MatmulBackend.NUMBA), pytest.raises(MissingDependencyError, match="numba"):
            grouped_matmul(*make(SHAPES[2]))

    def test_a_gpu_backend_is_refused_on_a_cpu(self):
        with forced(MatmulBackend.CUDA), pytest.raises(InputError, match="cuda"):
            grouped_matmul(*make(SHAPES[2]))

    @pytest.mark.parametrize("numba", ["None", "Broken()"])
    def test_a_numba_that_does_not_import_is_no_numba(self, numba):
        code = f"""
import sys
class Broken:
    def __getattr__(self, name):
        raise OSError("cannot load libllvmlite.so")
import torch
sys.modules["numba"] = {numba}
from trtllm_b12x_fix.emulator import grouped
print(grouped.describe(torch.device("cpu")))
"""
        assert _python(code) == "torch"

    def test_small_products_do_not_import_numba(self):
        code = """
import sys
from tests.unit.test_moe import setup
from trtllm_b12x_fix.emulator import moe, reference
from trtllm_b12x_fix.emulator.arithmetic import PUBLISHED
layer, launch, x, routing = setup()
moe.run(launch, x, routing, PUBLISHED)
reference.truth(layer, x, routing)
print("numba" in sys.modules)
"""
        assert _python(code) == "False"


def _python(code):
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("error", [RuntimeError("no locator available"), OSError("disk full")])
def test_a_cache_that_cannot_be_written_is_done_without(monkeypatch, error):
    real, tried = packed_numba.numba.njit, []

    def njit(**options):
        tried.append(options.get("cache", False))
        if tried[-1]:
            raise error
        return real(**options)

    arguments = make(SHAPES[1])
    monkeypatch.setattr(packed_numba.numba, "njit", njit)
    packed_numba._kernel.cache_clear()
    try:
        with forced(MatmulBackend.NUMBA):
            out = grouped_matmul(*arguments)
    finally:
        packed_numba._kernel.cache_clear()
    assert tried == [True, False]
    assert distance(out, expected(*arguments)).relative_rms < 1e-6


def test_launches_are_the_same_only_bit_for_bit():
    """What lets a layer check compute a launch once must tell apart all that differ."""
    layer = make_layer(Activation.RELU2, experts=3, hidden=128, intermediate=128)
    s1, s2 = layer.fc1.input_scale, layer.fc2.input_scale
    launch = reference.exact_launch(layer, s1, s2)
    identity = layer_check_run._identity(launch)
    assert identity == layer_check_run._identity(reference.exact_launch(layer, s1, s2))
    tensors = [name for name, value in vars(launch).items() if torch.is_tensor(value)]
    assert len(tensors) == 8
    for name in tensors:
        changed = getattr(launch, name).clone()
        if changed.dtype is not torch.uint8:
            changed[1] = torch.nextafter(changed[1], changed[2] * 2)
        assert identity != layer_check_run._identity(replace(launch, **{name: changed})), name
    assert identity != layer_check_run._identity(replace(launch, activation=Activation.SILU))
    shared, spread = s1.max(), s1.max().expand(3)
    one, other = (
        layer_check_run._identity(replace(launch, input_global_scale=scale))
        for scale in (shared, spread)
    )
    assert one != other

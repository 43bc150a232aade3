"""The contract table against real dispatch runs.

tests/flashinfer/bands.json holds what the dispatch of each FlashInfer wheel launched, run on a CPU
down to the kernel getters (tests/flashinfer/bands.py); nothing in it was derived from thresholds.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily, OutputSum, QuantMath
from trtllm_b12x_fix.emulator.contract import (
    KNOWN_VERSIONS,
    ContractOrigin,
    DirectMicro,
    InputQuantization,
    InputScaleArgument,
    KernelContract,
    Shape,
    contract_for,
)
from trtllm_b12x_fix.errors import InputError, UnsupportedVersionError
from trtllm_b12x_fix.layer import Activation

BANDS = json.loads((Path(__file__).parents[1] / "flashinfer" / "bands.json").read_text())
CAPACITY = {"eager": None, "graph8192": 8192}


def cases():
    for version, entries in BANDS.items():
        for entry in entries:
            for mode in entry["modes"]:
                yield pytest.param(
                    version,
                    entry,
                    mode,
                    id=f"{version}-E{entry['experts']}-top{entry['top_k']}-I{entry['intermediate']}"
                    f"-{entry['activation']}-{mode}-{'+'.join(entry['devices'])}",
                )


def shape_of(entry, mode, tokens) -> Shape:
    return Shape(
        tokens=tokens,
        top_k=entry["top_k"],
        hidden=entry["hidden"],
        intermediate=entry["intermediate"],
        experts=entry["experts"],
        activation=Activation(entry["activation"]),
        graph_capacity=CAPACITY[mode],
        # The survey passed one input scale where the version takes one.
        sharing=InputQuantization.SHARED,
    )


def seen(entry):
    """(tokens, band) for every token count that was really run."""
    for band in entry["bands"]:
        for tokens in range(band["first"], band["last"] + 1):
            yield tokens, band
    for band in entry["beyond"]:
        yield band["first"], band
        yield band["last"], band


def is_listed_exception(contract: KernelContract, shape: Shape, device: str, family: str) -> bool:
    """The per-shape exceptions that the 0.7.4 record names and does not model."""
    if contract.version != "0.7.4":
        return False
    silu320 = (shape.experts, shape.intermediate, shape.activation) == (512, 320, Activation.SILU)
    return (device == "sm120" and family == "direct-micro" and shape.routed_rows < 65) or (
        silu320 and shape.tokens == 4 and family == "direct-micro"
    )


@pytest.mark.parametrize(("version", "entry", "mode"), list(cases()))
def test_the_family_is_the_dispatchs(version, entry, mode):
    contract = contract_for(version)
    exceptions = 0
    for tokens, band in seen(entry):
        shape = shape_of(entry, mode, tokens)
        chosen = contract.select(shape).value
        if chosen != band["family"]:
            listed = [
                is_listed_exception(contract, shape, device, band["family"])
                for device in entry["devices"]
            ]
            assert all(listed), (tokens, chosen, band["family"])
            exceptions += 1
    assert exceptions == 0 or contract.exceptions


@pytest.mark.parametrize(("version", "entry", "mode"), list(cases()))
def test_the_dynamic_kernel_is_the_dispatchs(version, entry, mode):
    contract = contract_for(version)
    for tokens, band in seen(entry):
        if band["family"] == "dynamic":
            shape = shape_of(entry, mode, tokens)
            gated = band["kernel"].startswith("gated.")
            assert contract.retains_slices(shape) == gated, (tokens, band)


def test_the_guides_figures_for_the_reported_model():
    """Top-22, 512 experts: 1 token micro; static to 29 tokens on 0.6, 46 on 0.7.2, all on 0.7.4."""

    def last_static(version):
        families = [
            contract_for(version).select(Shape(t, 22, 1024, 2688, 512, Activation.RELU2))
            for t in range(1, 65)
        ]
        assert families[0] is KernelFamily.MICRO
        return sum(f is KernelFamily.STATIC for f in families) + 1

    assert [last_static(v) for v in ("0.6.16", "0.6.18", "0.7.2", "0.7.4")] == [29, 29, 46, 64]


@pytest.mark.parametrize(
    ("version", "row"),
    [
        ("0.6.16.post4", "0.6.16"),
        ("0.6.17", "0.6.17"),
        ("0.6.18.post1", "0.6.18"),
        ("0.7.0.post1", "0.7.0"),
        ("0.7.1", "0.7.0"),
        ("0.7.2.post1", "0.7.2"),
        ("0.7.4+cu130", "0.7.4"),
    ],
)
def test_post_releases_and_local_builds_have_their_versions_row(version, row):
    found, base = contract_for(version), contract_for(row)
    assert found.version == version
    for field in ("input_scale", "direct_micro", "static_band", "static_output", "quantizer"):
        assert getattr(found, field) == getattr(base, field)
    assert found.origin is ContractOrigin.DATA


@pytest.mark.parametrize("version", ["0.6.15", "0.6.19", "0.7.3", "0.7.5", "1.0", "0.6.16rc1"])
def test_a_version_nobody_read_is_refused_with_a_way_out(version):
    with pytest.raises(UnsupportedVersionError, match=rf"{version}.*--flashinfer"):
        contract_for(version)


@pytest.mark.parametrize("version", ["", "latest", "0.6.x"])
def test_no_version_at_all_is_input_that_cannot_be_used(version):
    with pytest.raises(InputError, match="version"):
        contract_for(version)


def test_what_each_version_has():
    table = {v: contract_for(v) for v in KNOWN_VERSIONS}
    assert [v for v, c in table.items() if c.input_scale is InputScaleArgument.IS_W1_ALPHA] == [
        "0.6.16"
    ]
    assert [v for v, c in table.items() if c.direct_micro is DirectMicro.MULTIPLIES] == [
        "0.6.17",
        "0.6.18",
        "0.7.0",
    ]


@pytest.mark.parametrize("version", KNOWN_VERSIONS)
def test_quantizers_by_activation(version):
    for activation in Activation:
        shape = Shape(8, 4, 256, 256, 8, activation)
        for family in (KernelFamily.MICRO, KernelFamily.STATIC, KernelFamily.DYNAMIC):
            math = contract_for(version).arithmetic(family, shape).quant_math
            precise = activation is Activation.RELU2 and version != "0.6.16"
            assert math is (QuantMath.PRECISE if precise else QuantMath.FAST)


def test_output_sums_by_family():
    shape = Shape(8, 4, 256, 256, 8, Activation.RELU2)
    for version in KNOWN_VERSIONS:
        contract = contract_for(version)
        sums = {f: contract.arithmetic(f, shape).output_sum for f in list(KernelFamily)[1:]}
        assert sums[KernelFamily.MICRO] is sums[KernelFamily.DYNAMIC] is OutputSum.BF16_ATOMICS
        from_0_7 = version >= "0.7"
        expected = OutputSum.FP32_SLOTS if from_0_7 else OutputSum.BF16_ATOMICS
        assert sums[KernelFamily.STATIC] is expected
    with pytest.raises(InputError, match="never launches"):
        contract_for("0.6.16").arithmetic(KernelFamily.DIRECT_MICRO, shape)


def test_families_can_be_kept_out():
    shape = Shape(1, 6, 640, 256, 6, Activation.SILU)
    contract = contract_for("0.6.18")
    assert contract.select(shape) is KernelFamily.DIRECT_MICRO
    kept_out = contract.without(KernelFamily.DIRECT_MICRO)
    assert kept_out.select(shape) is KernelFamily.MICRO
    assert contract.select(shape) is KernelFamily.DIRECT_MICRO  # the original is untouched

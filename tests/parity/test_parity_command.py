"""`parity` as a command: exit codes, what is said where a half did not run, the JSON."""

from __future__ import annotations

import json
import sys

import pytest

from tests.parity import faults, stand_in
from tests.parity.stand_in import KernelFault
from trtllm_b12x_fix import cli
from trtllm_b12x_fix.commands import parity
from trtllm_b12x_fix.errors import InputError
from trtllm_b12x_fix.integrations import trtllm_gen, trtllm_gen_availability, vllm_preparation

SMALL = [
    "parity",
    "--hidden",
    "192",
    "--intermediate",
    "80",
    "--tokens",
    "9",
    "--experts",
    "4",
    "--top-k",
    "2",
    "--quiet",
]


@pytest.fixture
def vllm(monkeypatch):
    """Set what vLLM's preparation does; the layers are the small shared ones."""
    monkeypatch.setattr(parity, "_source", lambda grid, shape: stand_in.source(*shape))

    def use(preparation):
        def make(device):
            if isinstance(preparation, Exception):
                raise preparation
            return preparation

        monkeypatch.setattr(vllm_preparation, "VllmPreparation", make)

    use(stand_in.Preparation())
    return use


@pytest.fixture
def blackwell(monkeypatch):
    """A GPU of capability 10.0, as far as the command can see; its kernels are stand-ins."""

    def use(fault=KernelFault.NONE):
        monkeypatch.setattr(trtllm_gen_availability, "why_not", lambda: "")
        monkeypatch.setattr(trtllm_gen, "TrtllmGenKernels", lambda device: stand_in.kernels(fault))

    return use


def document(capsys, *options):
    code = cli.main([*SMALL, "--json", "-", *options])
    return code, json.loads(capsys.readouterr().out)


def test_a_good_preparation_ends_with_0_and_says_that_kernels_did_not_run(vllm, capsys):
    assert cli.main(SMALL) == 0
    text = capsys.readouterr().out
    assert "VERDICT  good" in text
    assert "real kernels: not run: no CUDA GPU here" in text
    assert "EMULATED" in text
    assert "vllm serve MODEL --moe-backend flashinfer_cutlass" in text


def test_a_fault_ends_with_1_and_is_named(vllm, capsys):
    fault = next(one for one in faults.FAULTS if one.name == "rows not shuffled")
    vllm(stand_in.Preparation(fault.plant))
    code, found = document(capsys)
    assert code == 1
    assert found["verdict"] == "finding"
    outcomes = {one["name"]: one["outcome"] for one in found["suspects"]}
    assert outcomes["row-shuffle"] == "FOUND"
    assert outcomes["kernel"] == "not run"
    assert outcomes["padding"] == "not found"
    assert {one["suspect"] for case in found["preparation"]["cases"] for one in case["faults"]} == {
        "row-shuffle"
    }


def test_the_json_is_fractions_and_says_what_stood_in(vllm, capsys):
    code, found = document(capsys)
    assert code == 0
    assert found["schema"] == "trtllm-b12x-fix/parity/1"
    assert found["preparation"]["stand_ins"] == ["all of it"]
    assert found["kernels"]["status"] == "not run"
    for case in found["preparation"]["cases"]:
        assert 0 <= case["fidelity"] < 0.01
        assert case["padded_hidden"] == 256


def test_without_vllm_it_ends_with_2_and_says_both_reasons(capsys):
    assert "vllm" not in sys.modules
    assert cli.main(SMALL) == 2
    words = capsys.readouterr().err
    assert "vllm" in words
    assert "--site" in words
    assert "no CUDA GPU here" in words


def test_kernels_that_were_insisted_on_and_cannot_run_end_with_2(vllm, capsys):
    assert cli.main([*SMALL, "--half", "kernels"]) == 2
    assert "capability 10.0 or 10.3" in capsys.readouterr().err


def test_right_kernels_end_with_0_and_vllm_s_arms_are_among_them(vllm, blackwell, capsys):
    blackwell()
    code, found = document(capsys)
    assert code == 0
    assert found["kernels"]["status"] == "ran"
    assert found["preparation"]["status"] == "not run"
    assert {one["arm"] for one in found["kernels"]["arms"]} >= {"cutlass", "vLLM monolithic"}


def test_a_wrong_kernel_ends_with_1_and_is_named(vllm, blackwell, capsys):
    blackwell(KernelFault.GATED_SCALARS)
    assert cli.main([*SMALL, "--activations", "relu2"]) == 1
    text = capsys.readouterr().out
    assert "VERDICT  FINDING" in text
    assert "scalars: real kernels: the kernel wants the gated formula" in text


def test_the_kernels_run_without_vllm(vllm, blackwell, capsys):
    blackwell()
    vllm(InputError("vllm cannot be imported"))
    code, found = document(capsys, "--activations", "relu2")
    assert code == 0
    assert found["kernels"]["vllm"] is None


def test_both_halves_on_request(vllm, blackwell, capsys):
    blackwell()
    code, found = document(capsys, "--half", "both", "--activations", "relu2")
    assert code == 0
    assert found["kernels"]["status"] == "ran"
    assert found["preparation"]["status"] == "emulated on the CPU"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--hidden", "100"], "--hidden"),
        (["--top-k", "9"], "--top-k"),
        (["--site", "/nowhere/at/all"], "no such folder"),
        (["--json", "/nowhere/at/all.json"], "cannot write"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_options_that_do_not_fit_end_with_2(vllm, capsys, options, words):
    assert cli.main([*SMALL, *options]) == 2
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--activations", "--paths"])
def test_names_that_are_not_known_are_refused(option, capsys):
    with pytest.raises(SystemExit) as exit_:
        cli.main([*SMALL, option, "gelu"])
    assert exit_.value.code == 2
    assert "write some of" in capsys.readouterr().err


def test_a_made_up_layer_has_the_sizes_of_the_grid():
    args = ["--hidden", "64", "--intermediate", "32", "--experts", "2", "--top-k", "1"]
    parser = cli.build_parser()
    grid = parity._grid(parser.parse_args(["parity", *args, "--tokens", "3"]))
    layer, x = parity._source(grid, next(grid.layers()))
    assert (layer.hidden, layer.intermediate, layer.experts) == (64, 32, 2)
    assert x.shape == (3, 64)

"""The contract read from FlashInfer's own files: four real wheels, and copies with planted changes.

A copy that differs from the wheel in anything the table of contracts relies on must be refused:
its kernels would be emulated, and its scales chosen, by the wrong rules.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from trtllm_b12x_fix import cli
from trtllm_b12x_fix.emulator.contract import ContractOrigin, contract_for
from trtllm_b12x_fix.errors import B12xFixError, UnsupportedVersionError
from trtllm_b12x_fix.integrations.flashinfer import (
    DISTRIBUTION,
    installed_contract,
    read_contract,
)

VERSIONS = ("0.6.16", "0.6.18", "0.7.2", "0.7.4")
SM12X = "fused_moe/cute_dsl/blackwell_sm12x"
WRAPPER = "fused_moe/cute_dsl/b12x_moe.py"
DISPATCH = f"{SM12X}/moe_dispatch.py"
STATIC = f"{SM12X}/moe_static_kernel.py"
DIRECT_MICRO = f"{SM12X}/moe_direct_micro_kernel.py"
GATED = f"{SM12X}/_moe_dynamic/gated.py"
FP4_COMMON = "cute_dsl/fp4_common.py"
FILES = (WRAPPER, DISPATCH, STATIC, DIRECT_MICRO, GATED, FP4_COMMON)

Wheel = Callable[[str], Path]


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    """Small products, often on a busy machine: a second thread costs more than it brings."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def wheel(oracle_dir) -> Wheel:
    """The real package folder of a version."""
    return lambda version: oracle_dir(f"flashinfer-{version}") / "flashinfer"


def copy(package: Path, target: Path) -> Path:
    """The files that matter, to be changed."""
    for name in FILES:
        if (package / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(package / name, target / name)
    return target


def edit(file: Path, pattern: str, replacement: str) -> None:
    """Change every match; a pattern without one would test nothing."""
    text, count = re.subn(
        pattern, replacement, file.read_text(encoding="utf-8"), flags=re.MULTILINE
    )
    assert count, f"{pattern} is not in {file.name}"
    file.write_text(text, encoding="utf-8")


@pytest.mark.parametrize("version", VERSIONS)
def test_a_wheel_has_the_contract_of_its_version(wheel, version):
    expected = replace(contract_for(version), origin=ContractOrigin.INSTALLED)
    assert read_contract(wheel(version), version) == expected


@pytest.mark.parametrize("version", VERSIONS)
def test_the_copied_files_are_all_that_is_read(wheel, tmp_path, version):
    read = read_contract(copy(wheel(version), tmp_path / "flashinfer"), version)
    assert read == read_contract(wheel(version), version)


def test_a_local_build_is_the_version_it_was_built_from(wheel):
    read = read_contract(wheel("0.6.18"), "0.6.18+cu130")
    expected = replace(contract_for("0.6.18"), origin=ContractOrigin.INSTALLED)
    assert read == replace(expected, version="0.6.18+cu130")


@pytest.mark.parametrize(
    ("files", "label"),
    [
        ("0.7.2", "0.6.18"),
        ("0.6.18", "0.7.2"),
        ("0.6.18", "0.6.16"),
        ("0.6.16", "0.6.18"),
        ("0.6.18", "0.6.17"),
        ("0.7.2", "0.7.1"),
        ("0.7.4", "0.7.2"),
        ("0.7.2", "0.7.4"),
    ],
)
def test_files_of_another_version_are_refused(wheel, files, label):
    with pytest.raises(UnsupportedVersionError, match=re.escape(f"FlashInfer {label}: ")) as error:
        read_contract(wheel(files), label)
    assert "--flashinfer" in str(error.value)


@pytest.mark.parametrize("version", ["0.6.15", "0.6.19", "0.7.3", "0.7.5", "1.0", "0.8.0rc1"])
def test_an_unknown_version_is_refused_before_its_files_are_read(tmp_path, version):
    with pytest.raises(UnsupportedVersionError) as error:
        read_contract(tmp_path / "absent", version)
    assert version in str(error.value)
    assert "--flashinfer" in str(error.value)


@pytest.mark.parametrize(
    ("version", "file", "pattern", "replacement", "symbol"),
    [
        ("0.6.18", WRAPPER, r"\binput_global_scale\b", "scale", "input_scale"),
        ("0.6.18", WRAPPER, r"class B12xMoEWrapper\b", "class Other", "B12xMoEWrapper.run"),
        ("0.6.16", WRAPPER, r"\bw1_alpha\b", "input_global_scale", "input_scale"),
        ("0.7.2", DIRECT_MICRO, r"^ +input_scales_are_reciprocal: bool.*\n", "", "direct_micro"),
        (
            "0.6.18",
            DIRECT_MICRO,
            r"class MoEDirectMicroKernel\b",
            "class Other",
            "MoEDirectMicroKernel.__init__",
        ),
        (
            "0.6.18",
            DISPATCH,
            r"^def launch_sm120_static_moe\b",
            "def other",
            "launch_sm120_static_moe",
        ),
        ("0.6.18", DISPATCH, r"\b_get_direct_micro_kernel\b", "_other", "direct_micro"),
        (
            "0.6.18",
            DISPATCH,
            r"^_STATIC_COMPACT_CUTOVER_PAIRS_DEFAULT = 640",
            "_STATIC_COMPACT_CUTOVER_PAIRS_DEFAULT = 512",
            "_STATIC_COMPACT_CUTOVER_PAIRS_DEFAULT",
        ),
        (
            "0.6.18",
            DISPATCH,
            r"^_MICRO_MAX_TOKENS = 8",
            "_MICRO_MAX_TOKENS = 4",
            "micro_max_tokens",
        ),
        ("0.6.18", DISPATCH, r"^_MICRO_MAX_TOKENS = 8", "", "micro_max_tokens"),
        ("0.6.18", STATIC, r"(self\.fast_math = .*) and self\.is_gated", r"\1", "quantizer"),
        ("0.6.18", STATIC, r"(self\.fast_math = .*and self)\.is_gated", r"\1.other", "quantizer"),
        ("0.6.16", FP4_COMMON, r"ex2\.approx", "ex2.exact", "quantizer"),
        ("0.6.16", FP4_COMMON, r"def fp8_e4m3_to_f32\b", "def other", "fp8_e4m3_to_f32"),
        ("0.7.2", STATIC, r"def finalize_kernel\b", "def other", "static_output"),
        (
            "0.7.2",
            DISPATCH,
            "_STATIC_COMPACT_CUTOVER_PAIRS_NVFP4_DEFAULT",
            "_OTHER",
            "static_band",
        ),
        ("0.7.4", DISPATCH, "_STATIC_COMPACT_CUTOVER_ROWS_PER_EXPERT", "_OTHER", "static_band"),
    ],
)
def test_a_planted_change_is_refused_by_name(
    wheel, tmp_path, version, file, pattern, replacement, symbol
):
    package = copy(wheel(version), tmp_path / "flashinfer")
    edit(package / file, pattern, replacement)
    with pytest.raises(UnsupportedVersionError, match=f"FlashInfer {version}: ") as error:
        read_contract(package, version)
    assert symbol in str(error.value)
    assert "--flashinfer" in str(error.value)


@pytest.mark.parametrize(
    ("version", "constant", "value"),
    [
        ("0.6.16", "_MICRO_COMPACT_CUTOVER_PAIRS", 20),
        ("0.6.16", "_MICRO_COMPACT_CUTOVER_PAIRS_MULTI_TOPK", 40),
        ("0.6.18", "_DIRECT_MICRO_CUTOVER_PAIRS", 32),
        ("0.6.18", "_DIRECT_MICRO_MAX_N", 512),
        ("0.7.2", "_STATIC_COMPACT_CUTOVER_PAIRS_NVFP4_DEFAULT", 1024),
        ("0.7.4", "_STATIC_COMPACT_CUTOVER_ROWS_PER_EXPERT", 8),
        ("0.7.4", "_STATIC_COMPACT_CUTOVER_ROWS_PER_EXPERT_PADDED", 16),
    ],
)
def test_a_figure_of_the_dispatch_that_selection_relies_on_is_checked(
    wheel, tmp_path, version, constant, value
):
    package = copy(wheel(version), tmp_path / "flashinfer")
    edit(package / DISPATCH, f"^{constant} = {value}$", f"{constant} = {2 * value}")
    with pytest.raises(UnsupportedVersionError, match=f"FlashInfer {version}: "):
        read_contract(package, version)


@pytest.mark.parametrize(
    ("version", "file", "symbol"),
    [
        ("0.6.18", DISPATCH, "moe_dispatch.py"),
        ("0.6.18", WRAPPER, "b12x_moe.py"),
        ("0.6.18", STATIC, "moe_static_kernel.py"),
        ("0.6.18", DIRECT_MICRO, "moe_direct_micro_kernel.py"),
        ("0.6.16", FP4_COMMON, "fp4_common.py"),
        ("0.6.18", GATED, "gated_dynamic"),
    ],
)
def test_a_removed_file_is_named(wheel, tmp_path, version, file, symbol):
    package = copy(wheel(version), tmp_path / "flashinfer")
    (package / file).unlink()
    with pytest.raises(UnsupportedVersionError, match=f"FlashInfer {version}: ") as error:
        read_contract(package, version)
    assert symbol in str(error.value)


@pytest.mark.parametrize(
    "damage",
    [b"def broken(:\n", b"name = '\xff'\n", b"\0"],
    ids=["syntax", "not UTF-8", "null byte"],
)
def test_a_file_that_does_not_parse_is_named(wheel, tmp_path, damage):
    package = copy(wheel("0.6.18"), tmp_path / "flashinfer")
    with (package / WRAPPER).open("ab") as stream:
        stream.write(b"\n" + damage)
    with pytest.raises(UnsupportedVersionError, match=r"FlashInfer 0\.6\.18: ") as error:
        read_contract(package, "0.6.18")
    assert "b12x_moe.py" in str(error.value)


# ---- the installed one


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    """An empty site-packages, the only one that finders see."""
    folder = tmp_path / "site"
    folder.mkdir()
    standard = [p for p in sys.path if not re.search(r"(site|dist)-packages", p)]
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.setattr(sys, "path", [str(folder), *standard])
    return folder


def install(site: Path, package: Path, metadata: str | None) -> None:
    """Put the package there; importing it would fail, as it does on a machine without CUDA."""
    copy(package, site / "flashinfer")
    (site / "flashinfer" / "__init__.py").write_text("raise RuntimeError('was imported')\n")
    if metadata is not None:
        record = site / "flashinfer_python-0.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(metadata)


def metadata_of(version: str) -> str:
    return f"Metadata-Version: 2.4\nName: {DISTRIBUTION}\nVersion: {version}\n"


@pytest.mark.parametrize("version", ["0.6.16", "0.7.4"])
def test_the_installed_contract_is_read_without_an_import(site, wheel, version):
    install(site, wheel(version), metadata_of(version))
    read = installed_contract()
    assert read == replace(contract_for(version), origin=ContractOrigin.INSTALLED)
    assert "flashinfer" not in sys.modules


def test_without_flashinfer_there_is_none(site):
    assert installed_contract() is None


def test_a_flashinfer_whose_import_is_blocked_is_none(site, wheel, monkeypatch):
    install(site, wheel("0.6.18"), metadata_of("0.6.18"))
    monkeypatch.setitem(sys.modules, "flashinfer", None)
    assert installed_contract() is None


def test_a_single_module_of_that_name_is_none(site):
    (site / "flashinfer.py").write_text("")
    assert installed_contract() is None


def test_a_mere_folder_of_that_name_is_none(site):
    """Such as a checkout of FlashInfer's sources in the current folder."""
    (site / "flashinfer" / "docs").mkdir(parents=True)
    assert installed_contract() is None


def test_an_installed_version_that_is_not_known_is_named(site, wheel):
    install(site, wheel("0.7.4"), metadata_of("0.7.5"))
    with pytest.raises(UnsupportedVersionError, match=r"FlashInfer 0\.7\.5: .*--flashinfer"):
        installed_contract()


def test_an_installed_version_that_lies_is_refused(site, wheel):
    install(site, wheel("0.7.2"), metadata_of("0.6.18"))
    with pytest.raises(UnsupportedVersionError, match=r"FlashInfer 0\.6\.18: .*--flashinfer"):
        installed_contract()


def test_flashinfer_without_metadata_says_how_to_name_a_version(site, wheel):
    install(site, wheel("0.6.18"), None)
    with pytest.raises(UnsupportedVersionError, match="--flashinfer"):
        installed_contract()


@pytest.mark.parametrize("text", ["", "Name: flashinfer-python\n"])
def test_metadata_without_a_version_says_how_to_name_one(site, wheel, text):
    install(site, wheel("0.6.18"), text)
    with pytest.raises(B12xFixError, match="--flashinfer"):
        installed_contract()


def test_the_command_takes_the_installed_version(tmp_path, wheel, monkeypatch, capsys):
    install(tmp_path, wheel("0.7.2"), metadata_of("0.7.2"))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    arguments = ["check-layer", "--device", "cpu", "--rows", "1", "--arms", "fix", "--json", "-"]
    assert cli.main(arguments) == 0
    document = json.loads(capsys.readouterr().out)
    assert document["flashinfer"]["version"] == "0.7.2"
    assert document["flashinfer"]["contract"] == "installed"


def test_the_command_refuses_an_installed_version_that_is_not_known(
    tmp_path, wheel, monkeypatch, capsys
):
    install(tmp_path, wheel("0.7.2"), metadata_of("0.7.3"))
    monkeypatch.delitem(sys.modules, "flashinfer", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    assert cli.main(["check-layer", "--device", "cpu", "--rows", "1"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "0.7.3" in err
    assert "--flashinfer" in err

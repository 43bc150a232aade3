"""The patch of TensorRT-LLM's source: it applies, and the patched hook computes with exact scales.

The patched stand-ins run through FlashInfer's own wrapper and dispatch, one process for each wheel;
what comes out must be the emulated repaired arm bit for bit, as the baked arm is in
test_stand_in.py.
"""

from __future__ import annotations

import ast
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from tests.kernel_backend import ORDER_SEED
from tests.layers import make_inputs
from tests.trtllm.layers import as_loaded
from tests.trtllm.stand_in import Era, write_stand_in
from tests.trtllm.test_stand_in import DECODE, LAYERS, PADDED, TOKENS, TOP_K, make_job, run_worker
from trtllm_b12x_fix import __version__, cli
from trtllm_b12x_fix.emulator import moe
from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.emulator.contract import Shape, contract_for
from trtllm_b12x_fix.integrations.trtllm_patch import find_target, make_patch
from trtllm_b12x_fix.integrations.trtllm_patch_block import PatchStrategy
from trtllm_b12x_fix.integrations.trtllm_source import ScaleHandling, read_source
from trtllm_b12x_fix.layer import Activation, MoELayer
from trtllm_b12x_fix.repair import InputScales, Strategy, arguments, input_scales, plan

BAKING = [era for era in Era if era.value.bakes]
STRATEGIES = {"0.6.16": PatchStrategy.FP32_RESCALE, "0.6.18": PatchStrategy.ALPHAS}
VERSIONS = ("0.6.16", "0.6.18", "0.7.4")
needs_flashinfer = pytest.mark.slow


def source_of(folder: Path, era: Era) -> Path:
    return folder.joinpath(*era.value.quantization_module.split(".")).with_suffix(".py")


def written(folder: Path, era: Era) -> Path:
    folder.mkdir(exist_ok=True)
    write_stand_in(folder, era)
    return source_of(folder, era)


def emit(*arguments: str) -> int:
    return cli.main(["emit-patch", *arguments])


def apply(command: list[str], folder: Path, diff: str) -> None:
    done = subprocess.run(
        command, cwd=folder, input=diff.encode(), capture_output=True, check=False
    )
    assert done.returncode == 0, done.stderr.decode() + done.stdout.decode()


def patch_file(path: Path, root: Path, strategy: PatchStrategy) -> None:
    """Through the command's own functions and git."""
    apply(["git", "apply", "-"], root, make_patch(find_target(path), strategy).diff)


# ---------------------------------------------------------------------------
# The diff
# ---------------------------------------------------------------------------
@pytest.mark.parametrize("strategy", PatchStrategy)
@pytest.mark.parametrize("era", BAKING)
def test_the_diff_applies_and_is_recognised(tmp_path, capsys, era, strategy):
    path = written(tmp_path, era)
    before = path.read_text()
    assert emit("--file", str(path), "--strategy", strategy.value) == 0
    diff = capsys.readouterr().out
    assert diff.startswith(f"--- a/{path.relative_to(tmp_path)}\n+++ b/")
    assert not [line for line in diff.splitlines()[2:] if line.startswith("-")]
    apply(["git", "apply", "--check", "-"], tmp_path, diff)
    apply(["patch", "-p1", "--dry-run", "--fuzz=0"], tmp_path, diff)
    assert path.read_text() == before
    apply(["git", "apply", "-"], tmp_path, diff)
    compile(path.read_text(), str(path), "exec")
    reading = read_source(path, "m")
    assert reading.handling is ScaleHandling.PATCHED
    assert reading.patch_strategy == strategy.value
    assert emit("--file", str(path)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "patched already" in err


def test_the_block_stands_right_behind_the_assignment(tmp_path):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    patch_file(path, tmp_path, PatchStrategy.ALPHAS)
    (hook,) = (
        node
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.FunctionDef) and node.name == "transform_weights"
    )
    names = [
        ast.unparse(node.targets[0]) if isinstance(node, ast.Assign) else type(node).__name__
        for node in hook.body
    ]
    place = names.index("module._b12x_weights")
    assert names[place + 1 : place + 3] == ["FunctionDef", "Expr"]
    assert ast.unparse(hook.body[place + 2]) == "pass_weight_scale_2(module)"


def test_an_output_file(tmp_path, capsys):
    path = written(tmp_path / "root", Era.MOE_TRANSFORM)
    target = tmp_path / "b12x.patch"
    assert emit("--file", str(path), "--strategy", "alphas", "-o", str(target)) == 0
    assert capsys.readouterr().out == ""
    apply(["git", "apply", "--check", "-"], tmp_path / "root", target.read_text())


def test_a_fixed_file_has_nothing_to_patch(tmp_path, capsys):
    path = written(tmp_path, Era.FIXED)
    assert emit("--file", str(path)) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert "fixed upstream" in err


def test_a_file_without_the_class_has_nothing_to_patch(tmp_path, capsys):
    path = tmp_path / "tensorrt_llm" / "quantization.py"
    path.parent.mkdir()
    path.write_text("class Other:\n    pass\n")
    assert emit("--file", str(path)) == 1
    assert "has no NVFP4CuteDslB12xFusedMoEMethod" in capsys.readouterr().err


def refused(path: Path, capsys) -> str:
    assert emit("--file", str(path), "--strategy", "alphas") == 2
    out, err = capsys.readouterr()
    assert out == ""
    return err


ASSIGNMENT = "        module._b12x_weights = {"


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (ASSIGNMENT, "        weights = {", "0 times"),
        (ASSIGNMENT, "        module._b12x_weights = None\n" + ASSIGNMENT, "2 times"),
        (ASSIGNMENT, "        x = 1; module._b12x_weights = {", "shares its lines"),
        ('"fc2_input_scale": fc2_scale,\n        }', '"fc2_input_scale": 1}; x = 1', "shares"),
        (".to(torch.float8_e4m3fn)", ".to(unheard_of)", "neither bakes"),
        ("def transform_weights(", "def prepare(", "defines neither"),
        ("class NVFP4", "class class NVFP4", "is not Python"),
    ],
)
def test_an_unknown_place_is_refused_by_name(tmp_path, capsys, old, new, words):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    assert words in refused(path, capsys)


WRAPPER = "        if module.activation_type not in"
FINISH = "    def finish(self, module):\n        module._b12x_weights"
UNDONE = {
    "item": (WRAPPER, 'module._b12x_weights["w1_weight_sf"] = w1_sf'),
    "update": (WRAPPER, "module._b12x_weights.update(w1_weight_sf=w1_sf)"),
    "annotated": (WRAPPER, "module._b12x_weights: dict = baked"),
    "merged": (WRAPPER, "module._b12x_weights |= baked"),
    "setattr": (WRAPPER, 'setattr(module, "_b12x_weights", baked)'),
    "unpacked": (WRAPPER, "module._b12x_weights, x = baked, 1"),
    "read": (WRAPPER, "weights = module._b12x_weights"),
    "method": ("    def transform_weights", f"{FINISH}.update(baked)\n"),
    "replaced": ("    def transform_weights", f"{FINISH} = baked\n"),
}


def insert(path: Path, before: str, added: str) -> None:
    """A statement of the hook, or a whole method."""
    text = path.read_text()
    assert text.count(before) == 1
    added = added if before != WRAPPER else f"        {added}\n"
    path.write_text(text.replace(before, added + before))


@pytest.mark.parametrize("how", UNDONE)
def test_entries_that_are_used_behind_the_block_are_refused(tmp_path, capsys, how):
    path = written(tmp_path / "root", Era.MOE_TRANSFORM)
    insert(path, *UNDONE[how])
    assert "is used again behind the place for the block" in refused(path, capsys)
    # A file that was patched first, and then changed.
    path = written(tmp_path / "patched", Era.MOE_TRANSFORM)
    patch_file(path, tmp_path / "patched", PatchStrategy.ALPHAS)
    insert(path, *UNDONE[how])
    reading = read_source(path, "m")
    assert reading.handling is ScaleHandling.UNKNOWN
    assert "after the block of emit-patch, and may undo it" in reading.reason
    assert "may undo it" in refused(path, capsys)


def test_entries_that_have_another_name_are_followed(tmp_path, capsys):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    text = path.read_text().replace(ASSIGNMENT, ASSIGNMENT.replace("module", "w = module"))
    path.write_text(text)
    assert emit("--file", str(path), "--strategy", "alphas") == 0
    capsys.readouterr()
    insert(path, WRAPPER, 'w["w1_weight_sf"] = w1_sf')
    assert "is used again" in refused(path, capsys)


@pytest.mark.parametrize("statement", [" = None", " is None"])
def test_entries_that_another_method_forgets_are_no_matter(tmp_path, statement):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    insert(path, "    def transform_weights", f"{FINISH}{statement}\n")
    patch_file(path, tmp_path, PatchStrategy.ALPHAS)
    assert read_source(path, "m").handling is ScaleHandling.PATCHED


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("        # trtllm-b12x-fix, end\n", ""),
        ("        pass_weight_scale_2(module)\n", ""),
        ("        pass_weight_scale_2(module)\n", "        pass_weight_scale_2(other)\n"),
        ('entries["w1_weight_sf"] = ', "_ = "),
        ("return  # not baked", "pass"),
        ("begin: strategy alphas", "begin: strategy fp32-rescale"),
        ("begin: strategy alphas", "begin: strategy other"),
        ("        # trtllm-b12x-fix 0.1.0", "        x = 1\n        # trtllm-b12x-fix 0.1.0"),
    ],
)
def test_a_block_that_is_not_whole_or_not_in_place_is_no_patch(tmp_path, capsys, old, new):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    patch_file(path, tmp_path, PatchStrategy.ALPHAS)
    text = path.read_text()
    assert text.count(old) == 1
    path.write_text(text.replace(old, new))
    reading = read_source(path, "m")
    assert (reading.handling, reading.patch_strategy) == (ScaleHandling.UNKNOWN, None)
    assert "is not whole" in reading.reason
    assert "is not whole" in refused(path, capsys)


def test_a_whole_block_of_another_version_counts(tmp_path):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    patch_file(path, tmp_path, PatchStrategy.ALPHAS)
    path.write_text(path.read_text().replace(f"b12x-fix {__version__},", "b12x-fix 9.9.9,"))
    assert read_source(path, "m").handling is ScaleHandling.PATCHED


def test_a_mark_outside_the_hook_is_a_comment(tmp_path, capsys):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    mark = "# trtllm-b12x-fix 0.1.0, begin: strategy alphas\n"
    path.write_text(mark + path.read_text())
    assert read_source(path, "m").handling is ScaleHandling.BAKES
    assert emit("--file", str(path), "--strategy", "alphas") == 0
    capsys.readouterr()


def test_a_file_that_is_nowhere_below_the_package_is_refused(tmp_path, capsys):
    path = tmp_path / "quantization.py"
    path.write_text("")
    assert "tensorrt_llm" in refused(path, capsys)


def test_a_file_that_is_not_there_is_refused(tmp_path, capsys):
    assert "No such file" in refused(tmp_path / "tensorrt_llm" / "quantization.py", capsys)


@pytest.mark.parametrize("end", ["\n", "\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("tail", ["all", "assignment"])
def test_line_ends_are_kept(tmp_path, end, tail):
    """The file as it is, and one whose last line is the assignment, without a line end."""
    path = written(tmp_path, Era.MOE_TRANSFORM)
    text = path.read_text()
    if tail == "assignment":
        text = text[: text.index("        if module.activation_type not in")].rstrip("\n")
    path.write_bytes(text.replace("\n", end).encode())
    patch_file(path, tmp_path, PatchStrategy.ALPHAS)
    lines = path.read_bytes().decode().split("\n")[:-1]
    assert len(lines) > 100
    assert {line.endswith("\r") for line in lines} == {end == "\r\n"}
    assert read_source(path, "m").handling is ScaleHandling.PATCHED


def test_form_feeds_and_unicode_separators_end_no_line(tmp_path):
    path = written(tmp_path, Era.MOE_TRANSFORM)
    text = path.read_text().replace(
        "class NVFP4Cute", "NOTE = '\u2028 \x85'\n\x0c\nclass NVFP4Cute"
    )
    path.write_text(text, encoding="utf-8")
    patch_file(path, tmp_path, PatchStrategy.ALPHAS)
    assert read_source(path, "m").handling is ScaleHandling.PATCHED
    compile(path.read_bytes(), str(path), "exec")


# ---------------------------------------------------------------------------
# The installed file, never imported
# ---------------------------------------------------------------------------
@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    written(tmp_path, Era.MOE_TRANSFORM)
    poison(tmp_path / "tensorrt_llm")
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def poison(package: Path) -> None:
    (package / "__init__.py").write_text("raise SystemExit('imported')\n")


def bring_wrapper(site: Path, parameter: str, name: str = "B12xMoEWrapper") -> None:
    folder = site / "flashinfer" / "fused_moe" / "cute_dsl"
    folder.mkdir(parents=True)
    poison(site / "flashinfer")
    text = f"class {name}:\n    def run(self, x, {parameter}=None):\n        pass\n"
    (folder / "b12x_moe.py").write_text(text)


@pytest.mark.parametrize(
    ("parameter", "strategy"),
    [("input_global_scale", "alphas"), ("w1_alpha", "fp32-rescale"), (None, "alphas")],
)
def test_auto_looks_at_the_installed_flashinfer(site, capsys, parameter, strategy):
    if parameter is not None:
        bring_wrapper(site, parameter)
    assert emit() == 0
    out, err = capsys.readouterr()
    assert f"begin: strategy {strategy}\n" in out
    assert f"strategy {strategy}" in err
    assert ("not installed" in err) == (parameter is None)
    apply(["git", "apply", "--check", "-"], site, out)


def test_a_flashinfer_without_the_wrapper_is_refused(site, capsys):
    bring_wrapper(site, "x", name="Other")
    assert emit() == 2
    assert "B12xMoEWrapper.run" in capsys.readouterr().err
    assert emit("--strategy", "alphas") == 0


def test_without_tensorrt_llm_a_file_must_be_named(monkeypatch, capsys):
    monkeypatch.setitem(__import__("sys").modules, "tensorrt_llm", None)
    assert emit() == 2
    assert "--file" in capsys.readouterr().err


def test_a_class_in_two_places_must_be_chosen(site, capsys):
    (site / "older").mkdir()
    source = written(site / "older", Era.MODULES_TRANSFORM)
    target = source_of(site, Era.MODULES_TRANSFORM)
    target.parent.mkdir(parents=True)
    target.write_text(source.read_text())
    assert emit() == 2
    assert "choose with --file" in capsys.readouterr().err
    # The older path as a mere forwarder: the class is in one place.
    target.write_text("from tensorrt_llm._torch.moe.fused_moe.quantization import *\n")
    assert emit() == 0


# ---------------------------------------------------------------------------
# Through FlashInfer
# ---------------------------------------------------------------------------
@dataclass
class PatchedRun:
    version: str
    records: dict[tuple[Era, str], dict]


def jobs() -> dict[str, dict]:
    relu2, silu = LAYERS[Activation.RELU2], LAYERS[Activation.SILU]
    return {
        "relu2": make_job(relu2, TOKENS),
        "silu": make_job(silu, TOKENS),
        "inference": make_job(relu2, (8,), inference_mode=True),
        "padded": make_job(PADDED, (8, 64)),
        "twice": make_job(relu2, (8,), walks=2),
        "w4a16": make_job(relu2, quant_algo="W4A16_NVFP4"),
    }


@pytest.fixture(scope="module", params=VERSIONS)
def ran(request, oracle_dir, tmp_path_factory) -> PatchedRun:
    version = request.param
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    folder = tmp_path_factory.mktemp(f"patched-{version}")
    everything = jobs()
    parts = []
    for era in BAKING:
        stand_in = folder / era.name
        path = written(stand_in, era)
        patch_file(path, stand_in, STRATEGIES.get(version, PatchStrategy.ALPHAS))
        jobs_of_era = list(everything.values())
        parts.append({"era": era.name, "stand_in": str(stand_in), "jobs": jobs_of_era})
    results = run_worker(version, parts, folder)
    return PatchedRun(
        version,
        {
            (era, name): record
            for era, result in zip(BAKING, results, strict=True)
            for name, record in zip(everything, result, strict=True)
        },
    )


def repaired(version: str, layer: MoELayer, tokens: int):
    """Family and output of the emulated repaired arm, for TensorRT-LLM's parameters."""
    seen = as_loaded(layer)
    whole = contract_for(version)
    todo = plan(whole, layer.activation)
    contract = whole.without(*todo.keep_out)
    args = arguments(todo.strategy, seen, *input_scales(seen, InputScales.LAYER), contract)
    # The parameter itself, which weight_scale_2 * input scale is to a few ulps.
    reciprocal = layer.fc2.largest_input_scale.reciprocal()
    args = replace(args, w2_alpha=1.0 / (reciprocal * (1.0 / layer.fc2.weight_scale_2)))
    x, routing = make_inputs(layer, tokens=tokens, top_k=TOP_K, seed=tokens)
    shape = Shape(
        tokens=tokens,
        top_k=TOP_K,
        hidden=layer.hidden,
        intermediate=layer.intermediate,
        experts=layer.experts,
        activation=layer.activation,
    )
    family = contract.select(shape)
    arithmetic = contract.arithmetic(family, shape)
    return family, moe.run(args.launch(seen), x, routing, arithmetic, ORDER_SEED).output


def supported(version: str, activation: Activation) -> bool:
    return plan(contract_for(version), activation).strategy is not Strategy.CUTLASS


@needs_flashinfer
@pytest.mark.parametrize("activation", Activation)
def test_decode_is_the_emulated_repaired_arm_bit_for_bit(ran, activation):
    for era in BAKING:
        record = ran.records[era, activation.value]
        if not supported(ran.version, activation):
            assert "only relu2 has exact scales" in record["error"]
            continue
        assert "error" not in record, (era, record["error"])
        for tokens, case in zip(TOKENS, record["cases"], strict=True):
            if tokens in DECODE:
                family, output = repaired(ran.version, LAYERS[activation], tokens)
                assert KernelFamily(case["family"]) is family, (era, tokens)
                assert torch.equal(case["output"], output), (era, tokens)


@needs_flashinfer
def test_intact_scales_are_the_parameters_own_and_nothing_is_changed_in_place(ran):
    for (era, name), record in ran.records.items():
        if "error" in record:
            continue
        before, after = record["loaded"]
        assert before == after, (era, name)
        if name == "w4a16":
            continue
        for key, owner in (("w1", "w3_w1_weight_scale"), ("w2", "w2_weight_scale")):
            entry = record["weights"][f"{key}_weight_sf"]
            assert entry["shares"] == owner, (era, name)
            assert entry["dtype"] == "torch.float8_e4m3fn"
        # Values with a version: FlashInfer's fold asks for it.
        assert not record["weights"]["w1_alpha"]["inference"]
        assert not record["weights"]["fc2_input_scale"]["inference"]


@needs_flashinfer
def test_layers_made_under_inference_mode_run(ran):
    for era in BAKING:
        record = ran.records[era, "inference"]
        assert "error" not in record, (era, record["error"])
        _, output = repaired(ran.version, LAYERS[Activation.RELU2], 8)
        assert torch.equal(record["cases"][0]["output"], output), era


@needs_flashinfer
def test_a_second_walk_changes_no_number(ran):
    for era in BAKING:
        _, output = repaired(ran.version, LAYERS[Activation.RELU2], 8)
        assert torch.equal(ran.records[era, "twice"]["cases"][0]["output"], output), era


@needs_flashinfer
def test_padded_layers_run_where_they_ran_before(ran):
    for era in BAKING:
        assert ("error" in ran.records[era, "padded"]) != era.value.tensor_sizes, era


@needs_flashinfer
def test_w4a16_is_left_as_it_was(ran):
    """Where it is told apart; older states would bake it, and run it as W4A4."""
    seen = as_loaded(LAYERS[Activation.RELU2])
    for era in BAKING:
        weights = ran.records[era, "w4a16"]["weights"]
        assert "input_global_scale" not in weights
        if era.value.tensor_sizes:
            assert weights["fc2_input_scale"] is None
            assert weights["w1_weight_sf"]["shares"] == "w3_w1_weight_scale"
            assert torch.equal(weights["w1_alpha"]["values"], seen.fc1.weight_scale_2)
        else:
            assert weights["w1_weight_sf"]["shares"] is None


@needs_flashinfer
def test_a_patch_for_another_flashinfer_raises_when_a_layer_is_loaded(oracle_dir, tmp_path):
    oracle_dir("flashinfer-0.6.16")
    path = written(tmp_path / "root", Era.MOE_TRANSFORM)
    patch_file(path, tmp_path / "root", PatchStrategy.ALPHAS)
    job = make_job(LAYERS[Activation.RELU2], (8,))
    part = {"era": "MOE_TRANSFORM", "stand_in": str(tmp_path / "root"), "jobs": [job]}
    ((record,),) = run_worker("0.6.16", [part], tmp_path)
    assert "input_global_scale" in record["error"]

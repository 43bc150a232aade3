"""Mutants of doctor and emit-patch: each must make the named test fail."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.trtllm import test_emit_patch
from tests.trtllm.stand_in import Era
from tests.trtllm.test_emit_patch import patch_file, repaired, written
from tests.trtllm.test_stand_in import LAYERS, make_job, run_worker
from tests.unit import test_doctor, test_trtllm_source
from tests.unit.test_doctor import _clean, site  # noqa: F401 - fixtures of the guards
from tests.unit.test_trtllm_source import BAKED_LINE
from trtllm_b12x_fix.doctor import advisories, diagnosis, environment, hold, model, switch
from trtllm_b12x_fix.doctor.environment import Gpu
from trtllm_b12x_fix.doctor.model import Model
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.integrations import (
    flashinfer,
    flashinfer_wrapper,
    installed,
    trtllm_dataflow,
    trtllm_patch,
    trtllm_patch_block,
    trtllm_source,
)
from trtllm_b12x_fix.integrations.installed import Kind
from trtllm_b12x_fix.integrations.trtllm_dataflow import HookCode
from trtllm_b12x_fix.integrations.trtllm_patch_block import PatchStrategy
from trtllm_b12x_fix.integrations.trtllm_source import ScaleHandling, ToldSize
from trtllm_b12x_fix.layer import Activation
from trtllm_b12x_fix.report import doctor as report


@dataclass(frozen=True)
class Mutant:
    """A wrong value in the place of ``owner.attribute``, and the test that must notice."""

    name: str
    owner: Any
    attribute: str
    wrong: Any
    guard: Any
    arguments: dict[str, Any] = field(default_factory=dict)

    def call(self, request: pytest.FixtureRequest) -> None:
        """Run the test, with the fixtures that it asks for."""
        wanted = [n for n in inspect.signature(self.guard).parameters if n not in self.arguments]
        fixtures = {name: request.getfixturevalue(name) for name in wanted}
        self.guard(**fixtures, **self.arguments)


def _count_owners_of_attributes(self, node):
    for target, value in trtllm_dataflow._assignments(node):
        for part in ast.walk(target):
            if isinstance(part, ast.Name):
                self._values.setdefault(part.id, []).append(value)


def _read_whatever_it_is(path):
    if not path.is_file():
        pytest.fail(f"reading {path.name} would never end")
    return path.read_bytes()


def _take_the_last(source):
    found = [
        node
        for node in ast.walk(source.hook)
        if isinstance(node, ast.Assign) and "_b12x_weights" in ast.unparse(node.targets[0])
    ]
    return found[-1], "module"


def _found_anywhere(hook, lines):
    if not any(f"# {trtllm_patch_block.PATCH_MARK}" in line for line in lines):
        return None
    statement = next(
        node for node in ast.walk(hook) if trtllm_patch_block.assigned_module(node) is not None
    )
    return trtllm_patch_block.FoundBlock(PatchStrategy.ALPHAS, statement, statement.end_lineno)


def _import_it(name):
    return importlib.import_module(name).__spec__


def _only_tiles(version, shape):
    n = shape.intermediate
    return advisories._all_bytes(shape, advisories.padded(n, 128)) if n % 128 else 0


SIZES = """
n = module.w2_weight.shape[2] * 16
sf = module.w2_weight_scale.reshape(n).to(torch.float8_e4m3fn)
"""
STORED = "module.other = module.w2_weight_scale * 2\nsf = module.w3.to(torch.float8_e4m3fn)"
PRODUCT = "sf = torch.mul(module.w3_w1_weight_scale.float(), f).to(torch.float8_e4m3fn)"
EXEMPT = f"if not module.has_w4a16_nvfp4():\n    {BAKED_LINE}"
COPIED = test_trtllm_source.changed("scales[0], m", f"{test_trtllm_source.BAKED_COPY}, m")
OPENED = test_trtllm_source.changed("first = ", "with bake() as first: pass\nfirst = ")
IN_PLACE = test_trtllm_source.changed("given = (", "scales[0].mul_(f)\ngiven = (")
NO_SCALE = test_trtllm_source.changed("given = (", "given = None if old else (")
CONDITION = f"if module.quant_config is not None:\n    {BAKED_LINE}"

MUTANTS = [
    Mutant(
        "any product is one of block scales",
        HookCode,
        "_is_scaled",
        lambda self, node: isinstance(node, ast.BinOp),
        test_trtllm_source.test_these_do_not_bake,
        {"body": SIZES},
    ),
    Mutant(
        "storing an attribute stores its owner",
        HookCode,
        "_record",
        _count_owners_of_attributes,
        test_trtllm_source.test_these_do_not_bake,
        {"body": STORED},
    ),
    Mutant(
        "only the operator multiplies",
        trtllm_dataflow,
        "_PRODUCTS",
        frozenset(),
        test_trtllm_source.test_these_bake,
        {"body": PRODUCT},
    ),
    Mutant(
        "helpers are not followed",
        HookCode,
        "_helper_called",
        lambda self, node: None,
        test_trtllm_source.test_a_helper_that_bakes_is_followed,
        {"call": "bake(m.w2_weight_scale)"},
    ),
    Mutant(
        "no condition is one on W4A16",
        trtllm_dataflow,
        "_names_w4a16",
        lambda node: False,
        test_trtllm_source.test_w4a16,
        {"body": EXEMPT, "exempt": True},
    ),
    Mutant(
        "every condition is one on W4A16",
        trtllm_dataflow,
        "_names_w4a16",
        lambda node: True,
        test_trtllm_source.test_w4a16,
        {"body": CONDITION, "exempt": False},
    ),
    Mutant(
        "a file that does both bakes",
        HookCode,
        "mentions_text",
        lambda self, text: False,
        test_trtllm_source.test_a_file_with_both_ways_is_not_judged,
    ),
    Mutant(
        "whatever does not bake is intact",
        trtllm_source,
        "_handling",
        lambda source, code, bakes: (ScaleHandling.INTACT, ""),
        test_trtllm_source.test_these_do_not_bake,
        {"body": SIZES},
    ),
    Mutant(
        "the wrapper is told the tensors' size",
        trtllm_source,
        "_told_size",
        lambda code, wrapper: ToldSize.TENSORS,
        test_trtllm_source.test_every_era_is_read_as_it_is,
        {"era": Era.MODULES_TRANSFORM},
    ),
    Mutant(
        "the older hook counts",
        trtllm_source,
        "HOOKS",
        ("post_load_weights", "transform_weights"),
        test_trtllm_source.test_the_newer_hook_counts,
    ),
    Mutant(
        "a package is looked for by importing it",
        importlib.util,
        "find_spec",
        _import_it,
        test_trtllm_source.test_an_installed_package_is_not_imported,
    ),
    Mutant(
        "everything importable is installed",
        installed,
        "_kind",
        lambda folder, records: Kind.INSTALLED,
        test_trtllm_source.test_a_source_checkout,
    ),
    Mutant(
        "no install is editable",
        installed,
        "_is_editable",
        lambda distribution: False,
        test_trtllm_source.test_an_editable_install,
    ),
    Mutant(
        "lines end where str.splitlines says",
        trtllm_source.ParsedSource,
        "lines",
        property(lambda self: self.text.splitlines(keepends=True)),
        test_emit_patch.test_form_feeds_and_unicode_separators_end_no_line,
    ),
    Mutant(
        "a last line without an end is not marked",
        trtllm_patch,
        "_NO_NEWLINE",
        "",
        test_emit_patch.test_line_ends_are_kept,
        {"end": "\n", "tail": "assignment"},
    ),
    Mutant(
        "any signature of the hook is known",
        trtllm_source,
        "_signature",
        lambda hook: "",
        test_doctor.test_a_hook_of_another_signature_is_refused_with_the_fix_on,
        {"signature": "def transform_weights(self, module: torch.nn.Module, stage)"},
    ),
    Mutant(
        "decode of an unknown class stays on b12x",
        hold,
        "_unknown_hook",
        lambda reading: "",
        test_doctor.test_a_source_without_a_known_hook_is_refused_with_the_fix_on,
    ),
    Mutant(
        "a pipe is read",
        flashinfer_wrapper,
        "regular_bytes",
        _read_whatever_it_is,
        test_doctor.test_a_pipe_in_the_place_of_flashinfers_files_is_refused,
        {"name": "b12x_moe.py", "command": "emit-patch"},
    ),
    Mutant(
        "a pipe is read for the contract",
        flashinfer,
        "regular_bytes",
        _read_whatever_it_is,
        test_doctor.test_a_pipe_in_the_place_of_flashinfers_files_is_refused,
        {"name": "blackwell_sm12x/moe_dispatch.py", "command": "doctor"},
    ),
    Mutant(
        "a fixed file is patched",
        trtllm_patch,
        "_nothing_to_do",
        lambda reading: "",
        test_emit_patch.test_a_fixed_file_has_nothing_to_patch,
    ),
    Mutant(
        "the last of several assignments is taken",
        trtllm_patch,
        "_assignment",
        _take_the_last,
        test_emit_patch.test_an_unknown_place_is_refused_by_name,
        {
            "old": test_emit_patch.ASSIGNMENT,
            "new": "        module._b12x_weights = None\n" + test_emit_patch.ASSIGNMENT,
            "words": "2 times",
        },
    ),
    Mutant(
        "a patched file is not recognised",
        trtllm_source,
        "find_block",
        lambda hook, lines: None,
        test_emit_patch.test_the_diff_applies_and_is_recognised,
        {"era": Era.MOE_TRANSFORM, "strategy": PatchStrategy.ALPHAS},
    ),
    Mutant(
        "a mark is a patch",
        trtllm_source,
        "find_block",
        _found_anywhere,
        test_emit_patch.test_a_mark_outside_the_hook_is_a_comment,
    ),
    Mutant(
        "a block need not be whole",
        trtllm_patch_block,
        "block",
        lambda strategy, module, indent, version: (),
        test_emit_patch.test_a_block_that_is_not_whole_or_not_in_place_is_no_patch,
        {"old": "        # trtllm-b12x-fix, end\n", "new": ""},
    ),
    Mutant(
        "nothing undoes a block to come",
        trtllm_patch,
        "used_after",
        lambda source, statement, last: None,
        test_emit_patch.test_entries_that_are_used_behind_the_block_are_refused,
        {"how": "item"},
    ),
    Mutant(
        "nothing undoes a block that is there",
        trtllm_source,
        "used_after",
        lambda source, statement, last: None,
        test_emit_patch.test_entries_that_are_used_behind_the_block_are_refused,
        {"how": "update"},
    ),
    Mutant(
        "other methods undo nothing",
        trtllm_source,
        "used_elsewhere",
        lambda source: None,
        test_emit_patch.test_entries_that_are_used_behind_the_block_are_refused,
        {"how": "method"},
    ),
    Mutant(
        "every other use undoes the block",
        trtllm_source,
        "_is_harmless",
        lambda parent: False,
        test_emit_patch.test_entries_that_another_method_forgets_are_no_matter,
        {"statement": " = None"},
    ),
    Mutant(
        "no doubt about what is handed over",
        trtllm_source,
        "_doubt",
        lambda source, code: "",
        test_trtllm_source.test_what_is_not_certainly_a_view_is_unknown,
        {"body": COPIED, "words": "w1_weight_sf is"},
    ),
    Mutant(
        "everything is a view",
        HookCode,
        "is_view",
        lambda self, expression, seen=frozenset(): True,
        test_trtllm_source.test_what_is_not_certainly_a_view_is_unknown,
        {"body": COPIED, "words": "w1_weight_sf is"},
    ),
    Mutant(
        "only followed values count",
        HookCode,
        "_all_values",
        lambda self, name: self._values.get(name, []),
        test_trtllm_source.test_what_is_not_certainly_a_view_is_unknown,
        {"body": OPENED, "words": "w1_weight_sf is"},
    ),
    Mutant(
        "nothing is changed in place",
        HookCode,
        "changes",
        lambda self: None,
        test_trtllm_source.test_what_is_not_certainly_a_view_is_unknown,
        {"body": IN_PLACE, "words": "that line 9"},
    ),
    Mutant(
        "None is a scale",
        HookCode,
        "may_be_none",
        lambda self, expression, seen=frozenset(): False,
        test_trtllm_source.test_what_is_not_certainly_a_view_is_unknown,
        {"body": NO_SCALE, "words": "made of fc31_input_scale"},
    ),
    Mutant(
        "None in the place of a scale hands it over",
        trtllm_dataflow,
        "_is_none",
        lambda node: False,
        test_trtllm_source.test_a_value_of_none_carries_nothing,
    ),
    Mutant(
        "every doubt is one",
        HookCode,
        "changes",
        lambda self: self._functions[0],
        test_trtllm_source.test_these_are_intact,
        {"body": test_trtllm_source.INTACT},
    ),
    Mutant(
        "compiled modules are none",
        trtllm_source,
        "_COMPILED",
        frozenset(),
        test_doctor.test_a_compiled_class_is_not_judged,
        {"name": "quantization.pyc", "with_backend": False},
    ),
    Mutant(
        "a class that is only used is none",
        trtllm_source,
        "_NAMES_CLASS",
        re.compile(b"(?!)"),
        test_doctor.test_a_compiled_class_is_not_judged,
        {"name": "quantization.pyc", "with_backend": True},
    ),
    Mutant(
        "a folder is a module",
        trtllm_source,
        "_is_there",
        lambda path: True,
        test_doctor.test_folders_and_dead_links_with_a_modules_name_are_none,
    ),
    Mutant(
        "any file will do",
        trtllm_source.stat,
        "S_ISREG",
        lambda mode: True,
        test_trtllm_source.test_a_pipe_is_refused_and_not_waited_for,
    ),
    Mutant(
        "b12x is built on B200",
        diagnosis,
        "B12X_MAJOR",
        10,
        test_doctor.test_gpus_on_which_b12x_is_never_built,
        {"gpus": [Gpu("NVIDIA B200", (10, 0))], "code": 0},
    ),
    Mutant(
        "a GPU of unknown capability is not affected",
        diagnosis,
        "_not_affected",
        lambda facts: "never built",
        test_doctor.test_gpus_on_which_b12x_is_never_built,
        {"gpus": [Gpu("NVIDIA B200", (10, 0)), Gpu("unknown")], "code": 1},
    ),
    Mutant(
        "intact scales are judged as baked ones",
        diagnosis,
        "_not_affected",
        lambda facts: "",
        test_doctor.test_with_the_fix_off,
        {"era": Era.FIXED},
    ),
    Mutant(
        "off is on",
        switch.Switch,
        "why_off",
        lambda self: "",
        test_doctor.test_modes_that_do_not_repair,
        {"mode": "off", "words": "TRTLLM_B12X_FIX=off"},
    ),
    Mutant(
        "a variable alone switches the fix on",
        switch.Switch,
        "why_off",
        lambda self: self.problem or ("" if self.mode.wants_repair else "off"),
        test_doctor.test_a_variable_that_nothing_reads_is_off,
    ),
    Mutant(
        "the fix always holds",
        hold.Hold,
        "holds",
        True,
        test_doctor.test_a_strategy_without_an_exact_form_is_refused,
        {"mode": "alphas"},
    ),
    Mutant(
        "an unknown FlashInfer holds",
        hold,
        "_without_contract",
        lambda switch, refusals, way_out, words: hold.Hold(
            layers=(hold.LayerHold("relu2", "alphas", ""),)
        ),
        test_doctor.test_an_unknown_flashinfer,
    ),
    Mutant(
        "nothing is refused",
        hold,
        "_refusals",
        lambda switch, reading, model: ((), ()),
        test_doctor.test_forced_w4a16_is_refused,
    ),
    Mutant(
        "nothing is refused for the model's sizes",
        hold,
        "_refusals",
        lambda switch, reading, model: ((), ()),
        test_doctor.test_displaced_halves,
    ),
    Mutant(
        "every place is watched",
        trtllm_source.SourceReading,
        "is_watched",
        True,
        test_doctor.test_a_class_at_a_place_that_the_fix_does_not_watch,
    ),
    Mutant(
        "a class elsewhere is none",
        trtllm_source,
        "_modules",
        lambda package: (),
        test_doctor.test_a_class_at_a_place_that_the_fix_does_not_watch,
    ),
    Mutant(
        "CUTLASS is no way out",
        hold,
        "_sends_unknown_to_cutlass",
        lambda switch: False,
        test_doctor.test_an_unknown_flashinfer,
    ),
    Mutant(
        "a patch fits every FlashInfer",
        diagnosis,
        "patch_problem",
        lambda reading, flashinfer: "",
        test_doctor.test_a_patched_source,
        {"version": "0.6.16", "code": 1},
    ),
    Mutant(
        "W4A16 models are affected",
        Model,
        "is_weight_only",
        False,
        test_doctor.test_a_w4a16_model,
        {"era": Era.MOE_TRANSFORM, "code": 0},
    ),
    Mutant(
        "TensorRT-LLM pads nothing",
        model,
        "tensor_intermediate",
        lambda intermediate, gated: intermediate,
        test_doctor.test_padding_that_the_wrapper_is_not_told_of,
    ),
    Mutant(
        "payloads never clash",
        environment,
        "_clash",
        list,
        test_doctor.test_payloads_that_overwrite_each_other,
    ),
    Mutant(
        "two payloads always clash",
        environment,
        "_clash",
        lambda: ["clash"],
        test_doctor.test_payloads_side_by_side_are_fine,
    ),
    Mutant(
        "static of 0.7.2 pads to 128",
        advisories,
        "second_copy_bytes",
        _only_tiles,
        test_doctor.test_second_copies_of_the_reported_layer,
    ),
    Mutant(
        "codes have no second copy",
        advisories,
        "_CODE_BYTES",
        0,
        test_doctor.test_second_copies,
        {"version": "0.7.4", "intermediate": 200, "size": 256 * 9 / 16},
    ),
    Mutant(
        "direct micro takes every shape",
        advisories,
        "_may_take_direct_micro",
        lambda shape: True,
        test_doctor.test_shapes_narrow_what_is_said,
    ),
    Mutant(
        "0.7.3 was read",
        advisories,
        "KNOWN",
        (("0.6.16", "0.7.5"),),
        test_doctor.test_advisories_are_known_for_what_the_contracts_know,
        {"version": "0.7.3"},
    ),
    Mutant(
        "every variable is shown",
        switch,
        "SHOWN",
        (*switch.SHOWN, "HF_TOKEN"),
        test_doctor.test_only_named_variables_are_shown,
    ),
    Mutant(
        "text goes to the terminal as it is",
        report,
        "printable",
        lambda text: text,
        test_doctor.test_escape_sequences_do_not_reach_the_terminal,
    ),
    Mutant(
        "an unknown source is an intact one",
        trtllm_source,
        "_handling",
        lambda source, code, bakes: (ScaleHandling.INTACT, ""),
        test_doctor.test_other_sources,
        {
            "change": lambda text: text.replace(".to(torch.float8_e4m3fn)", ".half()"),
            "code": 1,
            "words": "may bake",
        },
    ),
]


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_wrong_doctor_is_caught(mutant, request):
    with pytest.MonkeyPatch.context() as planted:
        planted.setattr(mutant.owner, mutant.attribute, mutant.wrong)
        if mutant.owner is switch and mutant.attribute == "SHOWN":
            planted.setattr(report, "SHOWN", mutant.wrong)
        with pytest.raises((AssertionError, pytest.fail.Exception, B12xFixError, SystemExit)):
            mutant.call(request)
    sys.modules.pop("poisoned_package", None)


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_doctor_as_it_is_passes(mutant, request):
    """The guards are called rightly: they fail for the mutant alone."""
    mutant.call(request)


# ---------------------------------------------------------------------------
# The block that emit-patch makes
# ---------------------------------------------------------------------------
ALPHAS, RESCALE = PatchStrategy.ALPHAS, PatchStrategy.FP32_RESCALE
RETURN = "        return  # not baked\n"
#: What is changed in the patched file, and in which of the jobs below it must show.
BLOCK_MUTANTS = {
    "w1's scales stay baked": (ALPHAS, 'entries["w1_weight_sf"] = ', "_ = ", "plain"),
    "w2's scales stay baked": (ALPHAS, 'entries["w2_weight_sf"] = ', "_ = ", "plain"),
    "w2_alpha stays": (ALPHAS, 'entries["w2_alpha"] = ', "_ = ", "plain"),
    "w1_alpha stays": (ALPHAS, 'entries["w1_alpha"] = ', "_ = ", "plain"),
    "the input scale is not handed over": (
        ALPHAS,
        'entries["input_global_scale"] = ',
        "_ = ",
        "plain",
    ),
    "the input scale is the reciprocal": (
        ALPHAS,
        "fc1_scale = (1.0 / module.fc31_input_scale)",
        "fc1_scale = (1.0 * module.fc31_input_scale)",
        "plain",
    ),
    "direct micro is launched": (
        ALPHAS,
        "moe_dispatch._DIRECT_MICRO_MAX_N = 0",
        "pass",
        "plain",
    ),
    "tensors are made under inference mode": (
        ALPHAS,
        "torch.inference_mode(False)",
        "torch.no_grad()",
        "inference",
    ),
    "W4A16 is changed": (ALPHAS, RETURN, RETURN.replace("return", "pass"), "w4a16"),
    "weight_scale_2 is divided by once": (
        RESCALE,
        "fc2_scale / weight_scale_2 / weight_scale_2",
        "fc2_scale / weight_scale_2",
        "plain",
    ),
    "w1_alpha is weight_scale_2": (
        RESCALE,
        "fc1_scale.expand(experts).contiguous()",
        "weight_scale_2",
        "plain",
    ),
    "gated layers are let through": (
        RESCALE,
        "is not ActivationType.Relu2",
        "is None",
        "silu",
    ),
}


def block_jobs() -> dict[str, dict]:
    relu2 = LAYERS[Activation.RELU2]
    return {
        "plain": make_job(relu2, (1,)),
        "inference": make_job(relu2, (8,), inference_mode=True),
        "w4a16": make_job(relu2, quant_algo="W4A16_NVFP4"),
        "silu": make_job(LAYERS[Activation.SILU], (8,)),
    }


def as_it_should_be(version: str, job: str, record: dict) -> bool:
    """What test_emit_patch.py asks of each of these jobs."""
    if job == "silu":
        return "only relu2" in record.get("error", "")
    if "error" in record:
        return False
    if job == "w4a16":
        return "input_global_scale" not in record["weights"]
    tokens = {"plain": 1, "inference": 8}[job]
    _, output = repaired(version, LAYERS[Activation.RELU2], tokens)
    return torch.equal(record["cases"][0]["output"], output)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "strategy"), [("0.6.18", ALPHAS), ("0.6.16", RESCALE)])
def test_a_wrong_block_is_caught(tmp_path, oracle_dir, version, strategy):
    oracle_dir(f"flashinfer-{version}")
    oracle_dir("flashinfer-deps")
    mutants = {name: m for name, m in BLOCK_MUTANTS.items() if m[0] is strategy}
    # Direct micro is kept out for the whole process once one block has done so.
    names = sorted(mutants, key=lambda name: "direct micro" not in name)
    parts = []
    for place, name in enumerate([*names, "as it is"]):
        root = tmp_path / str(place)
        path = written(root, Era.MOE_TRANSFORM)
        patch_file(path, root, strategy)
        if name in mutants:
            _, old, new, _ = mutants[name]
            change(path, old, new)
        stand_in = {"era": "MOE_TRANSFORM", "stand_in": str(root)}
        parts.append({**stand_in, "jobs": list(block_jobs().values())})
    *found, intact = run_worker(version, parts, tmp_path)
    for name, records in zip(names, found, strict=True):
        job = mutants[name][3]
        record = dict(zip(block_jobs(), records, strict=True))[job]
        assert not as_it_should_be(version, job, record), name
    for job, record in zip(block_jobs(), intact, strict=True):
        if job != "silu" or strategy is RESCALE:
            assert as_it_should_be(version, job, record), job


def change(path: Path, old: str, new: str) -> None:
    """Within the block alone."""
    text = path.read_text()
    place = text.index(f"# {trtllm_patch_block.PATCH_MARK}")
    block = text[place:]
    indented = old if not old.endswith("\n") else "        " + old
    assert block.count(indented) == 1, old
    replaced = block.replace(indented, new if indented is old else "        " + new)
    path.write_text(text[:place] + replaced)


def test_the_block_has_no_line_that_no_strategy_needs():
    """Every part of the template is in one of the two blocks."""
    for strategy in PatchStrategy:
        lines = trtllm_patch_block.block(strategy, "layer", "    ")
        assert lines[-2] == "    pass_weight_scale_2(layer)"
        assert not any(line.isspace() or "{" in line for line in lines)

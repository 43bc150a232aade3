"""Reports of hand-made results: text, JSON and SVG with the values that break renderers.

Names come from files, so they may hold anything: mathematics for matplotlib, markup for the SVG,
escape sequences for the terminal.
"""

from __future__ import annotations

import itertools
import json
import math
import re
import sys
import unicodedata
import xml.etree.ElementTree as ET
from dataclasses import replace
from typing import Any

import matplotlib as mpl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trtllm_b12x_fix.emulator.arithmetic import KernelFamily
from trtllm_b12x_fix.errors import MissingDependencyError
from trtllm_b12x_fix.layer_check.arms import Arm
from trtllm_b12x_fix.layer_check.result import (
    ArmResult,
    FamilyResult,
    GateOutcome,
    LayerCheckResult,
    OwnMagnitude,
    Verdict,
)
from trtllm_b12x_fix.layer_check.scales import ScaleDamage
from trtllm_b12x_fix.layer_check.stages import Stage
from trtllm_b12x_fix.metrics import Distance
from trtllm_b12x_fix.repair import InputScales, Strategy
from trtllm_b12x_fix.report import document, plot, table
from trtllm_b12x_fix.report.text import percent

NAN, INF = math.nan, math.inf
SVG = "{http://www.w3.org/2000/svg}"
DAMAGE = ScaleDamage(1_234_567, 0.25, 0.5, 0.125, 1.0, 3, 0.2, 1e-5, 2e-5)
EVEN = ScaleDamage(96, 0.0, 0.0, 0.0, 0.0, 0, 0.0, 1e-3, 1e-3)
SHAPE: dict[str, int | str] = {
    "hidden": 640,
    "intermediate": 256,
    "logical_hidden": 576,
    "logical_intermediate": 256,
    "experts": 6,
    "experts_read": 6,
    "top_k": 4,
    "activation": "silu",
}


def arm(rows: int, which: Arm = Arm.BAKED, error: float = 0.25, **changes: Any) -> ArmResult:
    result = ArmResult(
        rows=rows,
        arm=which,
        strategy=Strategy.ALPHAS if which is Arm.FIX else Strategy.BAKED,
        family=KernelFamily.STATIC,
        fidelity=Distance(error, 0.96),
        output_distance=Distance(0.2525, 0.955),
        true_error=Distance(0.26, 0.95),
        published=Distance(0.252, 0.94),
        codes_differing=17,
        first_divergence=Stage.FC1,
    )
    return replace(result, **changes)


def unavailable(rows: int, which: Arm, reason: str) -> ArmResult:
    return ArmResult(rows, which, Strategy.CUTLASS, None, unavailable=reason)


def family(rows: int, **changes: Any) -> FamilyResult:
    result = FamilyResult(
        rows=rows,
        family=KernelFamily.STATIC,
        true_error=Distance(0.126, 0.99),
        noise=0.0057,
        evaluation_order=0.002,
        summation=0.0048,
        input_scales=0.0582,
    )
    return replace(result, **changes)


def result(**changes: Any) -> LayerCheckResult:
    base = LayerCheckResult(
        verdict=Verdict.GOOD,
        source="a layer",
        inputs="random",
        shape=SHAPE,
        flashinfer="0.6.18",
        contract_origin="data",
        contract_exceptions=(),
        plan="alphas: a reason",
        input_scales=InputScales.LAYER,
        device="cpu",
        seed=0,
        fc1=DAMAGE,
        fc2=EVEN,
        results=(arm(1, Arm.FIX, 0.0, first_divergence=None), arm(1), arm(8)),
        families=(family(1), family(8)),
        gates=(GateOutcome(Arm.FIX, 0.01, 0.0, 1, True, ""),),
        versions={"torch": "2.13.0"},
    )
    return replace(base, **changes)


def line_with(text: str, *parts: str) -> str:
    """The one line that holds all parts."""
    lines = [line for line in text.splitlines() if all(part in line for part in parts)]
    assert len(lines) == 1, lines
    return lines[0]


# ---- percent


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (1.0, "100.0%"),
        (12.5, "1250.0%"),
        (0.25, "25.0%"),
        (0.1, "10.0%"),
        (0.0999, "9.99%"),
        (0.0123, "1.23%"),
        (0.0001, "0.01%"),
        (0.00009, "9.0e-03%"),
        (1e-9, "1.0e-07%"),
        (NAN, "not finite"),
        (INF, "infinite"),
    ],
)
def test_percent(value, text):
    assert percent(value) == text


@given(st.floats(min_value=1e-300, max_value=1e6))
def test_percent_never_rounds_a_difference_away(value):
    text = percent(value)
    assert text.endswith("%")
    assert float(text[:-1]) == pytest.approx(100 * value, rel=0.5)
    assert float(text[:-1]) > 0


# ---- the text


def test_the_text_ends_in_one_newline_and_says_that_nothing_ran_on_hardware():
    text = table.render(result())
    assert text.endswith("\n")
    assert not text.endswith("\n\n")
    assert "EMULATED on cpu: no FP4 kernel ran" in text


@pytest.mark.parametrize(
    ("verdict", "word"), [(Verdict.GOOD, "good"), (Verdict.FINDING, "FINDING")]
)
def test_the_verdict_is_a_line(verdict, word):
    (line,) = [x for x in table.render(result(verdict=verdict)).splitlines() if "VERDICT" in x]
    assert line.startswith(f"VERDICT  {word}")


def test_an_exact_arm_is_called_exact():
    text = table.render(result())
    line = line_with(text, "static", " fix ")
    assert " exact " in line
    assert line.endswith(" none")
    assert "gate fix at most 1.00%: passed, exact at every row count" in text


def test_an_arm_that_is_not_finite():
    bad = Distance(NAN, NAN)
    broken = arm(1, fidelity=bad, true_error=bad, published=bad)
    gate = GateOutcome(Arm.BAKED, 0.01, NAN, 1, False, "the output is not finite")
    text = table.render(result(results=(broken,), families=(family(1),), gates=(gate,)))
    assert line_with(text, "wrapper-trt").count("not finite") == 3
    assert "gate baked at most 1.00%: FAILED, the output is not finite" in text
    assert "not finite" in line_with(text, "baked moves the output")
    assert "nan" not in text


def test_an_arm_infinitely_far_from_a_zero_reference():
    far = Distance(INF, NAN)
    text = table.render(
        result(
            results=(arm(1, fidelity=far, true_error=far, published=far),),
            families=(family(1, true_error=far, input_scales=INF),),
            gates=(GateOutcome(Arm.BAKED, 0.01, INF, 1, False, "above the limit at 1 rows"),),
        )
    )
    assert line_with(text, "wrapper-trt").count("infinite") == 3
    assert "gate baked at most 1.00%: FAILED, worst infinite at 1 row" in text
    assert not re.search(r"\binf\b|\bnan\b", text)


def test_an_unavailable_arm_has_its_reason_in_the_notes():
    text = table.render(result(results=(arm(1), unavailable(1, Arm.FIX, "decode goes to CUTLASS"))))
    assert line_with(text, "cutlass").endswith("no figures: see notes")
    assert "  - fix: decode goes to CUTLASS" in text.splitlines()


def test_a_note_is_given_once_for_the_arms_that_share_it():
    trapped = [
        arm(rows, which, trap="misread") for rows in (1, 2) for which in (Arm.BAKED, Arm.ALPHAS)
    ]
    text = table.render(result(results=tuple(trapped), families=(family(1), family(2))))
    assert "  - baked, alphas: misread" in text.splitlines()


def test_trapped_rows_are_told_apart_from_the_cost_of_the_scales():
    arms = (arm(1, error=1.0, trap="misread"), arm(8, error=0.25))
    text = table.render(result(results=arms))
    assert "true error" in line_with(text, "baked moves", "25.0%")
    assert "misreads" in line_with(text, "baked at 1 row moves", "100.0%")


@pytest.mark.parametrize("verdict", Verdict)
def test_nothing_but_unavailable_arms(verdict):
    nothing = result(
        verdict=verdict,
        results=(unavailable(1, Arm.FIX, "no form"), unavailable(1, Arm.UNIT, "no form")),
        families=(),
        gates=(),
    )
    assert "  - fix, unit: no form" in table.render(nothing).splitlines()
    assert document.to_document(nothing)["results"][0]["fidelity"] is None
    ET.fromstring(plot.to_svg(nothing))


def test_no_results_at_all():
    nothing = result(results=(), families=(), gates=())
    assert "VERDICT  good" in table.render(nothing)
    assert document.to_document(nothing)["results"] == []
    ET.fromstring(plot.to_svg(nothing))


def test_scale_damage_is_a_row_for_each_projection():
    text = table.render(result())
    fc1 = re.split(r"  +", line_with(text, "FC1"))
    assert fc1 == [
        "FC1",
        "1.0e-05 to 2.0e-05",
        "1,234,567",
        "25.0%",
        "50.0%",
        "12.5%",
        "100.0%",
        "3 (20.0%)",
    ]
    fc2 = re.split(r"  +", line_with(text, "FC2"))
    assert fc2 == ["FC2", "1.0e-03", "96", "0", "0", "0", "0", "0 (0)"]


def test_a_bake_to_nan_is_infinite_damage():
    text = table.render(result(fc1=replace(DAMAGE, mean_relative_error=INF)))
    assert "infinite" in line_with(text, "FC1")


def test_the_view_at_its_own_magnitude_is_there_only_with_one():
    own = OwnMagnitude(fc1=EVEN, fc2=EVEN, baked=arm(8, error=0.079))
    assert "own magnitude" not in table.render(result())
    text = table.render(result(own_magnitude=own))
    assert "FC1, own magnitude" in text
    assert "the same layer loses 7.90%" in text


def test_padding_is_told_only_where_there_is_some():
    whole = {**SHAPE, "logical_hidden": 640}
    assert "hidden 640 (zero-padded from 576), intermediate 256, 6" in table.render(result())
    assert "zero-padded" not in table.render(result(shape=whole))


def test_exceptions_of_the_contract_are_listed():
    text = table.render(result(contract_exceptions=("first one", "second one")))
    assert {"  - first one", "  - second one"} <= set(text.splitlines())
    assert "not modelled" in text
    assert "not modelled" not in table.render(result())


def test_cells_of_a_column_end_or_begin_together():
    lines = table.render(result()).splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("rows  kernel  arm"))
    dashes = lines[start + 1]
    edges = [match.span() for match in re.finditer("-+", dashes)]
    gaps = [(end, begin) for (_, end), (begin, _) in itertools.pairwise(edges)]
    for line in lines[start : lines.index("", start)]:
        assert all(line[end:begin].strip() == "" for end, begin in gaps)


HOSTILE = (
    "\x1b[2J\x1b[31mred",
    "\x1b]0;window title\x07",
    "\x9b31m an eight-bit escape",
    "a\0b",
    "FINDING\b\b\b\b\b\b\bgood",
    "honest\rforged",
    "x\nVERDICT  forged",
    "x\x85VERDICT  forged",
    "x\u2028VERDICT  forged",
    "\x7f",
)


def _with_text(where: str, text: str) -> LayerCheckResult:
    if where == "reason":
        return result(gates=(GateOutcome(Arm.FIX, 0.01, NAN, 1, False, text),))
    if where in ("unavailable", "trap", "note"):
        return result(results=(arm(1, **{where: text}),), families=(family(1),))
    if where == "contract_exceptions":
        return result(contract_exceptions=(text,))
    return result(**{where: text})


@pytest.mark.parametrize(
    "where",
    [
        "source",
        "inputs",
        "plan",
        "flashinfer",
        "unavailable",
        "trap",
        "note",
        "reason",
        "contract_exceptions",
    ],
)
def test_no_control_character_reaches_the_terminal(where):
    for text in HOSTILE:
        rendered = table.render(_with_text(where, text))
        control = {c for c in rendered if unicodedata.category(c) in ("Cc", "Zl", "Zp")} - {"\n"}
        assert control == set(), ascii(text)
        verdicts = [line for line in rendered.splitlines() if line.startswith("VERDICT")]
        assert len(verdicts) == 1, ascii(text)
        assert verdicts[0].startswith("VERDICT  good ("), ascii(text)


def test_names_in_any_script_are_kept():
    name = "Modèle-Ω/層-1 🚀"
    assert name in table.render(result(source=name))


# ---- JSON

TOP = {
    "schema",
    "preset",
    "real_kernels",
    "verdict",
    "source",
    "layer",
    "flashinfer",
    "evidence",
    "input_scales",
    "scales",
    "results",
    "families",
    "gates",
    "findings",
    "own_magnitude",
    "versions",
    "seed",
}
LAYER = {*SHAPE, "inputs"}
FLASHINFER = {"version", "contract", "not_modelled", "fix"}
SCALES = {
    "blocks",
    "zero_fraction",
    "subnormal_fraction",
    "mean_relative_error",
    "max_relative_error",
    "worst_expert",
    "worst_expert_error",
    "weight_scale_2_min",
    "weight_scale_2_max",
}
RESULT = {
    "rows",
    "arm",
    "report_name",
    "strategy",
    "kernel",
    "unavailable",
    "fidelity",
    "output_distance",
    "true_error",
    "published",
    "noise",
    "codes_differing",
    "first_divergence",
    "trap",
    "note",
}
DISTANCE = {"relative_rms", "sqnr_db", "cosine", "finite"}
FAMILY = {
    "rows",
    "kernel",
    "true_error",
    "noise",
    "published",
    "layer_against_file_input_scales",
}
GATE = {"arm", "limit", "worst", "worst_rows", "passed", "reason"}


def parse(checked: LayerCheckResult) -> dict[str, Any]:
    """Strictly: the words NaN and Infinity are Python's, not JSON's."""

    def refuse(word: str) -> None:
        pytest.fail(f"not JSON: {word}")

    text = document.to_json(checked)
    assert text.endswith("}\n")
    return json.loads(text, parse_constant=refuse)


def test_the_document_has_the_documented_keys():
    own = OwnMagnitude(fc1=DAMAGE, fc2=EVEN, baked=arm(8))
    read = parse(result(own_magnitude=own))
    assert set(read) == TOP
    assert set(read["layer"]) == LAYER
    assert set(read["flashinfer"]) == FLASHINFER
    assert set(read["scales"]) == {"fc1", "fc2"}
    assert set(read["scales"]["fc1"]) == SCALES
    assert set(read["own_magnitude"]) == {"scales", "baked"}
    assert set(read["own_magnitude"]["scales"]["fc2"]) == SCALES
    for record in [*read["results"], read["own_magnitude"]["baked"]]:
        assert set(record) == RESULT
        for distance in ("fidelity", "output_distance", "true_error", "published"):
            assert set(record[distance]) == DISTANCE
    for record in read["families"]:
        assert set(record) == FAMILY
        assert set(record["true_error"]) == DISTANCE
        assert set(record["published"]) == {"evaluation_order", "summation"}
    assert [set(record) for record in read["gates"]] == [GATE]


def test_the_document_holds_the_values_as_fractions():
    read = parse(result(contract_exceptions=("one",)))
    assert read["schema"] == "trtllm-b12x-fix/check-layer/1"
    assert (read["verdict"], read["source"], read["seed"]) == ("good", "a layer", 0)
    assert read["layer"] == {**SHAPE, "inputs": "random"}
    assert read["flashinfer"] == {
        "version": "0.6.18",
        "contract": "data",
        "not_modelled": ["one"],
        "fix": "alphas: a reason",
    }
    assert "no FP4 kernel ran" in read["evidence"]
    assert read["input_scales"] == "layer"
    assert read["scales"]["fc1"]["zero_fraction"] == 0.25
    assert read["scales"]["fc1"]["blocks"] == 1_234_567
    baked = read["results"][1]
    assert (baked["rows"], baked["arm"], baked["report_name"]) == (1, "baked", "wrapper-trt")
    assert (baked["strategy"], baked["kernel"]) == ("baked", "static")
    assert baked["fidelity"]["relative_rms"] == 0.25
    assert baked["fidelity"]["sqnr_db"] == pytest.approx(12.0412, abs=1e-4)
    assert baked["fidelity"]["cosine"] == 0.96
    assert baked["fidelity"]["finite"] is True
    assert baked["output_distance"]["relative_rms"] == 0.2525
    assert (baked["noise"], baked["codes_differing"]) == (0.0057, 17)
    assert baked["first_divergence"] == "fc1"
    assert (baked["unavailable"], baked["trap"], baked["note"]) == (None, None, None)
    assert read["families"][1]["published"] == {"evaluation_order": 0.002, "summation": 0.0048}
    assert read["families"][1]["layer_against_file_input_scales"] == 0.0582
    assert read["gates"] == [
        {
            "arm": "fix",
            "limit": 0.01,
            "worst": 0.0,
            "worst_rows": 1,
            "passed": True,
            "reason": None,
        }
    ]
    assert read["own_magnitude"] is None
    assert read["versions"] == {"torch": "2.13.0"}


def test_an_exact_arm_has_distance_zero_and_no_sqnr():
    exact = parse(result())["results"][0]
    assert exact["fidelity"] == {
        "relative_rms": 0.0,
        "sqnr_db": None,
        "cosine": 0.96,
        "finite": True,
    }
    assert exact["first_divergence"] is None


def test_values_that_json_lacks_are_null_and_marked():
    bad, far = Distance(NAN, NAN), Distance(INF, NAN)
    read = parse(
        result(
            results=(arm(1, fidelity=bad, true_error=far, published=bad),),
            families=(family(1, true_error=bad, noise=NAN, evaluation_order=INF, summation=NAN),),
            gates=(GateOutcome(Arm.BAKED, 0.01, NAN, 0, False, "the arm was not run"),),
            fc1=replace(DAMAGE, mean_relative_error=INF, max_relative_error=NAN),
        )
    )
    broken = read["results"][0]
    assert broken["fidelity"] == dict.fromkeys(DISTANCE, None) | {"finite": False}
    assert broken["true_error"]["relative_rms"] is None
    assert broken["noise"] is None
    assert read["families"][0]["published"] == {"evaluation_order": None, "summation": None}
    assert read["scales"]["fc1"]["mean_relative_error"] is None
    assert read["scales"]["fc1"]["max_relative_error"] is None
    gate = read["gates"][0]
    assert (gate["worst"], gate["worst_rows"]) == (None, None)
    assert gate["reason"] == "the arm was not run"


def test_a_limit_without_bound_is_still_json():
    gate = GateOutcome(Arm.BAKED, INF, 0.25, 1, True, "")
    assert parse(result(gates=(gate,)))["gates"][0]["limit"] is None


def test_an_unavailable_arm_has_a_reason_and_no_figures():
    record = parse(result(results=(unavailable(4, Arm.FIX, "no form"),), families=()))["results"][0]
    assert record["unavailable"] == "no form"
    assert record["kernel"] is None
    assert all(record[key] is None for key in ("fidelity", "true_error", "published", "noise"))


@pytest.mark.parametrize("text", [*HOSTILE, '層 🚀 "quoted" \\ </script>', "\udcff"], ids=ascii)
def test_any_name_survives_json(text):
    written = document.to_json(result(source=text))
    assert parse(result(source=text))["source"] == text
    assert all(c == "\n" or " " <= c <= "~" for c in written)


# ---- SVG


def svg_text(svg: str) -> str:
    """All text that a viewer shows."""
    return "\n".join(
        "".join(element.itertext()) for element in ET.fromstring(svg).iter(f"{SVG}text")
    )


def assert_self_contained(svg: str) -> None:
    """Nothing that a viewer would fetch or run."""
    for element in ET.fromstring(svg).iter():
        assert element.tag.rpartition("}")[2] not in {"script", "image", "foreignObject", "iframe"}
        for name, value in element.attrib.items():
            local = name.rpartition("}")[2]
            assert not local.lower().startswith("on")
            assert local != "href" or value.startswith("#")
            assert all(url.startswith("#") for url in re.findall(r"url\(([^)]*)\)", value))
        if element.tag == f"{SVG}style":
            assert not re.search(r"@import|url\(", element.text or "")


def test_the_figure_is_self_contained_and_labelled():
    svg = plot.to_svg(result())
    assert_self_contained(svg)
    shown = svg_text(svg)
    for text in ("a layer", "FlashInfer 0.6.18, emulated", "fix", "baked", "exact scales"):
        assert text in shown
    for text in ("fidelity", "true error", "rows (tokens)", "relative RMS"):
        assert text in shown


def test_the_figure_depends_on_the_result_alone():
    assert plot.to_svg(result()) == plot.to_svg(result())
    assert plot.to_svg(result()) != plot.to_svg(result(flashinfer="0.7.2"))


def test_drawing_changes_no_global_setting():
    before = dict(mpl.rcParams)
    plot.to_svg(result())
    assert dict(mpl.rcParams) == before


@pytest.mark.parametrize(
    "name",
    [
        "costs $5",
        "$x$ and $y$",
        r"$\frac{",
        r"\$x\$",
        "<script>alert(1)</script>",
        "</text><image href='http://example.org/x.png'/>",
        "&lt;b&gt; & ]]> <!-- --> \"double\" 'single' a_b^c {d} % Modèle Ω",
    ],
)
def test_a_name_is_shown_as_it_is(name):
    svg = plot.to_svg(result(source=name))
    assert_self_contained(svg)
    assert name in svg_text(svg)


def test_a_name_of_several_lines_is_shown_whole():
    shown = svg_text(plot.to_svg(result(source="first\nsecond")))
    assert "first" in shown
    assert "second" in shown


@pytest.mark.filterwarnings("ignore:Glyph")
@pytest.mark.parametrize(
    "text",
    ["".join(map(chr, [*range(0x20), *range(0x7F, 0xA0)])), "\ufffe\uffff", "\udcff"],
    ids=["control", "noncharacter", "surrogate"],
)
def test_no_name_breaks_the_xml(text):
    svg = plot.to_svg(result(source=f"before {text} after"))
    svg.encode("utf-8")
    assert_self_contained(svg)
    shown = svg_text(svg)
    assert "before" in shown
    assert "after" in shown


@pytest.mark.filterwarnings("error")
def test_a_glyph_that_the_font_lacks_is_no_warning_on_the_terminal():
    svg = plot.to_svg(result(source="層 🚀"))
    assert "層 🚀" in svg_text(svg)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("error", [0.0, NAN, INF, 1e-30, 1e30])
def test_no_value_breaks_the_figure(error):
    distance = Distance(error, NAN)
    drawn = result(
        results=(arm(1, fidelity=distance, true_error=distance), arm(8)),
        families=(family(1, true_error=distance), family(8)),
    )
    assert_self_contained(plot.to_svg(drawn))


def test_without_matplotlib_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(MissingDependencyError, match=r"--plot needs matplotlib: pip install"):
        plot.to_svg(result())

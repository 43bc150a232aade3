"""Reading a quantization.py with ``ast``: what bakes, what is exempt, and what is not known."""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path

import pytest

from tests.trtllm.stand_in import Era, write_stand_in
from trtllm_b12x_fix.errors import B12xFixError
from trtllm_b12x_fix.integrations import tensorrt_llm, trtllm_contract, trtllm_source
from trtllm_b12x_fix.integrations.installed import Kind, find_package
from trtllm_b12x_fix.integrations.trtllm_dataflow import INPUT_GLOBAL_SCALE
from trtllm_b12x_fix.integrations.trtllm_source import (
    CLASS,
    ScaleHandling,
    SourceError,
    SourceReading,
    ToldSize,
    read_source,
    source_files,
)

BAKED_LINE = "sf = (module.w2_weight_scale.float() * factor).to(torch.float8_e4m3fn)"


def test_names_are_those_that_the_fix_uses():
    assert tensorrt_llm.CLASS == trtllm_source.CLASS
    assert tensorrt_llm.HOOKS == trtllm_source.HOOKS
    assert trtllm_contract.INPUT_GLOBAL_SCALE == INPUT_GLOBAL_SCALE


@pytest.mark.parametrize("era", Era)
def test_every_era_is_read_as_it_is(tmp_path, era):
    facts = era.value
    write_stand_in(tmp_path, era)
    ((module, path),) = source_files(tmp_path / "tensorrt_llm")
    reading = read_source(path, module)
    assert reading.module == facts.quantization_module
    assert reading.hook == facts.hook
    wanted = ScaleHandling.BAKES if facts.bakes else ScaleHandling.INTACT
    assert reading.handling is wanted
    assert reading.quant_mode == facts.tensor_sizes
    assert reading.told_size is (ToldSize.TENSORS if facts.tensor_sizes else ToldSize.LOGICAL)
    # The eras that know W4A16 are those that pass the tensors' sizes.
    assert reading.w4a16_exempt == (facts.tensor_sizes if facts.bakes else None)
    assert (reading.line is None) == (not facts.bakes)
    if reading.line is not None:
        assert "float8_e4m3fn" in path.read_text().splitlines()[reading.line - 1]


def read(folder: Path, body: str, *, hook: str = "transform_weights", more: str = ""):
    """A class with one method of that body, and more of the module."""
    method = textwrap.indent(textwrap.dedent(body).strip(), " " * 8)
    text = (
        f"{textwrap.dedent(more)}\nclass {CLASS}(Base):\n    def {hook}(self, module):\n{method}\n"
    )
    path = folder / "quantization.py"
    path.write_text(text)
    return read_source(path, "tensorrt_llm.quantization")


@pytest.mark.parametrize(
    "body",
    [
        BAKED_LINE,
        BAKED_LINE.replace(".to(torch.float8_e4m3fn)", ".to(dtype=torch.float8_e4m3fn)"),
        BAKED_LINE.replace(".to(", ".type("),
        "sf = torch.mul(module.w3_w1_weight_scale.float(), f).to(torch.float8_e4m3fn)",
        "sf = module.w2_weight_scale.float().mul_(f).to(torch.float8_e4m3fn)",
        """
        fp8 = torch.float8_e4m3fn
        scale = module.w2_weight_scale.view(fp8).float()
        scale *= factor
        sf = scale.to(fp8)
        """,
        """
        a, b = module.w2_weight_scale.view(torch.float8_e4m3fn), factor
        product = a.float() * b.view(-1, *([1] * 2))
        if wide:
            sf = a
        else:
            sf = product.to(torch.float8_e4m3fn)
        module._b12x_weights = dict(w2_weight_sf=sf)
        """,
        """
        for scale, factor in zip((module.w3_w1_weight_scale,), factors):
            out.append((scale.float() * factor).to(torch.float8_e4m3fn))
        """,
        """
        if (product := module.w2_weight_scale.float() * f) is not None:
            sf = product.to(torch.float8_e4m3fn)
        """,
    ],
)
def test_these_bake(tmp_path, body):
    assert read(tmp_path, body).handling is ScaleHandling.BAKES


@pytest.mark.parametrize(
    "call", ["self.bake(module.w2_weight_scale, f)", "bake(m.w2_weight_scale)"]
)
def test_a_helper_that_bakes_is_followed(tmp_path, call):
    helper = "def bake(scale, factor=1):\n    return (scale * factor).to(torch.float8_e4m3fn)\n"
    reading = read(tmp_path, f"sf = {call}", more=helper)
    assert reading.handling is ScaleHandling.BAKES


@pytest.mark.parametrize(
    "body",
    [
        "sf = module.w2_weight_scale.view(torch.float8_e4m3fn)",
        "sf = (module.w2_weight_scale.float() * factor).to(torch.float32)",
        # A product of sizes, and a cast of what nothing was multiplied into.
        """
        n = module.w2_weight.shape[2] * 16
        sf = module.w2_weight_scale.reshape(n).to(torch.float8_e4m3fn)
        """,
        """
        alpha = module.fc2_alpha * module.fc2_input_scale
        sf = module.w2_weight_scale.to(torch.float8_e4m3fn)
        """,
        # Its result is stored on the module; that makes no other attribute of it scaled.
        """
        module.other = module.w2_weight_scale * 2
        sf = module.w3.to(torch.float8_e4m3fn)
        """,
    ],
)
def test_these_do_not_bake(tmp_path, body):
    reading = read(tmp_path, body)
    assert reading.handling is ScaleHandling.UNKNOWN
    assert "neither bakes" in reading.reason
    told = read(tmp_path, f"{textwrap.dedent(body)}\nmodule.w = dict(input_global_scale=s)")
    assert told.handling is ScaleHandling.UNKNOWN
    assert "what is in _b12x_weights" in told.reason


LAYOUT = "from flashinfer.cute_dsl.utils import convert_sf_to_mma_layout"
INTACT = f"""
{LAYOUT}
fp8 = torch.float8_e4m3fn
scales = [scale.view(fp8) for scale in (module.w3_w1_weight_scale, module.w2_weight_scale.data)]
first = convert_sf_to_mma_layout(scales[0], m=1, k=1, num_groups=1)
second = module.w2_weight_scale.reshape(3, -1)
given = (1.0 / module.fc31_input_scale).float()
module._b12x_weights = {{
    "w1_weight_sf": first,
    "w2_weight_sf": second,
    "input_global_scale": given,
}}
"""


def changed(old: str, new: str) -> str:
    assert old in INTACT
    return INTACT.replace(old, new)


@pytest.mark.parametrize(
    "body",
    [
        INTACT,
        changed("fp8 = ", "super().transform_weights(module)\nfp8 = "),
        changed("= (1.0 / module.fc31_input_scale).float()", "= module.fc31_input_scale"),
        f"if module._other is None:\n    return\n{INTACT}",
        """
        module._b12x_weights = dict(
            w1_weight_sf=module.w3_w1_weight_scale.view(torch.float8_e4m3fn),
            w2_weight_sf=module.w2_weight_scale,
            input_global_scale=1 / module.fc31_input_scale,
        )
        """,
    ],
)
def test_these_are_intact(tmp_path, body):
    reading = read(tmp_path, body)
    assert reading.handling is ScaleHandling.INTACT, reading.reason


BAKED_COPY = "torch.empty_like(scales[0]).copy_(scales[0].float() * f)"


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (changed('scale": given', 'scale": None'), "neither bakes"),
        (changed('scale": given', 'scale": given if new else None'), "made of fc31_input_scale"),
        (changed("given = (", "given = None if old else ("), "made of fc31_input_scale"),
        (changed("given = (", "given = None\nif new: given = ("), "made of fc31_input_scale"),
        (changed('scale": given', 'scale": unheard_of'), "made of fc31_input_scale"),
        (changed("scales[0], m", f"{BAKED_COPY}, m"), "w1_weight_sf is"),
        (changed("scales[0], m", "bake(scales[0]), m"), "w1_weight_sf is"),
        (changed("scales[0], m", "scales[0].half(), m"), "w1_weight_sf is"),
        (changed("first = ", "first = other\nfirst = "), "w1_weight_sf is"),
        (changed("first = ", "with bake() as first: pass\nfirst = "), "w1_weight_sf is"),
        (changed(LAYOUT, "from .ours import convert_sf_to_mma_layout"), "w1_weight_sf is"),
        (changed("second = ", "second = other if old else "), "w2_weight_sf is"),
        (changed('"w2_weight_sf": second,', ""), "w2_weight_sf is"),
        (changed("given = (", "scales[0].mul_(f)\ngiven = ("), "that line 9"),
        (changed("given = (", "scales[0] = baked\ngiven = ("), "that line 9"),
        (changed("given = (", "scales[0][:] = baked\ngiven = ("), "that line 9"),
        (changed("given = (", "bake(scales)\ngiven = ("), "that line 9"),
        (changed("given = (", "bake(module)\ngiven = ("), "that line 9"),
        (changed("given = (", "self.bake(layer=module)\ngiven = ("), "that line 9"),
        (changed("given = (", "torch.add(a, b, out=second)\ngiven = ("), "that line 9"),
        (changed("given = (", "module.w2_weight_scale = baked\ngiven = ("), "that line 9"),
        (changed("given = (", "module.w2_weight_scale.data = baked\ngiven = ("), "that line 9"),
        (f"{INTACT}module._b12x_weights['w1_weight_sf'] = baked", "what is in"),
        (f"{INTACT}getattr(module, '_b12x_weights').update(baked)", "what is in"),
        (changed('"w1_weight_sf": first', '**baked, "w1_weight_sf": first'), "what is in"),
        (changed("module._b12x_weights = {", "w = module._b12x_weights = {"), "what is in"),
    ],
)
def test_what_is_not_certainly_a_view_is_unknown(tmp_path, body, words):
    reading = read(tmp_path, body)
    assert reading.handling is ScaleHandling.UNKNOWN
    assert words in reading.reason


@pytest.mark.parametrize(
    ("statement", "handling"),
    [
        ("module._b12x_weights = None", ScaleHandling.INTACT),
        ("if module._b12x_weights is None: return", ScaleHandling.INTACT),
        ("module._b12x_weights['w1_weight_sf'] = 1", ScaleHandling.UNKNOWN),
        ("module._b12x_weights.update(x)", ScaleHandling.UNKNOWN),
    ],
)
def test_other_functions_that_use_the_entries(tmp_path, statement, handling):
    more = f"def finish(module):\n    {statement}\n"
    assert read(tmp_path, INTACT, more=more).handling is handling


def test_a_value_of_none_carries_nothing(tmp_path):
    for more in ("w = {'input_global_scale': None}", "w = dict(input_global_scale=None)"):
        assert read(tmp_path, f"{BAKED_LINE}\n{more}").handling is ScaleHandling.BAKES


def test_a_file_with_both_ways_is_not_judged(tmp_path):
    reading = read(tmp_path, f"{BAKED_LINE}\nw = {{'input_global_scale': s}}")
    assert reading.handling is ScaleHandling.UNKNOWN
    assert "at run time" in reading.reason


@pytest.mark.parametrize(
    ("body", "exempt"),
    [
        (BAKED_LINE, False),
        (f"if module.quant_config is not None:\n    {BAKED_LINE}", False),
        (f"if not module.has_w4a16_nvfp4():\n    {BAKED_LINE}", True),
        (f"wo = algo == QuantAlgo.W4A16_NVFP4\nif wo:\n    sf = 1\nelse:\n    {BAKED_LINE}", True),
        (f"if mode == 'w4a16':\n    return\n{BAKED_LINE}", True),
        (f"{BAKED_LINE}\nif mode == 'w4a16':\n    return", False),
        (f"if mode == 'w4a16':\n    note = 1\n{BAKED_LINE}", False),
        (f"if not w4a16:\n    {BAKED_LINE}\n{BAKED_LINE}", False),
    ],
)
def test_w4a16(tmp_path, body, exempt):
    reading = read(tmp_path, body)
    assert reading.handling is ScaleHandling.BAKES
    assert reading.w4a16_exempt is exempt


def test_a_helper_called_under_the_condition_is_exempt(tmp_path):
    helper = "def bake(scale):\n    return (scale * 2).to(torch.float8_e4m3fn)\n"
    call = "sf = bake(module.w2_weight_scale)"
    assert read(tmp_path, f"if not w4a16:\n    {call}", more=helper).w4a16_exempt is True
    assert read(tmp_path, call, more=helper).w4a16_exempt is False


@pytest.mark.parametrize(
    ("size", "told"),
    [
        ("module.intermediate_size_per_partition", ToldSize.LOGICAL),
        ("module.w2_weight.shape[2] * 16", ToldSize.TENSORS),
        ("n", ToldSize.TENSORS),
        ("unheard_of", ToldSize.UNKNOWN),
    ],
)
def test_which_size_the_wrapper_is_told(tmp_path, size, told):
    body = f"""
    hidden, n = module.w2_weight.shape
    wrapper = B12xMoEWrapper(intermediate_size={size})
    """
    reading = read(tmp_path, body)
    assert reading.told_size is told
    assert not reading.quant_mode


def test_the_newer_hook_counts(tmp_path):
    old = f"    def post_load_weights(self, module):\n        {BAKED_LINE}\n"
    path = tmp_path / "quantization.py"
    new = f"    def transform_weights(self, module):\n{textwrap.indent(INTACT, ' ' * 8)}"
    path.write_text(f"class {CLASS}:\n{old}{new}")
    assert read_source(path, "m").handling is ScaleHandling.INTACT
    path.write_text(f"class {CLASS}:\n{old}")
    assert read_source(path, "m").handling is ScaleHandling.BAKES


def test_without_class_or_hook(tmp_path):
    path = tmp_path / "quantization.py"
    path.write_text("class Other:\n    pass\n")
    assert read_source(path, "m") == SourceReading("m", path, ScaleHandling.NO_CLASS)
    reading = read(tmp_path, BAKED_LINE, hook="load")
    assert reading.handling is ScaleHandling.UNKNOWN
    assert "transform_weights nor post_load_weights" in reading.reason


@pytest.mark.parametrize(
    "content",
    [
        b"def broken(:\n",
        b"name = '\xff'\n",
        b"\0",
        f"class {CLASS}: pass\nclass {CLASS}: pass\n".encode(),
    ],
    ids=["syntax", "not UTF-8", "null byte", "twice"],
)
def test_a_damaged_file_is_named(tmp_path, content):
    path = tmp_path / "quantization.py"
    path.write_bytes(content)
    with pytest.raises(SourceError, match=r"quantization\.py"):
        read_source(path, "m")


@pytest.mark.timeout(20)
def test_a_pipe_is_refused_and_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "quantization.py")
    with pytest.raises(SourceError, match=r"quantization\.py: cannot be read: it is not a regular"):
        read_source(tmp_path / "quantization.py", "m")


def test_a_file_that_is_not_there_is_named(tmp_path):
    with pytest.raises(B12xFixError, match="No such file"):
        read_source(tmp_path / "quantization.py", "m")


# ---- where packages are


@pytest.fixture
def site(tmp_path, monkeypatch) -> Path:
    folder = tmp_path / "site-packages"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    return folder


def bring(site: Path, *, poison: str = "raise SystemExit('imported')\n") -> Path:
    package = site / "poisoned_package"
    package.mkdir()
    (package / "__init__.py").write_text(poison)
    return package


def record(site: Path, version: str, *, editable: bool = False) -> None:
    folder = site / f"poisoned_package-{version}.dist-info"
    folder.mkdir(parents=True)
    (folder / "METADATA").write_text(f"Name: poisoned-package\nVersion: {version}\n")
    if editable:
        origin = {"url": "file:///nowhere", "dir_info": {"editable": True}}
        (folder / "direct_url.json").write_text(json.dumps(origin))


def look() -> object:
    return find_package("poisoned_package", "poisoned-package")


def test_an_installed_package_is_not_imported(site):
    package = bring(site)
    record(site, "1.0")
    found = look()
    assert (found.kind, found.folder, found.version) == (Kind.INSTALLED, package, "1.0")
    assert found.notes() == ()


def test_absent_and_leftover(site):
    assert look().kind is Kind.ABSENT
    assert look().notes() == ()
    (site / "poisoned_package" / "inner").mkdir(parents=True)
    found = look()
    assert found.kind is Kind.LEFTOVER
    assert not found.importable
    assert "without __init__.py" in found.notes()[0]


def test_metadata_without_a_package(site):
    record(site, "1.0")
    assert "cannot be imported" in look().notes()[0]


def test_a_single_module(site):
    (site / "poisoned_package.py").write_text("raise SystemExit('imported')\n")
    assert look().kind is Kind.SINGLE_MODULE


def test_a_source_checkout(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(tmp_path))
    bring(tmp_path)
    found = look()
    assert found.kind is Kind.SOURCE
    first, second = found.notes()
    assert "source checkout" in first
    assert "no metadata" in second


def test_an_editable_install(tmp_path, site, monkeypatch):
    checkout = tmp_path / "checkout"
    checkout.mkdir()
    (checkout / "setup.py").touch()
    monkeypatch.syspath_prepend(str(checkout))
    bring(checkout)
    record(site, "2.0", editable=True)
    found = look()
    assert (found.kind, found.version) == (Kind.EDITABLE, "2.0")
    assert "editable install" in found.notes()[0]


@pytest.mark.parametrize(
    ("file", "content", "version"),
    [
        ("METADATA", b"Name: \xff\nVersion: 1.0\n", "of unknown version"),
        ("direct_url.json", b'"\xff"', "1.0"),
        ("direct_url.json", b"[" * 100_000, "1.0"),
        ("direct_url.json", b"{", "1.0"),
    ],
)
def test_damaged_metadata_is_told(site, file, content, version):
    bring(site)
    record(site, "1.0")
    (site / "poisoned_package-1.0.dist-info" / file).write_bytes(content)
    found = look()
    assert (found.kind, found.version) == (Kind.INSTALLED, version)
    assert [note for note in found.notes() if "is damaged" in note and file in note]


def test_several_distributions(site, tmp_path, monkeypatch):
    bring(site)
    record(tmp_path / "older", "1.0")
    record(site, "2.0")
    monkeypatch.syspath_prepend(str(tmp_path / "older"))
    found = look()
    assert {one.version for one in found.distributions} == {"1.0", "2.0"}
    assert any("several distributions" in note for note in found.notes())


def test_a_finder_that_raises_is_reported(monkeypatch):
    def raise_it(*_args: object) -> None:
        raise RuntimeError("broken finder")

    monkeypatch.setattr(
        trtllm_source.find_package.__globals__["importlib"].util, "find_spec", raise_it
    )
    found = look()
    assert found.kind is Kind.UNFINDABLE
    assert "broken finder" in found.notes()[0]

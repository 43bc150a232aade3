"""doctor where vLLM is installed: a folder of its name and metadata are all it looks at."""

from __future__ import annotations

import json
import sys

import pytest

from trtllm_b12x_fix import cli
from trtllm_b12x_fix.doctor import diagnosis, environment, switch
from trtllm_b12x_fix.doctor import vllm as doctor_vllm
from trtllm_b12x_fix.doctor.environment import Gpu

POISON = "raise SystemExit('imported')\n"


class Point:
    """An entry point, as metadata has it."""

    name = doctor_vllm.PLUGIN


@pytest.fixture
def vllm(tmp_path, monkeypatch):
    """vLLM 0.33.0 and nothing else, on no GPU; the plugin on record."""
    for name in (*switch.SHOWN, doctor_vllm.ALLOWED):
        monkeypatch.delenv(name, raising=False)
    site = tmp_path / "site-packages"
    (site / "vllm").mkdir(parents=True)
    (site / "vllm" / "__init__.py").write_text(POISON)
    (site / "vllm-0.33.0.dist-info").mkdir()
    (site / "vllm-0.33.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: vllm\nVersion: 0.33.0\n"
    )
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setattr(environment, "read_gpus", lambda: ((), "nobody"))
    monkeypatch.setattr(doctor_vllm.metadata, "entry_points", lambda group: [Point])
    monkeypatch.delitem(sys.modules, "vllm", raising=False)


def examine(capsys) -> tuple[int, dict]:
    code = cli.main(["doctor", "--json", "-"])
    document = json.loads(capsys.readouterr().out)
    assert cli.main(["doctor"]) == code == document["exit_code"]
    assert "vllm" in capsys.readouterr().out
    assert "vllm" not in sys.modules
    return code, document


@pytest.mark.usefixtures("vllm")
def test_an_installed_plugin_is_on(capsys):
    code, document = examine(capsys)
    assert code == 0
    assert document["vllm"]["version"] == "0.33.0"
    assert "vLLM 0.33.0 bakes" in document["reason"]
    assert "the plugin is on" in document["reason"]


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("TRTLLM_B12X_FIX", "off", "TRTLLM_B12X_FIX=off"),
        ("TRTLLM_B12X_FIX_ACT_SCALE", "half", "'half' is not known"),
        ("VLLM_PLUGINS", "lora_filesystem_resolver", "leaves trtllm_b12x_fix out"),
    ],
)
@pytest.mark.usefixtures("vllm")
def test_what_switches_it_off_is_named(capsys, monkeypatch, variable, value, words):
    monkeypatch.setenv(variable, value)
    code, document = examine(capsys)
    assert code == 1
    assert words in document["reason"]
    assert any("--moe-backend" in one for one in document["to_do"])


@pytest.mark.usefixtures("vllm")
def test_a_package_that_names_no_plugin_is_off(capsys, monkeypatch):
    monkeypatch.setattr(doctor_vllm.metadata, "entry_points", lambda group: [])
    code, document = examine(capsys)
    assert code == 1
    assert "install this package again" in document["reason"]


@pytest.mark.parametrize(
    ("capability", "code"), [((9, 0), 0), ((10, 0), 1), ((12, 1), 1), (None, 1)]
)
@pytest.mark.usefixtures("vllm")
def test_only_the_gpus_it_is_for_are_concerned(capsys, monkeypatch, capability, code):
    monkeypatch.setenv("TRTLLM_B12X_FIX", "off")
    monkeypatch.setattr(environment, "read_gpus", lambda: ((Gpu("X", capability),), "test"))
    found, document = examine(capsys)
    assert found == code
    assert (document["verdict"] == diagnosis.Verdict.NOT_AFFECTED.value) == (code == 0)

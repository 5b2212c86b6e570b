"""Converted models hold the weights they were made from, as exactly as their format allows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file

from hardpoint.cli import main
from hardpoint_bench.classes import VARIANTS
from hardpoint_bench.sides import PROGRAMS
from hardpoint_bench.stored import weights_of
from tiny_llama import CONFIG, write_tiny_gguf, write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All variants of the tiny model, and the model itself, in a folder."""
    folder = tmp_path_factory.mktemp("models")
    source = write_tiny_gguf(folder / "tiny.gguf")
    command = [sys.executable, str(PROGRAMS / "convert.py"), str(source), str(folder), *VARIANTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=500)
    assert done.returncode == 0, done.stderr
    return folder


def dense(path: Path) -> dict[str, Any]:
    return {
        tensor.name: gguf.quants.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors
    }


def test_files_hold_the_same_weights(models: Path) -> None:
    exact, rounded, source = (dense(models / name) for name in ("fp32.gguf", "q8_0.gguf", "tiny.gguf"))
    assert list(exact) == list(rounded) == list(source)
    for name, values in source.items():
        np.testing.assert_array_equal(exact[name], values)
        assert np.abs(rounded[name] - values).max() <= np.abs(values).max() / 127
    assert weights_of(models / "q8_0.gguf") == "Q8_0"
    assert not (models / "unfinished").exists()


def test_files_keep_what_else_the_source_says(models: Path) -> None:
    source, converted = (gguf.GGUFReader(models / name) for name in ("tiny.gguf", "q8_0.gguf"))
    for name, field in source.fields.items():
        if not name.startswith("GGUF."):
            assert converted.fields[name].contents() == field.contents(), name


def test_folders_hold_the_same_weights(models: Path, tmp_path: Path) -> None:
    original = load_file(write_tiny_llama(tmp_path / "tiny") / "model.safetensors")
    exact = load_file(models / "hf-fp32" / "model.safetensors")
    rounded = load_file(models / "hf-w8a8" / "model.safetensors")
    assert set(exact) == set(original)
    for name, values in original.items():
        if "_proj" not in name:
            np.testing.assert_array_equal(rounded[name], exact[name])
            continue
        assert rounded[name].dtype == np.int8
        scale = rounded[f"{name}_scale"]
        assert scale.shape == (values.shape[0], 1)
        assert np.all(np.abs(rounded[name] * scale - exact[name]) <= scale * 0.501)
    config = json.loads((models / "hf-w8a8" / "config.json").read_text(encoding="utf-8"))
    assert config["quantization_config"]["quant_method"] == "compressed-tensors"
    assert config["hidden_size"] == CONFIG["hidden_size"]
    assert (models / "hf-fp32" / "tokenizer.json").is_file()


def test_only_what_is_missing_is_converted(models: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "models").mkdir()
    for name in VARIANTS[1:]:
        (tmp_path / "models" / name).touch()
    assert main(["bench", "convert", str(models / "tiny.gguf"), "--peers", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report == {"folder": str(tmp_path / "models"), "written": ["fp32.gguf"]}
    assert dense(tmp_path / "models" / "fp32.gguf").keys() == dense(models / "tiny.gguf").keys()
    assert main(["bench", "convert", str(write_tiny_llama(tmp_path / "tiny")), "--peers", str(tmp_path)]) == 1
    assert "is no GGUF file" in capsys.readouterr().err

"""Small model files, written by the reference libraries."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

from gguf_writing import LLAMA_METADATA, add_value
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.sources.package import PackageSource

GgufWriter = Callable[..., Path]

TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "a", "b", "ab", "Ġ", "c"]


def llama_tensors(seed: int = 0) -> dict[str, np.ndarray]:
    generator = np.random.default_rng(seed)
    shapes = {
        "token_embd.weight": (len(TOKENS), 32),
        "output_norm.weight": (32,),
        "blk.0.attn_norm.weight": (32,),
        "blk.0.attn_q.weight": (32, 32),
        "blk.0.attn_k.weight": (16, 32),
        "blk.0.attn_v.weight": (16, 32),
        "blk.0.attn_output.weight": (32, 32),
        "blk.0.ffn_norm.weight": (32,),
        "blk.0.ffn_gate.weight": (64, 32),
        "blk.0.ffn_up.weight": (64, 32),
        "blk.0.ffn_down.weight": (32, 64),
    }
    return {name: generator.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    metadata: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
    types: Mapping[str, gguf.GGMLQuantizationType] | None = None,
    vocabulary: Mapping[str, Any] | None = None,
    others: Mapping[str, Any] | None = None,
) -> Path:
    """``metadata`` under the architecture's prefix, ``vocabulary`` under ``tokenizer.``, ``others`` as they are;
    ``types`` quantizes."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (others or {}).items():
        add_value(writer, key, value)
    for key, value in (LLAMA_METADATA if metadata is None else metadata).items():
        add_value(writer, f"{architecture}.{key}", value)
    default = {"ggml.model": "gpt2", "ggml.pre": "smollm", "ggml.tokens": TOKENS, "ggml.merges": ["a b"],
               "ggml.token_type": [3, 3, 3, 1, 1, 1, 1, 1], "ggml.bos_token_id": 1,
               "ggml.eos_token_id": 2}  # fmt: skip
    for key, value in (default if vocabulary is None else vocabulary).items():
        add_value(writer, f"tokenizer.{key}", value)
    for name, array in (llama_tensors() if tensors is None else tensors).items():
        if types and name in types:
            writer.add_tensor(name, gguf.quants.quantize(array, types[name]), raw_dtype=types[name])
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def file_of(path: Path) -> ModelArtifact:
    return ModelArtifact(name=path.name, root=str(path.parent), files=(path.name,), source="test")


def folder_of(root: Path) -> ModelArtifact:
    files = tuple(sorted(path.name for path in root.iterdir()))
    return ModelArtifact(name=root.name, root=str(root), files=files, source="test")


@pytest.fixture
def gguf_file(tmp_path: Path) -> GgufWriter:
    """``gguf_file(**changes)`` writes a tiny Llama; see :func:`write_gguf`."""

    def write(name: str = "tiny.gguf", **changes: Any) -> Path:
        return write_gguf(tmp_path / name, **changes)

    return write


@pytest.fixture
def as_artifact() -> Callable[[Path], ModelArtifact]:
    return lambda path: folder_of(path) if path.is_dir() else file_of(path)


@pytest.fixture
def make_llama_tensors() -> Callable[..., dict[str, np.ndarray]]:
    return llama_tensors


CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "intermediate_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
    "torch_dtype": "float32",
}


@pytest.fixture
def hf_folder(tmp_path: Path) -> Callable[..., Path]:
    """``hf_folder(config={...}, tensors={...})`` writes a folder; a config field set to None is left out."""

    def write(
        config: Mapping[str, Any] | None = None, tensors: Mapping[str, np.ndarray] | None = None, name: str = "model"
    ) -> Path:
        root = tmp_path / name
        root.mkdir()
        merged = {key: value for key, value in {**CONFIG, **(config or {})}.items() if value is not None}
        (root / "config.json").write_text(json.dumps(merged))
        if tensors is None:
            tensors = {"model.norm.weight": np.ones(32, np.float32), "x": np.arange(6, dtype=np.float32).reshape(2, 3)}
        if tensors:
            save_file(dict(tensors), root / "model.safetensors")
        return root

    return write


@pytest.fixture(scope="session")
def smollm2() -> ModelArtifact:
    """The demo model; its package is part of the development environment."""
    artifact = PackageSource().resolve("smollm2", None)
    if artifact is None:
        pytest.fail("the package source does not know smollm2")
    return artifact

"""Weights are streamed: loading a model of many shards takes little memory beside the parameters themselves.

Measured in a process of its own, as the largest memory that the kernel ever saw: a shard that is kept, or a model that
lies in memory twice, would show.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import save_file

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read as Linux tells it")

HIDDEN, WIDE, LAYERS, VOCABULARY = 512, 2048, 6, 512
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": WIDE,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "vocab_size": VOCABULARY,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
}
CHILD = """
import sys
from pathlib import Path
import torch
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint.interfaces.plugin import ProcessRole, declaration_of
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_testing_torch import PlainAttentionBackend, create_model, installed_factory, installed_loader
from hardpoint_testing_torch import worker_config
from hardpoint_torch_runtime import load_weights

def peak():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("VmHWM:")) * 1024

name, root, dtype, method, *files = sys.argv[1:]
loader = installed_loader(name)
artifact = ModelArtifact(name="m", root=root, files=tuple(files), source="local")
info = loader.describe(artifact)
config = worker_config(info, dtype=dtype, block_size=16)
quantization = None
if method != "none":
    context = WorkerContext(name=method, api_version=1, roles=frozenset({ProcessRole.WORKER}), rank=0, config=config)
    factory = installed_factory("quantization", method)
    quantization = factory(context, declaration_of(factory).options())
model, _ = create_model(
    installed_factory("model", info.architecture), config, PlainAttentionBackend(), quantization=quantization
)
for parameter in model.parameters():
    parameter.data.fill_(1)
if name == "gguf":
    # What the unpacking library keeps of itself, and its first scratch memory.
    next(tensor for tensor in loader.tensors(info) if "mlp" in tensor.name)
before = peak()
report = load_weights(model, loader, info, show_progress=False)
print(peak() - before, report.num_bytes, sum(p.numel() * p.element_size() for p in model.parameters()))
"""


def tensors() -> dict[str, np.ndarray]:
    """All of one number each: what matters here is their size."""
    shapes = {"model.embed_tokens": (VOCABULARY, HIDDEN), "model.norm": (HIDDEN,)}
    for index in range(LAYERS):
        layer = f"model.layers.{index}"
        shapes |= {f"{layer}.self_attn.{part}_proj": (HIDDEN, HIDDEN) for part in "qkvo"}
        shapes |= {f"{layer}.mlp.{part}_proj": (WIDE, HIDDEN) for part in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj": (HIDDEN, WIDE)}
        shapes |= {f"{layer}.{part}_layernorm": (HIDDEN,) for part in ("input", "post_attention")}
    return {f"{name}.weight": np.full(shape, 0.01, dtype=np.float32) for name, shape in shapes.items()}


def load(name: str, folder: Path, dtype: str, method: str = "none") -> tuple[int, int, int]:
    """By how many bytes memory grew at most, how many were stored, and how many the parameters have."""
    files = sorted(path.name for path in folder.iterdir())
    command = [sys.executable, "-c", CHILD, name, str(folder), dtype, method, *files]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    grown, stored, held = (int(number) for number in done.stdout.split())
    return grown, stored, held


LARGEST = 4 * WIDE * HIDDEN
"""Bytes of the largest tensor in float32."""

PAGES = 2 << 20
"""What the interpreter may touch besides while it loads: the peak is measured in whole pages of the process, and the
system may make one of them a huge one. A further tensor would be twice as much."""


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_model_of_many_shards_is_never_in_memory_twice(dtype: str, tmp_path: Path) -> None:
    stored = list(tensors().items())
    count = 16
    names = [f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1)]
    where: dict[str, str] = {}
    for number, name in enumerate(names):
        part = dict(stored[number::count])
        save_file(part, tmp_path / name)
        where |= dict.fromkeys(part, name)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    grown, num_bytes, held = load("safetensors", tmp_path, dtype)
    assert num_bytes == sum(array.nbytes for _, array in stored) > 75e6
    assert held == num_bytes // (1 if dtype == "float32" else 2)
    assert grown < 3 * LARGEST + PAGES, f"loading {num_bytes} bytes took {grown} bytes beside the parameters"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("method", ["int8", "int4"])
def test_weights_are_quantized_as_they_come(method: str, tmp_path: Path) -> None:
    """Beside the quantized weights there is one tensor of floats at a time, and never a layer of them."""
    save_file(tensors(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    grown, num_bytes, held = load("safetensors", tmp_path, "float32", method)
    assert held < num_bytes / 3.9
    assert grown < 3 * LARGEST + PAGES, f"quantizing {num_bytes} bytes took {grown} bytes beside the parameters"


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_packed_file_is_unpacked_one_tensor_at_a_time(tmp_path: Path) -> None:
    """The file is a quarter of what comes out; only a tensor of it at a time may be there in float32 and as stored."""
    kind = gguf.GGMLQuantizationType.Q8_0
    writer = gguf.GGUFWriter(tmp_path / "model.gguf", "llama")
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(8)
    writer.add_head_count_kv(8)
    writer.add_context_length(128)
    writer.add_layer_norm_rms_eps(1e-5)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, LAYERS)
    for name, array in tensors().items():
        stored = f"{names.get_name(name.removesuffix('.weight'))}.weight"
        packed = gguf.quants.quantize(array, kind) if array.ndim > 1 else array
        writer.add_tensor(stored, packed, raw_dtype=kind if array.ndim > 1 else None)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    grown, num_bytes, _ = load("gguf", tmp_path, "float32")
    assert num_bytes == sum(array.nbytes for array in tensors().values())
    assert grown < 6 * LARGEST, f"unpacking to {num_bytes} bytes took {grown} bytes beside the parameters"

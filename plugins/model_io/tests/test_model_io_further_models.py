"""The further real models, where their packages are installed: equal to the reference like the demo model."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.sources.package import PackageSource
from hardpoint_model_io.tokenizers.gguf import GgufTokenizerProvider
from hardpoint_model_io.tokenizers.hf import HuggingFaceTokenizerProvider
from hardpoint_model_io.weights.gguf import GgufWeightLoader
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TEXTS = ["Hello world", "  two  spaces\n\n\nx", "héllo 🤖 日本語", "def f(x):\n    return 1", "\t\t a", "<b>x</b>"]


def installed(name: str, cache: Path) -> ModelArtifact:
    source = PackageSource(cache_dir=str(cache))
    artifact = source.resolve(name, None) if name in source.known_names() else None
    if artifact is None:
        pytest.skip(f"the package of {name} is not installed")
    return artifact


def test_gemma_3_equals_the_reference(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    artifact = installed("gemma3-270m", tmp_path)
    reference = transformers.AutoTokenizer.from_pretrained(artifact.root, gguf_file=artifact.files[0])
    tokenizer = GgufTokenizerProvider().load(artifact)
    assert [tokenizer.encode(text) for text in TEXTS] == [reference(text).input_ids for text in TEXTS]
    model = transformers.AutoModelForCausalLM.from_pretrained(
        artifact.root, gguf_file=artifact.files[0], dtype=torch.float32
    )
    state = model.state_dict()
    loader = GgufWeightLoader()
    info = loader.describe(artifact)
    names = set()
    for tensor in loader.tensors(info):
        np.testing.assert_array_equal(tensor.data, state[tensor.name].numpy(), err_msg=tensor.name)
        names.add(tensor.name)
    assert set(state) - names == {"lm_head.weight"}
    for field in ("layer_types", "query_pre_attn_scalar", "sliding_window", "head_dim", "hidden_activation"):
        assert info.config[field] == getattr(model.config, field)


def test_minilm_is_read_from_its_package(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    artifact = installed("minilm", tmp_path)
    info = SafetensorsWeightLoader().describe(artifact)
    assert (info.architecture, info.tasks) == ("BertModel", ("embed",))
    reference = transformers.AutoTokenizer.from_pretrained(artifact.root)
    tokenizer = HuggingFaceTokenizerProvider().load(artifact)
    assert [tokenizer.encode(text) for text in TEXTS] == [reference(text).input_ids for text in TEXTS]

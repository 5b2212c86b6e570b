"""Our tokenizers, chat renderer, model sources and weight loaders keep the contracts of their kinds."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from hardpoint.interfaces import ModelArtifact, ModelSource, Tokenizer, TokenizerProvider
from hardpoint.testing.chat_renderer_suite import ChatRendererSuite
from hardpoint.testing.model_source_suite import HOSTILE_NAMES, ModelSourceSuite
from hardpoint.testing.tokenizer_suite import TokenizerSuite
from hardpoint.testing.weight_loader_suite import WeightLoaderSuite
from hardpoint_model_io.sources.hub import HubRevision, HubSource, HubUnreachableError
from hardpoint_model_io.sources.package import PackageSource

CONFIG = {
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
TENSORS = {"model.norm.weight": np.ones(32, np.float32), "x": np.arange(6, dtype=np.float32).reshape(2, 3)}


def write_folder(folder: Path) -> ModelArtifact:
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(TENSORS, folder / "model.safetensors")
    files = tuple(sorted(path.name for path in folder.iterdir()))
    return ModelArtifact(name="tiny", root=str(folder), files=files, source="test")


class TestGgufTokenizer(TokenizerSuite):
    plugin: ClassVar[str | None] = "gguf"

    def create_tokenizer(self) -> Tokenizer:
        artifact = PackageSource().resolve("smollm2", None)
        assert artifact is not None
        provider: TokenizerProvider = self.create_plugin(self.context())
        return provider.load(artifact)


class TestHuggingFaceTokenizer(TokenizerSuite):
    plugin: ClassVar[str | None] = "hf"

    def create_tokenizer(self) -> Tokenizer:
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
        backend = Backend(models.BPE(vocab={text: number for number, text in enumerate(alphabet)}, merges=[]))
        backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        backend.decoder = decoders.ByteLevel()
        backend.add_special_tokens([AddedToken("<bos>", special=True), AddedToken("<eos>", special=True)])
        with tempfile.TemporaryDirectory() as folder:
            backend.save(f"{folder}/tokenizer.json")
            artifact = ModelArtifact(name="t", root=folder, files=("tokenizer.json",), source="test")
            provider: TokenizerProvider = self.create_plugin(self.context())
            return provider.load(artifact)


class TestJinja(ChatRendererSuite):
    """With a template like those of models that call tools; the kit's own is held to the rules as well, installed."""

    plugin: ClassVar[str | None] = "jinja"
    roles: ClassVar[tuple[str, ...]] = ("system", "user", "assistant", "user")
    arguments: ClassVar[Mapping[str, Any]] = {"tools": [{"type": "function", "function": {"name": "look_up"}}]}
    template: ClassVar[str | None] = (
        "{% if tools %}[INST]{{ tools | tojson(indent=2) }}{% endif %}"
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "{% for call in m.tool_calls or [] %}{{ call.function.name }}({{ call.function.arguments | tojson }})"
        "{% endfor %}"
        "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


class TestJinjaWithParts(TestJinja):
    """A template that loops over the parts of a content."""

    arguments: ClassVar[Mapping[str, Any]] = {"enable_thinking": True}
    template: ClassVar[str | None] = (
        "{% for m in messages %}[INST]{{ m['role'] }}:{% for part in m['content'] %}{{ part['text'] }}\n{% endfor %}"
        "</s>{% endfor %}{% if add_generation_prompt %}[INST]assistant:{% if enable_thinking %}hm{% endif %}{% endif %}"
    )


class TestLocalSource(ModelSourceSuite):
    plugin: ClassVar[str | None] = "local"
    missing_names: ClassVar[tuple[str, ...]] = ("/no/such/model", "./missing.gguf")
    # Any file that its user may read is a model's path; whether it holds one, the loaders say.
    hostile_names: ClassVar[tuple[str, ...]] = tuple(name for name in HOSTILE_NAMES if "passwd" not in name)

    def create_name(self, folder: Path) -> str:
        write_folder(folder)
        return str(folder)


class CacheOnly:
    """A hub that cannot be reached, and a cache with one model in it."""

    def __init__(self, snapshots: Mapping[tuple[str, str], str]) -> None:
        self.snapshots = snapshots

    def is_offline(self) -> bool:
        return False

    def lookup(self, repo_id: str, revision: str) -> HubRevision:
        raise HubUnreachableError("no network")

    def fetch(self, repo_id: str, file: str, commit: str) -> str:
        raise HubUnreachableError("no network")

    def cached_snapshot(self, repo_id: str, revision: str) -> str | None:
        return self.snapshots.get((repo_id, revision))


class TestHubSource(ModelSourceSuite):
    plugin: ClassVar[str | None] = "hub"
    missing_names: ClassVar[tuple[str, ...]] = ("org/missing",)

    @pytest.fixture(autouse=True)
    def snapshots(self) -> None:
        self.found: dict[tuple[str, str], str] = {}

    def create_source(self) -> ModelSource:
        return HubSource(lambda: CacheOnly(self.found))

    def create_name(self, folder: Path) -> str:
        snapshot = folder / ("c" * 40)
        snapshot.mkdir()
        write_folder(snapshot)
        self.found["org/model", "main"] = str(snapshot)
        return "org/model"


class TestPackageSource(ModelSourceSuite):
    plugin: ClassVar[str | None] = "package"
    missing_names: ClassVar[tuple[str, ...]] = ("package:no-such-distribution",)

    def create_name(self, folder: Path) -> str:
        return "smollm2"


class TestSafetensors(WeightLoaderSuite):
    plugin: ClassVar[str | None] = "safetensors"

    def create_artifact(self, folder: Path) -> ModelArtifact:
        return write_folder(folder)

    def expected_tensors(self) -> Mapping[str, np.ndarray]:
        return TENSORS


class TestGguf(WeightLoaderSuite):
    plugin: ClassVar[str | None] = "gguf"
    num_flips: ClassVar[int] = 30

    @pytest.fixture
    def artifact(self, gguf_file: Callable[..., Path], as_artifact: Callable[[Path], ModelArtifact]) -> ModelArtifact:
        return as_artifact(gguf_file())

    def create_artifact(self, folder: Path) -> ModelArtifact:
        raise TypeError("the fixture 'artifact' writes the file")


class TestDummy(WeightLoaderSuite):
    plugin: ClassVar[str | None] = "dummy"
    automatic: ClassVar[bool] = False
    checks_files: ClassVar[bool] = False

    def create_artifact(self, folder: Path) -> ModelArtifact:
        return write_folder(folder)

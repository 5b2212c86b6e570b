"""Our tokenizers, model sources and weight loaders keep the contracts of their kinds."""

from __future__ import annotations

from hardpoint.interfaces import Tokenizer
from hardpoint.testing.tokenizer_suite import TokenizerSuite
from hardpoint_model_io.sources.package import PackageSource
from hardpoint_model_io.tokenizers.gguf import GgufTokenizerProvider


class TestGgufTokenizer(TokenizerSuite):
    def create_tokenizer(self) -> Tokenizer:
        artifact = PackageSource().resolve("smollm2", None)
        assert artifact is not None
        return GgufTokenizerProvider().load(artifact)

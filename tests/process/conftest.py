"""One tiny model with a long context for all process tests, so that generations outlast what is done to them."""

from __future__ import annotations

from pathlib import Path

import pytest

from tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny", max_position_embeddings=32768)

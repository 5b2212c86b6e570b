"""Sound tiny models to damage, and the command line in this process."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cli_support import CommandLine
from tiny_llama import write_tiny_gguf, write_tiny_llama


@pytest.fixture(scope="session")
def sound_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("sound") / "tiny")


@pytest.fixture(scope="session")
def sound_gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_gguf(tmp_path_factory.mktemp("sound") / "tiny.gguf")


@pytest.fixture
def folder(sound_folder: Path, tmp_path: Path) -> Path:
    """A copy of the sound folder, free to be damaged."""
    return Path(shutil.copytree(sound_folder, tmp_path / "model"))


@pytest.fixture
def gguf_of(tmp_path: Path) -> Callable[[bytes], Path]:
    """Writes ``model.gguf`` with the given content."""

    def write(data: bytes) -> Path:
        path = tmp_path / "model.gguf"
        path.write_bytes(data)
        return path

    return write


@pytest.fixture
def hardpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    monkeypatch.delenv("HARDPOINT_TRACEBACK", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    return CommandLine(monkeypatch, capsys)

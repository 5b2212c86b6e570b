"""A tiny model for the session, and the command line in this process."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_support import CommandLine
from tiny_llama import write_tiny_llama


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def hardpoint(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> CommandLine:
    for name in ("HARDPOINT_CONFIG", "HARDPOINT_PLUGINS", "HARDPOINT_TRACEBACK"):
        monkeypatch.delenv(name, raising=False)
    return CommandLine(monkeypatch, capsys)

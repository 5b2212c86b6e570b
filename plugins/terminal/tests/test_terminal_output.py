"""Standard output that cannot take what commands print: one error that says why."""

from __future__ import annotations

import argparse
import io
import os
import sys
from pathlib import Path

import pytest

from hardpoint.errors import ConfigError
from hardpoint_terminal.chat import ChatCommand
from hardpoint_terminal.generate import GenerateCommand, read_prompts
from hardpoint_terminal.models import ModelsCommand
from hardpoint_terminal.output import StandardOutput


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="a device that is always full is Linux's")
def test_a_full_disk_is_told_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is left in the buffer does not fail again when it is closed."""
    with open("/dev/full", "w", encoding="utf-8") as full:
        monkeypatch.setattr(sys, "stdout", full)
        with pytest.raises(ConfigError, match="cannot be written: No space left on device"):
            StandardOutput().line("text")


def test_text_without_bytes_in_the_encoding_names_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="ascii"))
    with pytest.raises(ConfigError, match="written in ascii, which has no 'ö'; set PYTHONIOENCODING"):
        StandardOutput().write("schön")


def test_what_can_be_written_is_there_at_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "out"
    with path.open("w", encoding="utf-8") as stream:
        monkeypatch.setattr(sys, "stdout", stream)
        out = StandardOutput()
        out.write("a")
        out.line("b")
        assert path.read_text() == "ab\n"


@pytest.mark.parametrize("command", [GenerateCommand, ChatCommand, ModelsCommand])
def test_nothing_is_loaded_for_a_closed_output(
    command: type[GenerateCommand | ChatCommand | ModelsCommand], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with pytest.raises(ConfigError, match="standard output is closed"):
        command().run(argparse.Namespace())


def test_a_closed_input_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(ConfigError, match="standard input is closed"):
        read_prompts(["a"], "-")
    with pytest.raises(ConfigError, match="standard input is closed"):
        ChatCommand().run(argparse.Namespace())

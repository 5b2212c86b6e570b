"""Our commands keep the contract of their kind."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.cli_command_suite import CliCommandSuite

UNKNOWN = "no-such-model"


class TestGenerate(CliCommandSuite):
    plugin: ClassVar[str | None] = "generate"
    refused: ClassVar[tuple[tuple[str, ...], ...]] = (
        (UNKNOWN, "--prompt", "hello"),
        (UNKNOWN,),
        (UNKNOWN, "--prompts-file", "/no/such/file"),
        (UNKNOWN, "--prompt", "hello", "--max-tokens", "0"),
    )


class TestChat(CliCommandSuite):
    plugin: ClassVar[str | None] = "chat"
    refused: ClassVar[tuple[tuple[str, ...], ...]] = ((UNKNOWN,), (UNKNOWN, "--max-tokens", "0"))


class TestModels(CliCommandSuite):
    plugin: ClassVar[str | None] = "models"
    runs: ClassVar[tuple[tuple[str, ...], ...]] = (("list",), ("list", "--json"), ("list", "--task", "embed"))
    refused: ClassVar[tuple[tuple[str, ...], ...]] = (("show", "NoSuchArchitecture"), ("show", ""))

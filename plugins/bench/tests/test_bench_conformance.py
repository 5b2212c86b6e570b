"""The benchmark command keeps the contract of its kind."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.cli_command_suite import CliCommandSuite


class TestBench(CliCommandSuite):
    plugin: ClassVar[str | None] = "bench"
    refused: ClassVar[tuple[tuple[str, ...], ...]] = (("no-such-model",), ("no-such-model", "--repeats", "0"))

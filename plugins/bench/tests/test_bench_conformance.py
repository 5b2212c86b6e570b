"""The benchmark command keeps the contract of its kind."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.cli_command_suite import CliCommandSuite


class TestBench(CliCommandSuite):
    plugin: ClassVar[str | None] = "bench"
    runs: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("scheduler", "--running", "2", "--steps", "4", "--no-ipc", "--json"),
        ("scheduler", "--requests", "4", "--rate", "100"),
    )
    refused: ClassVar[tuple[tuple[str, ...], ...]] = (
        ("no-such-model",),
        ("no-such-model", "--repeats", "0"),
        ("no-such-model", "--running", "4"),
        ("scheduler", "--workload", "single"),
        ("scheduler", "--running", "0"),
        ("scheduler", "--trace", "/nowhere.jsonl"),
        ("scheduler", "--scheduler", "no-such-scheduler"),
    )

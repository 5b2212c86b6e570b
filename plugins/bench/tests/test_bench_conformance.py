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
        ("no-such-model", "another"),
        ("no-such-model", "--threads", "1"),
        ("latency",),
        ("latency", "no-such-model", "--prompt-len", "-1"),
        ("throughput", "no-such-model", "--batch", "0"),
        ("prefill", "no-such-model", "--repeats", "0"),
        ("prefix", "no-such-model", "--prompt-len", "100"),
        ("startup", "no-such-model", "--output-len", "2"),
        ("latency", "no-such-model", "--workload", "single"),
        ("latency", "no-such-model", "--running", "4"),
        ("latency", "no-such-model", "--threads", "0"),
        ("latency", "no-such-model", "--compare", "no-such-peer"),
        ("latency", "no-such-model", "--peer-python", "/usr/bin/python3"),
        ("suite",),
        ("suite", "no-such-model", "--classes", "int7"),
        ("suite", "no-such-model", "--workloads", "latency,no-such-workload"),
        ("suite", "no-such-model", "--peers", "/nowhere"),
        ("suite", "no-such-model", "--compare", "no-such-peer"),
        ("suite", "no-such-model", "--shrink", "0"),
        ("suite", "no-such-model", "--batch", "2"),
        ("suite", "no-such-model", "--workload", "single"),
        ("scaling",),
        ("scaling", "no-such-model", "--classes", "fp32"),
        ("convert", "no-such-model"),
        ("document",),
        ("document", "/nowhere.json", "--output", "page.md"),
        ("scheduler", "--batch", "2"),
        ("scheduler", "--workload", "single"),
        ("scheduler", "--running", "0"),
        ("scheduler", "--trace", "/nowhere.jsonl"),
        ("scheduler", "--scheduler", "no-such-scheduler"),
    )

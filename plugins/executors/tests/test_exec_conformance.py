"""All executors keep the contract of their kind."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint.testing.executor_suite import ExecutorSuite


class TestUniproc(ExecutorSuite):
    plugin: ClassVar[str | None] = "uniproc"


class TestMultiproc(ExecutorSuite):
    plugin: ClassVar[str | None] = "multiproc"
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    interruptible: ClassVar[bool] = True


class TestExternalLauncher(ExecutorSuite):
    plugin: ClassVar[str | None] = "external_launcher"

    @pytest.fixture(autouse=True)
    def launched(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """As the only rank that a launcher started."""
        numbers = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        for name, value in {**numbers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)

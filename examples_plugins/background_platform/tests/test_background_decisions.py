"""What the platform decides, and what it leaves to the user."""

from __future__ import annotations

import pytest
from background_platform import CORES, BackgroundPlatform, Options, probe

from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineSettings, ProbeStatus


@pytest.mark.parametrize(
    ("value", "status"),
    [(None, ProbeStatus.ABSENT), ("2", ProbeStatus.AVAILABLE), ("none", ProbeStatus.BROKEN), ("0", ProbeStatus.BROKEN)],
)
def test_what_the_probe_answers(monkeypatch: pytest.MonkeyPatch, value: str | None, status: ProbeStatus) -> None:
    monkeypatch.delenv(CORES, raising=False)
    if value is not None:
        monkeypatch.setenv(CORES, value)
    assert probe().status is status


def test_open_settings_are_filled_and_given_ones_kept() -> None:
    settings = EngineSettings(max_num_seqs=3)
    BackgroundPlatform(Options(memory_bytes=1 << 20)).check_and_update(settings)
    assert (settings.worker, settings.executor, settings.dtype) == ("torch", "uniproc", "float32")
    assert settings.max_num_seqs == 3
    assert settings.kv_cache_bytes == 1 << 18


@pytest.mark.parametrize("wrong", [EngineSettings(world_size=2), EngineSettings(dtype="float16")])
def test_what_cannot_be_is_refused(wrong: EngineSettings) -> None:
    with pytest.raises(ConfigError, match="set --"):
        BackgroundPlatform(Options()).check_and_update(wrong)


def test_threads_come_from_the_environment() -> None:
    assert BackgroundPlatform(Options()).thread_plan(1, {CORES: "3"}).compute_threads == 3
    with pytest.raises(ConfigError, match=CORES):
        BackgroundPlatform(Options()).thread_plan(1, {CORES: "many"})

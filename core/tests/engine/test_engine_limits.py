"""Every limit of a scheduler comes from a setting, or from the feature that it is for; and what is set arrives."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

import pytest

from hardpoint.config import add_arguments, load_config
from hardpoint.engine.build import build_engine
from hardpoint.errors import ConfigError
from hardpoint.interfaces import SchedulerLimits
from hardpoint.launch import Launch, prepare
from hardpoint.roles import ProcessRole

PARTS = ("platform", "executor", "scheduler", "kv_layout", "loader", "chat_renderer")
PINS = tuple(f"--pin={name}=hardpoint-fakes" for name in ("hash:sha256", "kv_cache_spec:full_attention"))
GIVEN: Mapping[str, tuple[tuple[str, ...], Any]] = {
    "max_num_seqs": (("--max-num-seqs=7",), 7),
    "max_num_batched_tokens": (("--max-num-batched-tokens=96",), 96),
    "max_model_len": (("--max-model-len=50",), 50),
    "max_num_active_seqs": (("--max-num-active-seqs=3",), 3),
    "max_waiting": (("--max-waiting=11",), 11),
    "long_prefill_threshold": (("--long-prefill-threshold=9",), 9),
    "adaptive_prefill_threshold": (("--adaptive-prefill-threshold",), True),
    "chunked_prefill": (("--no-chunked-prefill",), False),
    "prefix_caching": (("--no-prefix-caching",), False),
    "kv_events": (("--kv-events",), True),
    "full_sequence_must_fit": (("--full-sequence-must-fit",), True),
    "watermark": (("--watermark=0.25",), 0.25),
    "max_inflight_steps": (("--async-scheduling",), 2),
}
"""Flags for each limit, and its value then."""

OF_FEATURES = {
    "max_scheduled_tokens": "speculation",
    "num_pipeline_stages": "pipeline parallelism",
    "encoder_budget": "media encoders",
    "encoder_cache_size": "media encoders",
    "prefill_interval": "data parallelism",
}


def launch(*flags: str, environ: Mapping[str, str] | None = None) -> Launch:
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=False)
    fakes = [f"--{part.replace('_', '-')}=fake" for part in PARTS]
    config = load_config(parser.parse_args(["fake", *fakes, *PINS, *flags]), environ or {})
    return prepare(config, "fake", environ={}, roles=frozenset({*ProcessRole} - {ProcessRole.LAUNCHER}))


def test_no_limit_is_out_of_reach() -> None:
    assert {*GIVEN, *OF_FEATURES} == set(SchedulerLimits.__struct_fields__)


@pytest.mark.parametrize("name", GIVEN)
def test_what_is_set_reaches_the_scheduler(name: str) -> None:
    flags, value = GIVEN[name]
    started = launch(*flags)
    assert getattr(started.spec.limits, name) == value
    core = build_engine(started.spec, started.runtime)
    assert core.scheduler.limits == started.spec.limits  # type: ignore[attr-defined]
    core.shutdown()


def test_unset_limits_have_the_contracts_values() -> None:
    limits = launch().spec.limits
    plain = SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, max_waiting=4096)
    chosen = {"max_num_seqs", "max_num_batched_tokens", "max_model_len"}
    for name in set(SchedulerLimits.__struct_fields__) - chosen:
        assert getattr(limits, name) == getattr(plain, name), name


def test_limits_come_from_the_environment_too() -> None:
    environ = {"HARDPOINT_ASYNC_SCHEDULING": "yes", "HARDPOINT_MAX_NUM_ACTIVE_SEQS": "2"}
    limits = launch(environ=environ).spec.limits
    assert (limits.max_inflight_steps, limits.max_num_active_seqs) == (2, 2)


@pytest.mark.parametrize(
    ("flag", "message"),
    [
        ("--max-num-active-seqs=0", r"scheduler\.max_num_active_seqs: .*greater than or equal to 1 \(given: '?0'?\)"),
        ("--watermark=1.0", r"scheduler\.watermark: .*less than 1"),
        ("--long-prefill-threshold=-1", r"scheduler\.long_prefill_threshold"),
    ],
)
def test_a_limit_out_of_its_range_is_refused_in_the_launcher(flag: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        launch(flag)

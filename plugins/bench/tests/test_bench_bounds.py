"""Numbers of any size: in bounds they run, beyond them one line says what is allowed."""

from __future__ import annotations

import argparse
import math
from typing import Any

import pytest

from hardpoint.config import AppConfig, add_arguments, load_config
from hardpoint.errors import ConfigError
from hardpoint_bench.bounds import BOUNDS, check_option, check_settings, memory_told
from hardpoint_bench.flags import BOTH, REPLAY, STEADY, Values
from hardpoint_bench.generator import Mix
from hardpoint_bench.replay_command import write_trace
from hardpoint_bench.simulation import StepCost
from hardpoint_bench.steady import Load
from hardpoint_bench.steady_command import measure

NUMBERS = [flag for flag in (*BOTH, *STEADY, *REPLAY) if flag.kind in (int, float)]


def test_every_number_has_bounds_that_its_default_is_in() -> None:
    assert {flag.name for flag in NUMBERS} <= BOUNDS.keys()
    for flag in NUMBERS:
        if flag.default is not None:
            check_option(flag.name, flag.default)


@pytest.mark.parametrize("name", BOUNDS)
def test_bounds_are_allowed_and_nothing_beyond(name: str) -> None:
    bound = BOUNDS[name]
    assert math.isfinite(bound.least)
    assert math.isfinite(bound.most)
    check_option(name, bound.least)
    check_option(name, bound.most)
    for value in (bound.least - 1, bound.most + 1, 10**20, -(10**20), math.inf, -math.inf, math.nan):
        with pytest.raises(ConfigError, match=rf"^--{name} \S+ must be at least \S+ and at most [\d.,e+]+"):
            check_option(name, value)


@pytest.mark.parametrize("flag", NUMBERS, ids=lambda flag: flag.name)
@pytest.mark.parametrize("value", [10**20, -1e300])
def test_values_of_the_command_line_are_checked(flag: Any, value: float) -> None:
    with pytest.raises(ConfigError, match=f"--{flag.name} "):
        Values({flag.name: value}).check()


def test_a_message_says_what_was_given_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError) as caught:
        check_option("running", 99999999999)
    assert str(caught.value) == "--running 99999999999 must be at least 1 and at most 1,000,000"


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("max_num_seqs", 4_000_000_000),
        ("max_num_active_seqs", 10**15),
        ("max_waiting", 10**15),
        ("max_num_batched_tokens", 10**15),
        ("long_prefill_threshold", 10**15),
        ("max_model_len", 10**15),
        ("block_size", 2_000_000_000),
        ("num_kv_blocks", 10**15),
    ],
)
def test_settings_are_checked(setting: str, value: int) -> None:
    (engine,) = config(**{setting: value}).engines.values()
    with pytest.raises(ConfigError, match=f"^--{setting.replace('_', '-')} {value} must be .* at most "):
        check_settings(engine)
    (engine,) = config(**{setting: 64}).engines.values()
    check_settings(engine)


def config(**settings: Any) -> AppConfig:
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=False)
    given = [part for name, value in settings.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    return load_config(parser.parse_args(["scheduler", *given]), {})


@pytest.mark.parametrize(
    ("field", "value"),
    [("rate", 1e-308), ("prefixes", 99_999_999_999), ("tenants", 99_999_999_999), ("output_len", 99_999_999_999)],
)
def test_mixes_that_no_run_would_end_or_hold_are_refused(field: str, value: float) -> None:
    numbers: dict[str, Any] = {"requests": 3, "rate": 1.0, "prompt_len": 10, "output_len": 1, "shared_prefix": 4}
    with pytest.raises(ConfigError, match=f"--{field.replace('_', '-')} .* at most"):
        Mix(**{**numbers, field: value}).check()


def test_many_tenants_and_prefixes_cost_nothing() -> None:
    mix = Mix(50, 1.0, 10, 1, shared_prefix=4, prefixes=1_000_000, tenants=1_000_000, priorities=1_000_000)
    mix.check()
    names = {request.tenant for request in mix()}
    assert {"tenant-0", "tenant-1"} < names


@pytest.mark.parametrize("cost", ["1e308,1,1", "1,1e308,1", "1,1,1e10", "1e-308,0,0"])
def test_step_costs_are_bounded(cost: str) -> None:
    with pytest.raises(ConfigError, match="--step-cost .* must be at least 0.001 and at most 1,000,000,000"):
        StepCost.parse(cost)


@pytest.mark.parametrize(
    ("numbers", "fault"),
    [
        ({"running": 1_000_000, "prompt-len": 2**24}, "all prompts: these numbers make .* at most 1,073,741,824"),
        ({"running": 1_000_000, "steps": 10_000_000}, "blocks: these numbers make .* at most 20,000,000; lower"),
    ],
)
def test_what_numbers_make_together_is_bounded(numbers: dict[str, int], fault: str) -> None:
    values = Values(numbers)
    values.check()
    with pytest.raises(ConfigError, match=fault):
        measure(config(), values, 1)


def test_blocks_make_prompts_longer_where_boundaries_are_spread() -> None:
    values = Values({"running": 1_000, "spread-boundaries": True})
    with pytest.raises(ConfigError, match="a step's tokens: these numbers make .* lower --running or --block-size"):
        measure(config(block_size=2**24), values, 1)


def test_loads_are_bounded() -> None:
    with pytest.raises(ConfigError, match="--steps 100000000000000000000 must be"):
        Load(running=1, waiting=0, steps=10**20, prompt_len=1, shared_prefix=0).check()


def test_too_little_memory_is_told() -> None:
    with pytest.raises(ConfigError, match="needs more memory than there is .*; lower --running"), memory_told():
        raise MemoryError("Unable to allocate 745. GiB")


@pytest.mark.parametrize("requests", [3, 3_000])
def test_a_full_disk_is_told(requests: int) -> None:
    """Whether the first write fails, or only the last one when the file is closed."""
    with pytest.raises(ConfigError, match="--generate-trace '/dev/full' cannot be written: No space left"):
        write_trace(Values({"requests": requests, "generate-trace": "/dev/full"}))

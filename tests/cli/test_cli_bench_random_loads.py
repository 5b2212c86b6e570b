"""Installed schedulers under random loads, pools and limits: nobody is lost, nothing leaks, no rule is broken.

The replay itself raises for whatever a scheduler may not do; what is asserted here is that everybody is accounted for.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.config import AppConfig
from hardpoint_bench.generator import Mix
from hardpoint_bench.rig import Rig, Sizes, with_scheduler
from hardpoint_bench.simulation import Simulation, StepCost

CHOICES = ["fcfs", "priority", "policy:policy=fair_share"]

LOADS = st.fixed_dictionaries(
    {
        "choice": st.sampled_from(CHOICES),
        "pipelined": st.booleans(),
        "mix": st.builds(
            Mix,
            requests=st.integers(1, 40),
            rate=st.sampled_from([1.0, 30.0, 1e6]),
            prompt_len=st.integers(9, 60),
            output_len=st.integers(1, 30),
            length_spread=st.sampled_from([0.0, 0.8]),
            shared_prefix=st.integers(0, 8),
            prefixes=st.integers(1, 3),
            tenants=st.integers(1, 3),
            priorities=st.integers(1, 3),
            seed=st.integers(0, 1000),
        ),
        "running": st.integers(1, 12),
        "batched": st.integers(12, 80),
        "blocks": st.integers(8, 120),
        "block_size": st.sampled_from([1, 4, 16]),
        "scheduler": st.fixed_dictionaries(
            {
                "long_prefill_threshold": st.sampled_from([0, 0, 5]),
                "watermark": st.sampled_from([0.0, 0.0, 0.1]),
                "full_sequence_must_fit": st.booleans(),
                "max_waiting": st.sampled_from([4096, 3]),
            }
        ),
        "prefix_caching": st.booleans(),
    }
)


def replay(load: dict[str, Any]) -> None:
    engine = {
        "model": {"name": "scheduler"},
        "cache": {"block_size": load["block_size"], "prefix_caching": load["prefix_caching"]},
        "scheduler": load["scheduler"],
    }
    config = with_scheduler(AppConfig.model_validate({"engines": {"scheduler": engine}}), load["choice"])
    sizes = Sizes(load["running"], load["batched"], 400, load["blocks"])
    rig = Rig.of(config, sizes, pipelined=load["pipelined"])
    outcome = Simulation(rig, load["mix"], StepCost(base_s=0.01, prefill_token_s=1e-4, decode_row_s=1e-3)).run()
    ends = outcome.completed + outcome.truncated + outcome.refused + outcome.rejected
    assert ends == outcome.requests == load["mix"].requests
    assert outcome.failed == 0
    assert outcome.blocks_leaked == 0
    if load["scheduler"]["max_waiting"] > 100:
        assert outcome.rejected == 0


def test_tenants_do_not_preempt_one_another_for_ever() -> None:
    """Three tenants, room for little more than one prompt: whoever runs longest is left to its end."""
    load = {
        "choice": "policy:policy=fair_share",
        "pipelined": False,
        "mix": Mix(36, 1e6, prompt_len=39, output_len=6, length_spread=0.8, shared_prefix=8, tenants=3, seed=82),
        "running": 2,
        "batched": 28,
        "blocks": 8,
        "block_size": 4,
        "scheduler": {"long_prefill_threshold": 5, "max_waiting": 4096},
        "prefix_caching": False,
    }
    replay(load)


@settings(max_examples=4, deadline=None, suppress_health_check=list(HealthCheck))
@given(LOADS)
def test_random_loads_end_well(load: dict[str, Any]) -> None:
    replay(load)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(LOADS)
def test_many_random_loads_end_well(load: dict[str, Any]) -> None:
    replay(load)

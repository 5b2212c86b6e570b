"""What a scheduler is asked for and does not claim: found out before a model is loaded, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import SchedulerLimits
from hardpoint.launch import require_capabilities
from hardpoint.plugins.plan import PluginPlan

if TYPE_CHECKING:
    from .conftest import Site


def plan(site: Site, capabilities: dict[str, Any] | None) -> PluginPlan:
    entry = {"capabilities": capabilities}
    site.install(
        "acme-scheduler",
        {"scheduler:acme": "acme_scheduler:create"},
        modules={"acme_scheduler.": "raise RuntimeError('imported')"},
        manifest=None if capabilities is None else {"plugins": {"scheduler": {"acme": entry}}},
    )
    return site.plan(choices={"scheduler": "acme"})


def limits(**fields: Any) -> SchedulerLimits:
    return SchedulerLimits(max_num_seqs=1, max_num_batched_tokens=1, max_model_len=1, **fields)


@pytest.mark.parametrize("capabilities", [{}, {"kv_events": False}, {"kv_events": "yes"}])
def test_a_scheduler_that_claims_none_is_refused(site: Site, capabilities: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"scheduler:acme .*tells no KV cache events; leave --kv-events out"):
        require_capabilities(plan(site, capabilities), limits(kv_events=True))


@pytest.mark.parametrize("capabilities", [{"kv_events": True}, None])
def test_one_that_claims_them_or_has_no_manifest_may_try(site: Site, capabilities: dict[str, Any] | None) -> None:
    require_capabilities(plan(site, capabilities), limits(kv_events=True))


@pytest.mark.parametrize("capabilities", [{}, {"max_inflight_steps": 1}])
def test_a_scheduler_that_plans_nothing_ahead_is_refused(site: Site, capabilities: dict[str, Any]) -> None:
    made = plan(site, capabilities)
    require_capabilities(made, limits())
    with pytest.raises(ConfigError, match=r"scheduler:acme .*plans no step ahead; leave --async-scheduling out"):
        require_capabilities(made, limits(max_inflight_steps=2))


@pytest.mark.parametrize("capabilities", [{"max_inflight_steps": 2}, None])
def test_one_that_plans_ahead_or_has_no_manifest_may_do_so(site: Site, capabilities: dict[str, Any] | None) -> None:
    require_capabilities(plan(site, capabilities), limits(max_inflight_steps=2))

"""``--kv-events`` and a scheduler that cannot tell any: found out before a model is loaded, without importing it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import ConfigError
from hardpoint.launch import require_kv_events
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


@pytest.mark.parametrize("capabilities", [{}, {"kv_events": False}, {"kv_events": "yes"}])
def test_a_scheduler_that_claims_none_is_refused(site: Site, capabilities: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"scheduler:acme .*tells no KV cache events; leave --kv-events out"):
        require_kv_events(plan(site, capabilities))


@pytest.mark.parametrize("capabilities", [{"kv_events": True}, None])
def test_one_that_claims_them_or_has_no_manifest_may_try(site: Site, capabilities: dict[str, Any] | None) -> None:
    require_kv_events(plan(site, capabilities))

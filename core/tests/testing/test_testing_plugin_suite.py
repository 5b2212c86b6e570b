"""Rules for plugins of every kind: a sound one passes, each faulty one fails; kits are found by kind."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import ClassVar

import pytest

import hardpoint.launch
from hardpoint.errors import PluginLoadError
from hardpoint.interfaces import Scheduler
from hardpoint.plugins.discovery import discover
from hardpoint.testing import plugin_suite
from hardpoint.testing.kits import kinds_with_kit, kit_of, suite_for
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint.testing.suite_runner import run_suite

SOUND = """
from pydantic import BaseModel, Field
from hardpoint.interfaces.plugin import plugin
{prelude}

class Options(BaseModel):
    depth: int = Field(default=1{description})

@plugin("hash", options=Options)
def create(ctx, options):
    return lambda parent, tokens, extra: b"0" * 32
"""
FAULTS = {
    "test_its_options_explain_themselves": {"description": ""},
    "test_importing_it_changes_nothing": {"prelude": "import os; os.environ['ACME'] = '1'"},
    "test_its_distribution_says_which_core_it_needs": {"requires": ""},
}
PATCHES = (
    "import hardpoint.launch; hardpoint.launch.prepare = print",
    "from hardpoint.interfaces import Scheduler; Scheduler.has_work = lambda self: False",
    "import os; os.chdir('/')",
    "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)",
    "import threading, time; threading.Thread(target=time.sleep, args=(5,), daemon=True).start()",
)


def install(
    site: Path, *, prelude: str = "", description: str = ', description="how deep"', requires: str = "hardpoint-core<1"
) -> None:
    (site / "acme_hash.py").write_text(SOUND.format(prelude=prelude, description=description))
    folder = site / "acme_hash-1.0.dist-info"
    folder.mkdir()
    headers = ["Metadata-Version: 2.3", "Name: acme-hash", "Version: 1.0"]
    headers += [f"Requires-Dist: {requires}"] if requires else []
    (folder / "METADATA").write_text("\n".join(headers) + "\n")
    (folder / "entry_points.txt").write_text("[hardpoint.hash.v1]\nacme = acme_hash:create\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin_suite._plan.cache_clear()
    monkeypatch.chdir(tmp_path)
    # Faulty plugins replace these, here as well once they are imported: this way they are put back.
    monkeypatch.setattr(hardpoint.launch, "prepare", hardpoint.launch.prepare)
    monkeypatch.setattr(Scheduler, "has_work", Scheduler.has_work)
    handler = signal.getsignal(signal.SIGTERM)
    yield tmp_path
    signal.signal(signal.SIGTERM, handler)
    os.environ.pop("ACME", None)
    sys.modules.pop("acme_hash", None)
    plugin_suite._plan.cache_clear()


class AcmeSuite(PluginSuite):
    kind: ClassVar[str] = "hash"
    plugin: ClassVar[str | None] = "acme"
    torch_free: ClassVar[bool] = True


def test_a_sound_plugin_passes(site: Path) -> None:
    install(site)
    outcome = run_suite(AcmeSuite)
    assert outcome.failed == {}
    assert len(outcome.passed) == 4


@pytest.mark.parametrize("rule", FAULTS)
def test_a_faulty_one_fails_the_rule(site: Path, rule: str) -> None:
    install(site, **FAULTS[rule])
    assert rule in run_suite(AcmeSuite).failed


@pytest.mark.parametrize("patch", PATCHES)
def test_side_effects_at_import_are_found(site: Path, patch: str) -> None:
    """R12.13, P12.4, L12.13."""
    install(site, prelude=patch)
    assert set(run_suite(AcmeSuite).failed) == {"test_importing_it_changes_nothing"}


def test_a_framework_is_refused_where_none_belongs(site: Path) -> None:
    (site / "transformers").mkdir()
    (site / "transformers/__init__.py").write_text("")
    install(site, prelude="import transformers")
    assert "no framework may be" in run_suite(AcmeSuite).failed["test_importing_it_changes_nothing"]


def test_without_a_plugin_only_the_kinds_own_tests_run() -> None:
    class Nothing(PluginSuite):
        kind: ClassVar[str] = "hash"

    outcome = run_suite(Nothing)
    assert outcome.failed == {}
    assert outcome.passed == set()
    with pytest.raises(TypeError, match="set 'plugin'"):
        Nothing().runtime()


def test_kits_are_found_by_kind() -> None:
    assert {"scheduler", "endpoint", "hash"} <= set(kinds_with_kit())
    for kind in kinds_with_kit():
        kit = kit_of(kind)
        assert kit is not None
        assert kit.kind == kind
    assert kit_of("platform_of_nobody") is None


def test_a_plugins_own_class_comes_before_its_kinds(site: Path) -> None:
    install(site)
    (site / "acme_hash_check.py").write_text(
        "from hardpoint.testing.hash_suite import HashSuite\nclass TestAcme(HashSuite):\n    mine = True\n"
    )
    points = site / "acme_hash-1.0.dist-info/entry_points.txt"
    own = "[hardpoint.conformance.v1]\nhash.acme = acme_hash_check:TestAcme\nbad = acme_hash:create\n"
    points.write_text(points.read_text() + own)
    (found,) = [entry for entry in discover().of("hash") if entry.name == "acme"]
    suite = suite_for(found)
    assert suite is not None
    assert suite.plugin == "acme"
    assert vars(suite.__mro__[1])["mine"]
    with pytest.raises(PluginLoadError, match="no subclass of PluginSuite"):
        kit_of("bad")

"""The doctor's report, its text, and the two commands."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from typing import TYPE_CHECKING, Any

import pytest

import hardpoint.config.arguments  # noqa: F401  # what the commands import is there before a test narrows the search path
from hardpoint.errors import ConfigError
from hardpoint.plugins.cli import run_plugins
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing.doctor import DoctorReport, diagnose
from hardpoint.testing.doctor_text import render

if TYPE_CHECKING:
    from .conftest import Site

PLATFORM = """
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus, plugin
def probe(): return ProbeResult(ProbeStatus.{status}, "because", {{"driver": "1"}})
@plugin("platform", probe=probe)
def create(ctx, options): ...
"""


def complete(site: Site, status: str = "AVAILABLE") -> None:
    """Every required kind, in one distribution; only the platform's module exists."""
    required = {f"{spec.name}:the_{spec.name}": "acme_all.mod:create" for spec in KINDS.values() if spec.required}
    source = PLATFORM.format(status=status)
    site.install("acme-all", required, requires=["hardpoint-core>=0.0.1"], modules={"acme_all.mod": source})


def examine(site: Site, probe: bool = True, **selection: Any) -> DoctorReport:
    return diagnose(PluginSelection(**selection), search_path=[str(site.root)], probe=probe)


def test_a_complete_installation_has_no_problems(site: Site) -> None:
    complete(site)
    report = examine(site)
    assert report.problems == ()
    row = report.kinds[0].plugins[0]
    assert (row.plugin.name, row.state, row.has_manifest) == ("the_platform", "available", False)
    assert row.probe is not None
    assert (row.probe.status, row.probe.details) == ("available", {"driver": "1"})
    assert row.plugin.requires == ("hardpoint-core>=0.0.1",)


def test_a_platform_whose_device_is_not_there_is_not_called_available(site: Site) -> None:
    complete(site, "ABSENT")
    assert "the_platform  acme-all 1.0  absent  [absent: because]" in render(examine(site), verbose=False)


def test_an_empty_installation_names_what_to_install(site: Site) -> None:
    """R12.6."""
    report = examine(site)
    assert len(report.problems) == sum(spec.required for spec in KINDS.values())
    assert all("install a distribution that provides the entry point hardpoint." in text for text in report.problems)


def test_without_probing_nothing_is_imported(site: Site) -> None:
    complete(site)
    assert examine(site, probe=False).kinds[0].plugins[0].probe is None
    assert "acme_all" not in sys.modules


def test_a_broken_platform_is_a_problem(site: Site) -> None:
    complete(site, "BROKEN")
    assert "platform the_platform is broken" in examine(site).problems[0]


@pytest.mark.parametrize("fault", ["raise SystemExit(0)", "return None", "return ProbeResult('absent', 'x')"])
def test_a_probe_that_does_not_answer_is_a_problem(site: Site, fault: str) -> None:
    source = f"""
from hardpoint.interfaces.plugin import ProbeResult, plugin
def probe(): {fault}
@plugin("platform", probe=probe)
def create(ctx, options): ...
"""
    site.install("acme-odd", {"platform:odd": "acme_odd:create"}, modules={"acme_odd": source})
    assert any("platform odd is broken" in text for text in examine(site).problems)


def test_no_text_of_a_plugin_is_obeyed_by_the_terminal(site: Site) -> None:
    evil = "\x1b[31mred\x1b]0;title\x07\x9b2J"
    source = f"""
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus, plugin
def probe(): return ProbeResult(ProbeStatus.BROKEN, {evil!r})
@plugin("platform", probe=probe)
def create(ctx, options): ...
"""
    names = {f"hooks:{evil}": "acme_evil:create", "platform:evil": "acme_evil:create", f"hardpoint.{evil}.v1|x": "a:b"}
    site.install("acme-evil", names, version=f"1{evil}", modules={"acme_evil": source})
    text = render(examine(site))
    assert "[31mred" in text
    assert {letter for letter in text if not letter.isprintable()} == {"\n"}


def test_refusals_doubles_and_denials_are_explained(site: Site) -> None:
    """L12.2."""
    complete(site)
    site.install("acme-a", {"hooks:audit": "a:b", "endpoint:chat": "a:b", "hardpoint.hooks.v7|new": "a:b"})
    site.install("acme-b", {"scheduler:late": "a:b"}, requires=["hardpoint-core>=99"])
    site.install("acme-old", {"tokenizer:t": "a:b"}, version="1.0")
    site.install("acme-old", {"tokenizer:t": "a:b"}, version="2.0")
    report = examine(site, allow=())
    rows = {(kind.kind, row.plugin.name): row for kind in report.kinds for row in kind.plugins}
    assert (rows["hooks", "audit"].state, rows["hooks", "audit"].reason) == (
        "refused",
        "not on the list HARDPOINT_PLUGINS",
    )
    assert rows["endpoint", "chat"].reason == "not listed in server.endpoints"
    assert rows["tokenizer", "t"].state == "available"
    warnings = "\n".join(report.warnings)
    assert "API version 7" in warnings
    assert "hardpoint-core>=99" in warnings
    assert "endpoint plugins are denied" in warnings
    assert [text for text in report.problems if "installed twice" in text]
    assert report.shadowed[0].distribution == "acme-old"


def test_conflicts_and_unknown_names_are_problems_not_crashes(site: Site) -> None:
    complete(site)
    site.install("acme-b", {"hash:the_hash": "a:b"})
    problems = "\n".join(examine(site, allow=("nobody",)).problems)
    assert "several plugins claim hash:the_hash" in problems
    assert "'nobody' on the list" in problems
    (site.root / "acme_all" / "hardpoint.json").write_text("{")
    assert [text for text in examine(site).problems if "hardpoint.json is not valid" in text]


def test_the_report_is_stable_json(site: Site) -> None:
    complete(site)
    assert examine(site).to_json() == examine(site).to_json()
    decoded = json.loads(examine(site).to_json())
    assert [kind["kind"] for kind in decoded["kinds"]] == list(KINDS)
    assert decoded["kinds"][0]["plugins"][0]["plugin"]["distribution"] == "acme-all"


def test_text_has_color_only_where_asked(site: Site) -> None:
    complete(site)
    site.install("acme-c", {"scheduler:second": "acme_c:b"}, modules={"acme_c": ""})
    report = examine(site, choices={"scheduler": "second"}, options={"scheduler": {"second": {"window": 1}}})
    plain, colored = render(report), render(report, color=True)
    assert "\x1b[" not in plain
    assert "\x1b[32mactive\x1b[0m: named by the operator" in colored
    for text in (
        "├─ the_scheduler  acme-all 1.0  available",
        "options set: window",
        "the_platform  acme-all 1.0  available: installed; imported only when asked for  [available: because]",
    ):
        assert text in plain
    assert "\x1b[31mproblem" in render(examine(site, allow=("x",)), color=True)
    assert "acme_all.mod:create" not in render(report, verbose=False)


def run(site: Site, *words: str) -> int:
    return run_plugins(words)


@pytest.fixture
def only_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The scratch folder as the whole search path of metadata, with everything needed already imported."""
    examine(site)
    importlib.import_module("hardpoint.testing.start_checks")
    monkeypatch.setattr(sys, "path", [str(site.root)])
    monkeypatch.delenv("HARDPOINT_PLUGINS", raising=False)
    return site


def test_the_commands_report_by_exit_status(
    only_site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(only_site)
    assert run(only_site, "doctor") == 1
    assert "no scheduler plugin 'fcfs'" in capsys.readouterr().out, "what a start takes by default is looked for"
    for setting, kind in (("HASH_ALGORITHM", "hash"), ("KV_LAYOUT", "kv_layout"), ("CHAT_RENDERER", "chat_renderer")):
        monkeypatch.setenv(f"HARDPOINT_{setting}", f"the_{kind}")
    monkeypatch.setenv("HARDPOINT_SCHEDULER", "the_scheduler")
    assert run(only_site, "doctor") == 1
    assert "no endpoint plugin 'openai'" in capsys.readouterr().out, "what a server opens by default is looked for"
    http = {"endpoint:openai": "acme_http:b", "endpoint:ops": "acme_http:c"}
    only_site.install("acme-http", http)
    assert run(only_site, "doctor") == 1
    assert "its module 'acme_http' is not there" in capsys.readouterr().out
    only_site.write_module("acme_http", "")
    assert run(only_site, "doctor") == 0
    assert "no problems found" in capsys.readouterr().out
    assert run(only_site, "doctor", "--plugins", "nobody") == 1
    assert "problem: plugin 'nobody'" in capsys.readouterr().out
    assert run(only_site, "list", "--plugins", "nobody") == 0
    assert run(only_site, "doctor", "--use", "scheduler=the_scheduler", "--pin", "hash:the_hash=acme-all") == 0
    assert run(only_site, "doctor", "--use", "scheduler=none", "--strict-plugins", "--endpoints", "") == 1
    with pytest.raises(ConfigError, match="--use 'scheduler'"):
        run(only_site, "doctor", "--use", "scheduler")


def test_the_commands_print_json_and_heed_the_environment(
    only_site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    complete(only_site)
    only_site.install("acme-h", {"hooks:audit": "a:b"})
    monkeypatch.setenv("HARDPOINT_PLUGINS", "")
    assert run(only_site, "list", "--json") == 0
    kinds = {kind["kind"]: kind for kind in json.loads(capsys.readouterr().out)["kinds"]}
    assert kinds["hooks"]["plugins"][0]["state"] == "refused"
    assert run(only_site, "list", "--json", "--plugins", "audit") == 0
    kinds = {kind["kind"]: kind for kind in json.loads(capsys.readouterr().out)["kinds"]}
    assert kinds["hooks"]["plugins"][0]["state"] == "active"


def test_listing_imports_no_plugin_and_no_framework(site: Site) -> None:
    """L12.9: command-line help and lists read metadata only."""
    complete(site)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]);"
        "from hardpoint.plugins.cli import run_plugins; run_plugins(['list']);"
        "loaded = [m for m in sys.modules if m.split('.')[0] in ('acme_all', 'torch', 'transformers', 'pydantic')"
        " or m.startswith('hardpoint_')]; print('LOADED', loaded)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(site.root)], capture_output=True, text=True, check=True)
    assert "the_scheduler" in done.stdout
    assert done.stdout.splitlines()[-1] == "LOADED []"

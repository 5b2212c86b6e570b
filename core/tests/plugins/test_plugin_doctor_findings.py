"""What the doctor explains of single plugins, and how the commands choose what to judge and to show."""

from __future__ import annotations

import importlib
import json
import sys
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.plugins.cli import run_plugins
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing.doctor import DoctorReport, PluginReport, ProbeReport, diagnose
from hardpoint.testing.doctor_text import render

if TYPE_CHECKING:
    from .conftest import Site


def examine(site: Site, *more: Path, **selection: Any) -> DoctorReport:
    return diagnose(PluginSelection(**selection), search_path=[str(site.root), *map(str, more)])


def row(report: DoctorReport, kind: str, name: str) -> PluginReport:
    (found,) = [r for k in report.kinds if k.kind == kind for r in k.plugins if r.plugin.name == name]
    return found


def text_of(report: DoctorReport, **options: Any) -> str:
    return render(report, verbose=options.pop("verbose", False), **options)


MODULE = {"acme.mod": ""}


def test_declared_capabilities_and_tasks_are_shown_without_an_import(site: Site) -> None:
    entry = {"capabilities": {"returns_lse": True}, "required_tasks": ["embed"]}
    site.install("acme", {"endpoint:e": "acme.mod:c"}, modules=MODULE, manifest={"plugins": {"endpoint": {"e": entry}}})
    report = examine(site)
    found = row(report, "endpoint", "e")
    assert (found.capabilities, found.required_tasks, found.has_manifest) == ({"returns_lse": True}, ("embed",), True)
    assert "declares returns_lse=True" in text_of(report, verbose=True)
    assert "serves the tasks embed" in text_of(report, verbose=True)
    assert "acme.mod" not in sys.modules


def test_a_manifest_that_is_behind_the_entry_points_is_a_fault(site: Site) -> None:
    """Installed plugins and the manifest are held against each other without importing anything."""
    plugins = {"tokenizer:new": "acme.mod:c", "tokenizer:kept": "acme.mod:c"}
    manifest: dict[str, Any] = {"plugins": {"tokenizer": {"kept": {}, "gone": {}}}}
    site.install("acme", plugins, modules=MODULE, manifest=manifest)
    report = examine(site)
    new, kept = row(report, "tokenizer", "new").faults, row(report, "tokenizer", "kept").faults
    assert "does not tell of it" in new[0]
    assert "tells of tokenizer:gone, which it does not provide" in kept[0]
    assert all("`hardpoint plugins manifest acme`" in fault for fault in (*new, *kept))
    assert [text for text in report.warnings if text.startswith("tokenizer:new (acme):")], "nobody has chosen it"
    chosen = examine(site, choices={"tokenizer": "new"})
    assert [text for text in chosen.problems if text.startswith("tokenizer:new (acme):")]


def test_a_conformance_class_is_in_no_manifest(site: Site) -> None:
    plugins = {"conformance:hash": "acme.mod:c", "hash:h": "acme.mod:c"}
    site.install("acme", plugins, modules=MODULE, manifest={"plugins": {"hash": {"h": {}}}})
    report = examine(site)
    assert row(report, "conformance", "hash").faults == row(report, "hash", "h").faults == ()


def test_a_missing_module_matters_as_much_as_its_plugin(site: Site) -> None:
    site.install("acme", {"hash:h": "nowhere_to_be_found:c", "hooks:audit": "nowhere_to_be_found:c"})
    report = examine(site)
    assert [text for text in report.warnings if "hash:h" in text and "is not there" in text]
    assert [text for text in report.problems if "hooks:audit" in text and "install the distribution again" in text]


def test_faulty_plugins_show_their_details_and_others_one_line(site: Site) -> None:
    site.install("acme", {"hash:good": "acme.mod:c"}, modules=MODULE, requires=["hardpoint-core>=0.0.1"])
    site.install("other", {"hash:bad": "nowhere_to_be_found:c"}, requires=["hardpoint-core>=0.0.2"])
    lines = text_of(examine(site)).splitlines()
    assert "├─ good  acme 1.0  available" in lines
    assert not any("0.0.1" in line for line in lines)
    assert any("0.0.2" in line for line in lines)
    assert any("fault: its module 'nowhere_to_be_found'" in line for line in lines)


def test_one_kind_can_be_shown_alone(site: Site) -> None:
    site.install("acme", {"hash:h": "acme.mod:c", "hooks:audit": "acme.mod:c"}, modules=MODULE)
    text = text_of(examine(site), kind="hash")
    assert "acme 1.0" in text
    assert "audit" not in text
    assert "scheduler  (one, in engine): none installed" in text_of(examine(site), kind="scheduler")


def test_what_a_worker_probe_finds_is_told_and_judged(site: Site) -> None:
    """Of a plugin that is chosen, a broken probe is a problem; of one that is merely there, a warning."""
    site.install("acme", {"attention_backend:a": "acme.mod:c"}, modules=MODULE)
    broken = {("attention_backend", "a"): ProbeReport("broken", "no\nluck", {}, ("it is broken: no\nluck",))}
    search = [str(site.root)]
    idle = diagnose(PluginSelection(), search_path=search, probe_workers=lambda plan: broken)
    assert "[broken: no luck]" in text_of(idle)
    assert [text for text in idle.warnings if "it is broken" in text]
    chosen = PluginSelection(choices={"attention_backend": "a"})
    active = diagnose(chosen, search_path=search, probe_workers=lambda plan: broken)
    assert [text for text in active.problems if "attention_backend:a (acme): it is broken" in text]


def test_the_environment_in_force_is_shown_without_its_secrets(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HARDPOINT_PLUGINS", "")
    monkeypatch.setenv("HARDPOINT_API_KEY", "very-secret")
    monkeypatch.setenv("HARDPOINT_ADMIN_KEY", "very-secret")
    monkeypatch.setenv("HARDPOINT_PLUGIN__HASH__H__TOKEN", "very-secret")
    monkeypatch.setenv("HARDPOINT_ENDPOINTS", "a\x1b[31m")
    report = examine(site)
    text = text_of(report)
    assert "environment: HARDPOINT_PLUGINS=\n" in text, "set but empty differs from unset"
    assert "environment: HARDPOINT_API_KEY=(set, not shown)" in text
    assert "very-secret" not in text + report.to_json()
    assert "\x1b" not in text


def test_what_is_in_archives_is_not_found_and_that_is_said(site: Site, tmp_path: Path) -> None:
    """R12.17: zip files and eggs on the search path can be imported from, but hold no plugin for us."""
    site.install("acme", {"hash:h": "acme.mod:c"}, modules=MODULE)
    archive, egg = tmp_path / "packed.zip", tmp_path / "laid.egg"
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("inner-1.0.dist-info/METADATA", "Name: inner\nVersion: 1.0\n")
        file.writestr("inner-1.0.dist-info/entry_points.txt", "[hardpoint.hash.v1]\nhidden = inner:c\n")
        file.writestr("inner.py", "")
    (egg / "EGG-INFO").mkdir(parents=True)
    (egg / "EGG-INFO" / "entry_points.txt").write_text("[hardpoint.hash.v1]\nhidden = inner:c\n")
    report = examine(site, archive, egg, tmp_path / "absent.zip")
    assert report.archives == (str(archive), str(egg))
    assert [name.plugin.name for kind in report.kinds for name in kind.plugins] == ["h"]
    for path in report.archives:
        assert f"warning: {path} is an archive: no plugin in it is found; install it as a folder" in text_of(report)


def test_a_package_copied_without_metadata_is_not_found_but_the_scan_is_counted(site: Site) -> None:
    """R12.17, P12.5."""
    site.install("acme", {"hash:h": "acme.mod:c"}, modules=MODULE)
    site.write_module("copied.mod", "")
    report = examine(site)
    assert report.num_distributions == 1
    assert ", 1 distributions scanned" in text_of(report)


@pytest.fixture
def only_site(site: Site, monkeypatch: pytest.MonkeyPatch) -> Site:
    """The scratch folder as the whole search path of metadata, with everything needed already imported."""
    examine(site)
    importlib.import_module("hardpoint.testing.start_checks")
    monkeypatch.setattr(sys, "path", [str(site.root)])
    for name in ("HARDPOINT_PLUGINS", "HARDPOINT_ENDPOINTS", "HARDPOINT_CONFIG"):
        monkeypatch.delenv(name, raising=False)
    return site


def states(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    kinds = json.loads(capsys.readouterr().out)["kinds"]
    return {f"{k['kind']}:{r['plugin']['name']}": r["state"] for k in kinds for r in k["plugins"]}


def test_a_settings_file_can_be_judged(only_site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """What `serve --config` would select; flags win over the file. No model has to be named in it."""
    names = ("hooks:audit", "hooks:other", "endpoint:mine", "scheduler:quick", "scheduler:slow", "platform:p")
    only_site.install("acme", dict.fromkeys(names, "acme.mod:c"), modules=MODULE)
    config = tmp_path / "settings.yaml"
    config.write_text(
        "scheduler: {scheduler: quick}\nserver: {endpoints: [mine]}\nplugin_policy: {allow: [audit]}\n"
        "execution: {platform: p}\n"
    )
    run_plugins(["list", "--json", "--config", str(config)])
    found = states(capsys)
    assert found["hooks:audit"] == found["endpoint:mine"] == found["scheduler:quick"] == "active"
    assert found["hooks:other"] == "refused"
    assert found["scheduler:slow"] == "available"
    run_plugins(["list", "--json", "--config", str(config), "--plugins", "other", "--use", "scheduler=slow"])
    found = states(capsys)
    assert (found["hooks:audit"], found["hooks:other"], found["scheduler:slow"]) == ("refused", "active", "active")
    config.write_text("server: {endpoint: [mine]}\n")
    with pytest.raises(ConfigError, match="endpoints"):
        run_plugins(["doctor", "--config", str(config)])


def judged(capsys: pytest.CaptureFixture[str], *flags: str) -> tuple[dict[str, str], str]:
    """Reasons by plugin, and the problems."""
    run_plugins(["doctor", "--json", *flags])
    report = json.loads(capsys.readouterr().out)
    reasons = {f"{k['kind']}:{r['plugin']['name']}": r["reason"] for k in report["kinds"] for r in k["plugins"]}
    return reasons, "\n".join(report["problems"])


def test_what_the_environment_chooses_is_judged_as_a_start_takes_it(
    only_site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = ("scheduler:fcfs", "scheduler:quick", "hash:sha256", "hash:other")
    only_site.install("acme", dict.fromkeys(names, "acme.mod:c"), modules=MODULE)
    reasons, _ = judged(capsys)
    assert (reasons["scheduler:fcfs"], reasons["hash:sha256"]) == ("the default", "the default")
    monkeypatch.setenv("HARDPOINT_SCHEDULER", "quick")
    monkeypatch.setenv("HARDPOINT_HASH_ALGORITHM", "nope")
    reasons, problems = judged(capsys)
    assert reasons["scheduler:quick"] == "named by the operator"
    assert "no hash plugin 'nope'" in problems
    config = tmp_path / "settings.yaml"
    config.write_text("cache: {hash_algorithm: other}\n")
    monkeypatch.delenv("HARDPOINT_HASH_ALGORITHM")
    monkeypatch.setenv("HARDPOINT_CONFIG", str(config))
    assert judged(capsys)[0]["hash:other"] == "named by the operator"
    assert judged(capsys, "--use", "scheduler=fcfs")[0]["scheduler:fcfs"] == "named by the operator"


def test_settings_that_no_start_takes_are_problems(
    only_site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    entry: dict[str, Any] = {"capabilities": {}}
    only_site.install(
        "acme", {"scheduler:fcfs": "acme.mod:c"}, modules=MODULE, manifest={"plugins": {"scheduler": {"fcfs": entry}}}
    )
    monkeypatch.setenv("HARDPOINT_KV_EVENTS", "1")
    monkeypatch.setenv("HARDPOINT_HOST", "0.0.0.0")
    _, problems = judged(capsys)
    assert "tells no KV cache events" in problems
    assert "without a key would let anybody use the model" in problems
    monkeypatch.setenv("HARDPOINT_MAX_NUM_SEQS", "4")
    monkeypatch.setenv("HARDPOINT_MAX_NUM_ACTIVE_SEQS", "8")
    assert "must be at most max_num_seqs (4)" in judged(capsys)[1]


def test_a_plugin_that_an_option_names_has_to_exist(
    only_site: Site, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    option = {"type": "string", "default": "late", "plugin_kind": "scheduling_policy"}
    schema = {"type": "object", "properties": {"policy": option}, "additionalProperties": False}
    only_site.install(
        "acme",
        {"scheduler:fcfs": "acme.mod:c", "scheduling_policy:fair": "acme.mod:c"},
        modules=MODULE,
        manifest={"plugins": {"scheduler": {"fcfs": {"options": schema}}, "scheduling_policy": {"fair": {}}}},
    )
    assert "no scheduling_policy plugin 'late'" in judged(capsys)[1]
    config = tmp_path / "settings.yaml"
    config.write_text("plugins: {scheduler: {fcfs: {policy: fiar}}}\n")
    assert "(named by plugins.scheduler.fcfs.policy)" in judged(capsys, "--config", str(config))[1]
    config.write_text("plugins: {scheduler: {fcfs: {policy: fair}}}\n")
    assert "scheduling_policy" not in judged(capsys, "--config", str(config))[1]
    config.write_text("plugins: {scheduler: {fcfs: {polcy: fair}}}\n")
    assert "hardpoint plugins manifest acme --check" in judged(capsys, "--config", str(config))[1]


def test_a_kind_is_checked_and_filters_json_too(only_site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    only_site.install("acme", {"hash:h": "acme.mod:c", "hooks:audit": "acme.mod:c"}, modules=MODULE)
    assert run_plugins(["list", "hash", "--json"]) == 0
    assert states(capsys) == {"hash:h": "available"}
    assert run_plugins(["doctor", "hash"]) == 1, "problems of other kinds stay problems"
    assert "problem: no worker plugin is installed" in capsys.readouterr().out
    with pytest.raises(PluginNotFoundError, match="did you mean 'hash'"):
        run_plugins(["list", "hahs"])


def test_verbose_shows_what_is_behind_a_line(only_site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    only_site.install("acme", {"hash:h": "acme.mod:c"}, modules=MODULE)
    run_plugins(["list"])
    assert "acme.mod:c" not in capsys.readouterr().out
    run_plugins(["list", "-v"])
    assert "acme.mod:c, API v1," in capsys.readouterr().out


def test_kits_are_shown_to_those_who_ask(only_site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    only_site.install("acme", {"hash:h": "acme.mod:c", "conformance:hash.h": "acme.mod:c"}, modules=MODULE)
    for words, is_shown in (([], False), (["-v"], True), (["conformance"], True), (["--json"], True)):
        run_plugins(["list", *words])
        assert ("hash.h" in capsys.readouterr().out) is is_shown, words


def test_no_color_is_heeded(
    only_site: Site, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    only_site.install("acme", {"hash:h": "acme.mod:c"}, modules=MODULE)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.delenv("NO_COLOR", raising=False)
    run_plugins(["list"])
    assert "\x1b[1mhash\x1b[0m" in capsys.readouterr().out
    monkeypatch.setenv("NO_COLOR", "")
    run_plugins(["list"])
    assert "\x1b[" not in capsys.readouterr().out


def test_every_kind_has_a_row_in_the_report(site: Site) -> None:
    assert [kind.kind for kind in examine(site).kinds] == list(KINDS)

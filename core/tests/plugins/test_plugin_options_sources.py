"""Options of plugins from file, environment, ``--plugin`` and flags of their own, and what ``--help`` tells of them."""

from __future__ import annotations

import argparse
import enum
import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.config import add_arguments, load_config
from hardpoint.config.plugin_options import add_plugin_flags
from hardpoint.errors import ConfigError
from hardpoint.plugins.cli import run_plugins
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing.commands.list import _flag_faults as flag_faults
from hardpoint.testing.manifest_writer import options_schema

if TYPE_CHECKING:
    from .conftest import Site

MODULE = "raise RuntimeError('imported')\n"


class Level(enum.StrEnum):
    ON = "on"
    OFF = "off"


class AuditOptions(BaseModel):
    model_config = ConfigDict(extra="forbid")

    file: str = Field(default="audit.log", description="where to write", json_schema_extra={"flag": "--audit-file"})
    every: int = Field(default=1, ge=1, description="of how many, 100%", json_schema_extra={"flag": "--audit-every"})
    verbose: bool = Field(default=False, description="write more", json_schema_extra={"flag": "--audit-verbose"})
    tags: tuple[str, ...] = Field(default=("a",), description="words to add")
    label: str | None = Field(default=None, description="a title")
    level: Level | None = Field(default=None, description="a word that YAML knows")
    base: Level = Field(default=Level.ON, description="another")


def manifest(kind: str, name: str, options: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"plugins": {kind: {name: {} if options is None else {"options": options}}}}


def flagged(flag: object, key: str = "key", **more: Any) -> dict[str, Any]:
    return {"type": "object", "properties": {key: {"type": "string", "flag": flag, **more}}}


@pytest.fixture
def audit(site: Site) -> Site:
    """A plugin whose import fails: nothing here may import it."""
    site.install(
        "dist-audit",
        {"stat_logger:audit-log.v2": "audit_pkg.plugin:create"},
        modules={"audit_pkg.plugin": MODULE},
        manifest=manifest("stat_logger", "audit-log.v2", options_schema(AuditOptions)),
    )
    return site


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser()
    add_arguments(made, with_server=True)
    add_plugin_flags(made)
    return made


def options(*flags: str, text: str = "model: m\n", tmp_path: Path, **environ: str) -> Any:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    config = load_config(parser().parse_args(["--config", str(path), *flags]), environ)
    return config.plugins.get("stat_logger", {}).get("audit-log.v2", {})


VARIABLE = "HARDPOINT_PLUGIN__STAT_LOGGER__AUDIT_LOG_V2__"
IN_FILE = "model: m\nplugins: {stat_logger: {audit-log.v2: {file: from-file, every: 2}}}\n"


@pytest.mark.usefixtures("audit")
class TestSources:
    def test_command_line_over_environment_over_file(self, tmp_path: Path) -> None:
        """As for settings, and key by key: what a weaker source says of other keys stays."""
        assert options(text=IN_FILE, tmp_path=tmp_path) == {"file": "from-file", "every": 2}
        environ = {f"{VARIABLE}FILE": "from-environment"}
        assert options(text=IN_FILE, tmp_path=tmp_path, **environ) == {"file": "from-environment", "every": 2}
        flags = ("--plugin", "stat_logger.audit-log.v2.file=from-flag")
        assert options(*flags, text=IN_FILE, tmp_path=tmp_path, **environ) == {"file": "from-flag", "every": 2}

    @pytest.mark.parametrize(
        "variable",
        [
            f"{VARIABLE}EVERY",
            "HARDPOINT_PLUGIN__stat_logger__audit_log_v2__every",
            "HARDPOINT_PLUGIN__Stat_Logger__Audit_Log_V2__Every",
        ],
    )
    def test_the_case_of_a_variable_does_not_matter(self, tmp_path: Path, variable: str) -> None:
        assert options(tmp_path=tmp_path, **{variable: "3"}) == {"every": 3}

    @pytest.mark.parametrize(
        ("variable", "suggestion"),
        [
            (f"{VARIABLE}EVRY", f"did you mean '{VARIABLE}EVERY'?"),
            ("HARDPOINT_PLUGIN__STAT_LOGGER__AUDITLOG_V2__EVERY", f"did you mean '{VARIABLE}EVERY'?"),
            ("HARDPOINT_PLUGIN__STAT_LOGER__AUDIT_LOG_V2__EVERY", f"did you mean '{VARIABLE}EVERY'?"),
            ("HARDPOINT_PLUGIN__STAT_LOGGER", "HARDPOINT_PLUGIN__KIND__NAME__KEY"),
        ],
    )
    def test_a_variable_that_means_nothing_is_named(self, tmp_path: Path, variable: str, suggestion: str) -> None:
        with pytest.raises(ConfigError) as raised:
            options(tmp_path=tmp_path, **{variable: "3"})
        assert f"{variable} means nothing" in str(raised.value)
        assert suggestion in str(raised.value)

    def test_a_variable_with_two_meanings_is_refused(self, audit: Site, tmp_path: Path) -> None:
        audit.install(
            "dist-other",
            {"stat_logger:audit_log.v2": "other_pkg.plugin:create"},
            modules={"other_pkg.plugin": MODULE},
            manifest=manifest("stat_logger", "audit_log.v2", options_schema(AuditOptions) | flagged("--other", "file")),
        )
        with pytest.raises(
            ConfigError, match=r"means stat_logger\.audit-log\.v2\.file and stat_logger\.audit_log\.v2\.file"
        ):
            options(tmp_path=tmp_path, **{f"{VARIABLE}FILE": "x"})

    @pytest.mark.parametrize("written", ["123", "yes", "a: b", "[x", "# no", "'quoted'", "null", ""])
    def test_a_text_is_taken_as_it_stands(self, tmp_path: Path, written: str) -> None:
        assert options("--audit-file", written, tmp_path=tmp_path) == {"file": written}
        assert options("--plugin", f"stat_logger.audit-log.v2.file={written}", tmp_path=tmp_path) == {"file": written}
        assert options(tmp_path=tmp_path, **{f"{VARIABLE}FILE": written}) == {"file": written}

    def test_other_values_are_written_as_in_a_file(self, tmp_path: Path) -> None:
        assert options(tmp_path=tmp_path, **{f"{VARIABLE}TAGS": "[x, y]"}) == {"tags": ["x", "y"]}
        assert options(tmp_path=tmp_path, **{f"{VARIABLE}LABEL": "null"}) == {"label": None}
        assert options(tmp_path=tmp_path, **{f"{VARIABLE}LABEL": "7"}) == {"label": "7"}
        words = {f"{VARIABLE}LEVEL": "on", f"{VARIABLE}BASE": "off"}
        assert options(tmp_path=tmp_path, **words) == {"level": "on", "base": "off"}
        with pytest.raises(ConfigError, match=f"{VARIABLE}TAGS: the value cannot be read"):
            options(tmp_path=tmp_path, **{f"{VARIABLE}TAGS": "[x"})

    @pytest.mark.parametrize(
        "text", ["nothing", "stat_logger.every=1", ".audit.every=1", "stat_logger.audit.=1", "stat_logger..every=1"]
    )
    def test_another_form_of_plugin_is_refused(self, tmp_path: Path, text: str) -> None:
        with pytest.raises(ConfigError, match=r"is not of the form kind\.name\.key=value"):
            options("--plugin", text, tmp_path=tmp_path)

    def test_a_flag_of_its_own_is_a_spelling_of_the_option(self, tmp_path: Path) -> None:
        assert options("--audit-file=x", "--audit-every", "4", tmp_path=tmp_path) == {"file": "x", "every": 4}
        assert options("--audit-verbose", tmp_path=tmp_path) == {"verbose": True}
        assert options("--no-audit-verbose", tmp_path=tmp_path) == {"verbose": False}

    def test_the_last_of_both_spellings_counts(self, tmp_path: Path) -> None:
        long = ("--plugin", "stat_logger.audit-log.v2.every=5")
        assert options("--audit-every", "4", *long, tmp_path=tmp_path) == {"every": 5}
        assert options(*long, "--audit-every", "4", tmp_path=tmp_path) == {"every": 4}

    def test_help_shows_the_flag_under_the_plugin(self) -> None:
        text = parser().format_help()
        assert "stat_logger.audit-log.v2 (dist-audit):" in text
        assert "--audit-every VALUE" in text
        assert "--audit-verbose, --no-audit-verbose" in text
        assert "of how many, 100% (integer ≥ 1, default 1)" in " ".join(text.split())
        assert "audit_pkg.plugin" not in sys.modules


def test_a_plugin_without_a_manifest_takes_variables_for_any_key(site: Site, tmp_path: Path) -> None:
    """It is judged where it loads."""
    site.install("dist-b", {"stat_logger:bare": "bare_pkg.plugin:create"}, modules={"bare_pkg.plugin": MODULE})
    assert load_config(
        parser().parse_args(["m"]), {"HARDPOINT_PLUGIN__STAT_LOGGER__BARE__SOME_KEY": "[1]"}
    ).plugins == {"stat_logger": {"bare": {"some_key": [1]}}}


@pytest.mark.parametrize(
    "text",
    [
        "{",
        '{"plugins": {"stat_logger": {"broken": {"options": {"properties": []}}}}}',
        '{"plugins": {"stat_logger": {"broken": {"options": {"properties": {"a": 3}}}}}}',
        '{"plugins": {"stat_logger": {"broken": {"options": {"required": 1, "properties": {"a": {}}}}}}}',
        '{"plugins": {"stat_logger": {"broken": {"options": {"properties": {"a": {"description": {}}}}}}}}',
        '{"plugins": {"stat_logger": {"broken": {"options": {"properties": {"a": {"anyOf": [3]}}}}}}}',
    ],
)
def test_a_damaged_manifest_costs_nobody_their_command_line(
    site: Site, capsys: pytest.CaptureFixture[str], text: str
) -> None:
    """And the doctor names the file."""
    site.install("dist-c", {"stat_logger:broken": "broken_pkg.plugin:create"}, modules={"broken_pkg.plugin": MODULE})
    (site.root / "broken_pkg" / "hardpoint.json").write_text(text)
    assert parser().get_default("plugin_faults") == ()
    with pytest.raises(SystemExit):
        parser().parse_args(["--help=plugins"])
    assert "stat_logger.broken (dist-c): no manifest" in capsys.readouterr().out
    run_plugins(["doctor", "stat_logger"])
    assert "broken_pkg/hardpoint.json is not valid" in capsys.readouterr().out


@pytest.mark.parametrize(
    "part",
    [
        {"type": "array", "items": [{"type": "integer"}]},
        {"type": ["string", "null"]},
        {"enum": [{"a": 1}]},
        {"anyOf": []},
        {"minimum": "many", "type": "integer"},
        {"items": False},
        {"default": {"a": [1]}},
        {"$ref": 3},
        {"type": {}},
        {"anyOf": [{"type": []}]},
    ],
    ids=str,
)
def test_an_odd_schema_is_shown_somehow(site: Site, capsys: pytest.CaptureFixture[str], part: dict[str, Any]) -> None:
    site.install(
        "dist-d",
        {"stat_logger:odd": "odd_pkg.plugin:create"},
        modules={"odd_pkg.plugin": MODULE},
        manifest=manifest("stat_logger", "odd", {"properties": {"key": {**part, "flag": "--odd-key"}}}),
    )
    assert flag_faults() == ()
    with pytest.raises(SystemExit):
        parser().parse_args(["--help=plugins"])
    assert "key (--odd-key)" in capsys.readouterr().out
    config = load_config(parser().parse_args(["m", "--odd-key", "[1]"]), {})
    assert set(config.plugins["stat_logger"]["odd"]) == {"key"}
    build_plan(discover(), PluginSelection(options=config.plugins))


class TestCollisions:
    def install(self, site: Site, dist: str, flag: object, name: str | None = None) -> None:
        package = dist.replace("-", "_")
        site.install(
            dist,
            {f"stat_logger:{name or dist}": f"{package}.plugin:create"},
            modules={f"{package}.plugin": MODULE},
            manifest=manifest("stat_logger", name or dist, flagged(flag)),
        )

    def refused(self, capsys: pytest.CaptureFixture[str], *told: str) -> None:
        """By the doctor and by every start."""
        faults = flag_faults()
        assert len(faults) == 1
        assert all(part in faults[0] for part in told), faults
        with pytest.raises(ConfigError) as raised:
            load_config(parser().parse_args(["m"]), {})
        assert str(raised.value) == faults[0]
        assert run_plugins(["doctor", "--json"]) == 1
        assert faults[0] in json.loads(capsys.readouterr().out)["problems"]

    @pytest.mark.parametrize("flag", ["--port", "--plugin", "--help", "--no-prefix-caching"])
    def test_with_a_flag_of_the_core(self, site: Site, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
        self.install(site, "mine", flag)
        self.refused(capsys, f"flag {flag} of stat_logger.mine.key (mine)", "the command itself")

    def test_between_two_plugins(self, site: Site, capsys: pytest.CaptureFixture[str]) -> None:
        self.install(site, "mine", "--shared")
        self.install(site, "yours", "--shared")
        self.refused(capsys, "flag --shared", "stat_logger.mine.key (mine)", "stat_logger.yours.key (yours)")

    @pytest.mark.parametrize("flag", ["audit", "-a", "--a=b", "--A", 3, None, ["--a"]])
    def test_a_flag_that_is_none(self, site: Site, flag: object, capsys: pytest.CaptureFixture[str]) -> None:
        """A manifest written by hand may say anything."""
        self.install(site, "mine", flag)
        self.refused(capsys, "stat_logger.mine.key (mine)", "is not of the form --two-words")

    def test_two_versions_of_one_plugin_share_their_flag(self, site: Site) -> None:
        """Whichever is pinned: the flag sets the same option."""
        self.install(site, "mine", "--shared", name="same")
        self.install(site, "yours", "--shared", name="same")
        assert flag_faults() == ()

    def test_a_command_keeps_the_flags_it_adds_itself(self, site: Site) -> None:
        self.install(site, "mine", "--prompt")
        made = argparse.ArgumentParser()
        add_arguments(made, with_server=False)
        made.add_argument("--prompt")
        assert "belongs to the command itself" in add_plugin_flags(made)[0]
        assert made.parse_args(["--prompt", "x"]).prompt == "x"


RUN_AND_LIST_MODULES = (
    "import sys; from hardpoint.cli import main; sys.argv[0] = 'hardpoint'\n"
    "try: status = main()\n"
    "except SystemExit as error: status = error.code\n"
    "print('MODULES', *sorted(sys.modules)); sys.exit(status)"
)


def run(site: Site, *arguments: str) -> tuple[int, str, set[str]]:
    """Exit status, output and imported modules of a command in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", RUN_AND_LIST_MODULES, *arguments],
        capture_output=True,
        text=True,
        env={"PYTHONPATH": str(site.root), "COLUMNS": "120"},
        check=False,
    )
    text, _, modules = done.stdout.partition("MODULES")
    return done.returncode, text + done.stderr, set(modules.split())


def test_help_of_plugins_lists_options_and_imports_none(audit: Site) -> None:
    """Also one whose import fails, and one that has no manifest."""
    audit.install("dist-b", {"stat_logger:bare": "bare_pkg.plugin:create"}, modules={"bare_pkg.plugin": MODULE})
    empty = {"type": "object", "properties": {}}
    audit.install(
        "dist-e",
        {"stat_logger:plain": "plain_pkg.plugin:create"},
        modules={"plain_pkg.plugin": MODULE},
        manifest=manifest("stat_logger", "plain", empty),
    )
    status, text, modules = run(audit, "serve", "--help=plugins")
    assert status == 0, text
    lines = [" ".join(line.split()) for line in text.splitlines()]
    at = lines.index("stat_logger.audit-log.v2 (dist-audit)")
    assert lines[at + 1 : at + 8] == [
        'file (--audit-file) text default "audit.log" where to write',
        "every (--audit-every) integer ≥ 1 default 1 of how many, 100%",
        "verbose (--audit-verbose) switch default false write more",
        'tags list of text default ["a"] words to add',
        "label text a title",
        "level on | off a word that YAML knows",
        'base on | off default "on" another',
    ]
    assert "stat_logger.bare (dist-b): no manifest, so its options are known only where it loads" in lines
    assert "stat_logger.plain (dist-e): no options" in lines
    assert not {name for name in modules if name.split(".")[0] in ("audit_pkg", "bare_pkg", "plain_pkg", "torch")}


def test_serve_takes_the_flag_and_shows_it(audit: Site) -> None:
    status, text, modules = run(audit, "serve", "--help")
    assert status == 0
    assert "--audit-file VALUE" in text
    assert not {name for name in modules if name.split(".")[0] in ("audit_pkg", "torch")}
    status, text, _ = run(audit, "serve", "--audit-fil=x", "--audit-every")
    assert status == 2
    assert "--audit-every: expected one argument" in text

"""`hardpoint plugins test` says in words what a plugin breaks, survives what it does, and exits accordingly."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from hardpoint.cli import main

PLUGIN = """
import os, sys, time
from hardpoint.interfaces.plugin import plugin
{prelude}

class Hash:
    name, cryptographic = "acme", False
    def __call__(self, parent, tokens, extra):
        {body}

@plugin("hash")
def create(ctx, options):
    return Hash()
"""
SOUND = "import hashlib; return hashlib.sha256(parent + tokens + b'|' + extra).digest()"


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


def install(site: Path, body: str = SOUND, prelude: str = "", group: str = "hardpoint.hash.v1") -> None:
    (site / "acme_hash.py").write_text(PLUGIN.format(prelude=prelude, body=body))
    folder = site / "acme_hash-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.3\nName: acme-hash\nVersion: 1.0\nRequires-Dist: hardpoint-core<1\n"
    )
    (folder / "entry_points.txt").write_text(f"[{group}]\nacme = acme_hash:create\n")


def judge(capsys: pytest.CaptureFixture[str], *more: str) -> tuple[int, str]:
    status = main(["plugins", "test", "acme-hash", *more])
    shown = capsys.readouterr()
    return status, shown.out + shown.err


def test_a_broken_rule_is_told_with_what_it_asks_for(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "return bytes(32)")
    status, told = judge(capsys)
    assert status == 1
    assert "hash:acme  FAILED" in told
    assert "x test_every_input_counts: " in told
    explained = told.partition("x test_every_input_counts: ")[2].splitlines()[1]
    assert explained.startswith("      "), "explanations are set in"
    assert not explained.strip().startswith("E "), "pytest's marks tell an author nothing"
    assert "verdict: 0 of 1 plugins keep the rules of their kinds" in told


def test_a_sound_plugin_passes(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site)
    status, told = judge(capsys, "-v")
    assert status == 0, told
    assert "hash:acme  PASSED" in told
    assert "  + test_every_input_counts" in told
    assert judge(capsys, "--only", "chained")[0] == 0


@pytest.mark.parametrize(
    ("body", "told"), [("os._exit(7)", "ended with status 7"), ("os.kill(os.getpid(), 9)", "ended with status -9")]
)
def test_a_crash_is_a_verdict(site: Path, capsys: pytest.CaptureFixture[str], body: str, told: str) -> None:
    install(site, body)
    status, text = judge(capsys)
    assert status == 1
    assert told in text


def test_a_hang_ends_at_the_limit(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "time.sleep(60)")
    status, text = judge(capsys, "--timeout", "4")
    assert status == 1
    assert "did not finish within 4 s" in text


def test_an_import_error_names_the_cause(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, prelude="import no_such_library")
    status, text = judge(capsys)
    assert status == 1
    assert "no_such_library" in text


def test_a_refused_plugin_fails_without_being_imported(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, prelude="raise SystemExit('imported')", group="hardpoint.hash.v9")
    status, text = judge(capsys)
    assert status == 1
    assert "API version 9" in text
    assert "0 of 1 plugins" in text


def test_json_is_stable(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "return bytes(32)")
    status, text = judge(capsys, "--json")
    report = json.loads(text)
    assert status == 1
    assert set(report) == {"core_version", "refused", "verdicts"}
    (verdict,) = report["verdicts"]
    assert verdict["suite"] == "HashSuite"
    assert {"name", "rule", "explanation"} == set(verdict["broken"][0])


def test_a_kind_without_kit_is_held_to_the_general_rules(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, group="hardpoint.eplb_policy.v1")
    (site / "acme_hash.py").write_text((site / "acme_hash.py").read_text().replace('"hash")', '"eplb_policy")'))
    status, text = judge(capsys)
    assert status == 0, text
    assert "there is no kit for the kind eplb_policy" in text


def test_an_unknown_target_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "test", "no-such-distribution"]) == 1
    assert "no installed plugin is meant by 'no-such-distribution'" in capsys.readouterr().err

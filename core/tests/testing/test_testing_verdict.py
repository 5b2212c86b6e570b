"""`hardpoint plugins test` says in words what a plugin breaks, survives what it does, and exits accordingly."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

import pytest

from hardpoint.cli import main
from hardpoint.plugins.records import RefusedPlugin
from hardpoint.testing.verdict import BrokenRule, Verdict, render

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
NOTE_PID = "open(os.path.dirname(__file__) + '/pid', 'w').write(str(child.pid))"
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


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_assertion_without_words_is_quoted(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "return parent and 'text'")
    _, told = judge(capsys, "--only", "equal_bytes")
    assert "AssertionError: assert type(first) is bytes" in told


def test_a_sound_plugin_passes(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site)
    status, told = judge(capsys, "-v")
    assert status == 0, told
    assert "hash:acme  PASSED" in told
    assert "  + test_every_input_counts" in told
    assert judge(capsys, "--only", "chained")[0] == 0


@pytest.mark.slow
@pytest.mark.parametrize(
    ("body", "told"), [("os._exit(7)", "ended with status 7"), ("os.kill(os.getpid(), 9)", "ended with status -9")]
)
def test_a_crash_is_a_verdict(site: Path, capsys: pytest.CaptureFixture[str], body: str, told: str) -> None:
    install(site, body)
    status, text = judge(capsys)
    assert status == 1
    assert told in text


@pytest.mark.slow
def test_a_hang_ends_at_the_limit(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "time.sleep(60)")
    status, text = judge(capsys, "--timeout", "4")
    assert status == 1
    assert "did not finish within 4 s" in text


@pytest.mark.slow
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


@pytest.mark.slow
def test_json_is_stable(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, "return bytes(32)")
    status, text = judge(capsys, "--json")
    report = json.loads(text)
    assert status == 1
    assert set(report) == {"core_version", "refused", "verdicts"}
    (verdict,) = report["verdicts"]
    assert verdict["suite"] == "HashSuite"
    assert {"name", "rule", "explanation"} == set(verdict["broken"][0])


@pytest.mark.slow
def test_a_kind_without_kit_is_held_to_the_general_rules(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, group="hardpoint.eplb_policy.v1")
    (site / "acme_hash.py").write_text((site / "acme_hash.py").read_text().replace('"hash")', '"eplb_policy")'))
    status, text = judge(capsys)
    assert status == 0, text
    assert "there is no kit for the kind eplb_policy" in text


def test_an_unknown_target_lists_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plugins", "test", "no-such-distribution"]) == 1
    assert "no installed plugin is meant by 'no-such-distribution'" in capsys.readouterr().err


def ends(pid: int) -> bool:
    """Whether the process is gone, or is within seconds: a signal takes its time."""
    for _ in range(100):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.05)
    return False


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", ", start_new_session=True"], ids=["its group", "a session of its own"])
def test_children_of_a_plugin_hold_nobody_up(site: Path, capsys: pytest.CaptureFixture[str], flags: str) -> None:
    """They inherit its stderr, and stay behind when it ends."""
    child = f"child = subprocess.Popen(['sleep', '35']{flags}); {NOTE_PID}"
    install(site, prelude=f"import subprocess; {child}; os._exit(5)")
    started = time.monotonic()
    status, text = judge(capsys, "--timeout", "40")
    pid = int((site / "pid").read_text())
    assert status == 1
    assert "ended with status 5" in text
    assert time.monotonic() - started < 30
    if flags:
        os.kill(pid, 9)
    else:
        assert ends(pid)


@pytest.mark.slow
def test_children_end_with_a_plugin_that_hangs(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    child = f"child = subprocess.Popen(['sleep', '35']); {NOTE_PID}"
    install(site, prelude=f"import subprocess; {child}; time.sleep(60)")
    status, text = judge(capsys, "--timeout", "8")
    assert status == 1
    assert "did not finish within 8 s" in text
    assert ends(int((site / "pid").read_text()))


def test_bytes_that_are_no_text_are_shown_as_far_as_they_go(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site, prelude="os.write(2, b'\\xffbye\\xfe\\x1b[31m\\n'); os.write(1, b'\\xff'); os._exit(3)")
    status, text = judge(capsys)
    assert status == 1
    assert "ended with status 3" in text
    assert "\ufffdbye\ufffd" in text
    assert "\x1b" not in text


@pytest.mark.slow
@pytest.mark.parametrize("answer", ["garbage", "[" * 100_000, '{"kind": 1}', ""])
def test_an_answer_that_is_none_is_a_verdict(site: Path, capsys: pytest.CaptureFixture[str], answer: str) -> None:
    install(site, prelude=f"from pathlib import Path; Path(sys.argv[3]).write_text({answer!r}); os._exit(0)")
    status, text = judge(capsys)
    assert status == 1
    assert "left an answer that is no verdict" in text


@pytest.mark.parametrize("limit", ["nan", "-1", "0", "inf"])
def test_a_limit_that_is_none_is_refused(capsys: pytest.CaptureFixture[str], limit: str) -> None:
    assert main(["plugins", "test", "hash:sha256", "--timeout", limit]) != 0
    assert f"--timeout {limit} is no limit; give a number of seconds above 0" in capsys.readouterr().err


@pytest.mark.slow
def test_a_choice_of_rules_that_is_none_is_refused(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    install(site)
    status, text = judge(capsys, "--only", "(((")
    assert status != 0
    assert "--only '(((' is no choice of rules" in text
    assert "Traceback" not in text
    status, text = judge(capsys, "--only", "nothing_matches")
    assert status != 0
    assert "--only 'nothing_matches' matches no rule; leave it out and add -v" in text
    assert "verdict:" not in text


def test_nothing_of_a_plugin_reaches_the_terminal_as_an_order() -> None:
    evil = "a\x1b[31m\x07\x9b2J"
    verdict = Verdict(
        kind="hash",
        name=evil,
        distribution=evil,
        version=evil,
        suite=evil,
        kept=(evil,),
        broken=(BrokenRule(evil, evil, f"{evil}\n{evil}"),),
        not_claimed={evil: evil},
        figures=(evil,),
        fault=evil,
        note=evil,
    )
    for verbose in (False, True):
        text = render([verdict], [RefusedPlugin("hash", evil, evil, evil)], verbose=verbose)
        assert all(letter.isprintable() or letter == "\n" for letter in text)
    assert "\x1b[31mFAILED\x1b[0m" in render([verdict], [], color=True)

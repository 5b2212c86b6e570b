"""Settings of one instance from file, environment and flags."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from hardpoint.config import AppConfig, add_arguments, load_config
from hardpoint.errors import ConfigError


def load(tmp_path: Path, text: str, *flags: str, **environ: str) -> AppConfig:
    path = tmp_path / "settings.yaml"
    path.write_text(text)
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=True)
    return load_config(parser.parse_args(["--config", str(path), *flags]), environ)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Plugins a, b, c and d, which nobody loads: where hooks are installed, a list may name only what is."""
    metadata = tmp_path / "site" / "acme_letters.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-letters\nVersion: 1.0\n")
    names = "\n".join(f"{name} = acme_letters:{name}" for name in "abcd")
    (metadata / "entry_points.txt").write_text(f"[hardpoint.logits_processor.v1]\n{names}\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_the_environment_wins_over_the_file_for_plugins_too(tmp_path: Path, installed: None) -> None:
    text = "model: m\nplugin_policy: {allow: [a], strict: true}\n"
    assert load(tmp_path, text).plugin_policy.allow == ("a",)
    policy = load(tmp_path, text, HARDPOINT_PLUGINS="b,c", HARDPOINT_PLUGINS_STRICT="0").plugin_policy
    assert (policy.allow, policy.strict) == (("b", "c"), False)
    policy = load(tmp_path, text, "--plugins", "d", "--strict-plugins", HARDPOINT_PLUGINS="b").plugin_policy
    assert (policy.allow, policy.strict) == (("d",), True)
    assert load(tmp_path, text, HARDPOINT_PLUGINS="").plugin_policy.allow == ()


def test_an_engine_is_served_under_its_name_in_the_file(tmp_path: Path) -> None:
    text = "engines:\n  mine:\n    model: {name: m}\n"
    assert list(load(tmp_path, text).engines) == ["mine"]
    assert list(load(tmp_path, text, HARDPOINT_SERVED_NAME="other").engines) == ["other"]
    assert list(load(tmp_path, text + "      \n", "n").engines) == ["mine"]


def test_sections_beside_engines_are_not_dropped_in_silence(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cache must stand under the engine"):
        load(tmp_path, "engines:\n  mine:\n    model: m\ncache: {block_size: 8}\n")


@pytest.mark.parametrize(("text", "expected"), [("on", True), ("FALSE", False)])
def test_switches_are_read_from_the_environment(tmp_path: Path, text: str, expected: bool) -> None:
    config = load(tmp_path, "model: m\n", HARDPOINT_PREFIX_CACHING=text)
    assert config.engines["m"].cache.prefix_caching is expected


@pytest.mark.parametrize("setting", ["api_key", "admin_key", "api_key_file", "admin_key_file"])
def test_a_faulty_key_is_not_repeated(tmp_path: Path, setting: str) -> None:
    with pytest.raises(ConfigError, match=rf"server\.{setting}") as caught:
        load(tmp_path, f"model: m\nserver: {{{setting}: {{hidden: 1234567}}}}\n")
    assert "1234567" not in str(caught.value)


def test_a_setting_in_the_wrong_place_is_pointed_to_its_own(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'block_size'; did you mean 'cache\.block_size'"):
        load(tmp_path, "model: m\nblock_size: 8\n")
    with pytest.raises(ConfigError, match=r"'cachee' \(did you mean 'cache'\?\)"):
        load(tmp_path, "model: m\ncachee: {block_size: 8}\n")


def test_places_are_not_promised_twice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"scheduler: .*max_num_active_seqs must be at most max_num_seqs \(4\)"):
        load(tmp_path, "model: m\nscheduler: {max_num_seqs: 4, max_num_active_seqs: 8}\n")
    assert load(tmp_path, "model: m\n", HARDPOINT_MAX_NUM_ACTIVE_SEQS="8").engines["m"].scheduler.max_num_seqs is None

"""The way from settings as given to the frozen configuration, with hooks in between. No process, no engine."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from hardpoint.config import add_arguments, load_config
from hardpoint.config.settle import settle
from hardpoint.errors import ConfigError, PluginError, PluginLoadError
from hardpoint.testing.hooks_reset import forget_hooks

SOURCE = """
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.interfaces.plugin import plugin
from pydantic import BaseModel
class Options(BaseModel):
    code: str = ""
seen = []
def factory(name, **order):
    class Editor:
        def __init__(self, edit): self.edit = edit
        @hookimpl
        def process_booting(self): seen.append((name, "booting"))
        @hookimpl(**order)
        def configure(self, config):
            seen.append((name, sorted(config)))
            EDITS[name](config)
    @plugin("hooks", options=Options)
    def create(ctx, options): return Editor(options)
    return create
EDITS = dict.fromkeys(("one", "two"), lambda config: None)
one, two = factory("one", tryfirst=True), factory("two")
"""


@pytest.fixture
def editors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The module of two installed ``hooks`` plugins; its ``EDITS`` are what they do to the settings."""
    monkeypatch.syspath_prepend(str(tmp_path))
    metadata = tmp_path / "acme_editors.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-editors\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hardpoint.hooks.v1]\none = acme_editors:one\ntwo = acme_editors:two\n")
    (tmp_path / "acme_editors.py").write_text(SOURCE)
    importlib.invalidate_caches()
    yield importlib.import_module("acme_editors")
    forget_hooks()
    sys.modules.pop("acme_editors")


def document(**rest: Any) -> dict[str, Any]:
    return {"engines": {"m": {"model": {"name": "m"}, "cache": {"block_size": "16"}}}, **rest}


def test_without_hooks_settings_are_validated_as_they_are() -> None:
    assert settle(document()).engines["m"].cache.block_size == 16
    with pytest.raises(ConfigError, match=r"invalid configuration: unknown setting 'log_levle'") as caught:
        settle(document(log_levle="INFO"))
    assert "configure" not in str(caught.value)


def test_edits_are_made_in_order_before_anything_is_validated(editors: Any) -> None:
    given = document(server={"max_n": "many"})

    def repair(config: dict[str, Any]) -> None:
        assert config["server"]["max_n"] == "many"
        config["server"]["max_n"] = 3

    def use(config: dict[str, Any]) -> None:
        assert config["server"]["max_n"] == 3
        config["engines"]["m"]["scheduler"] = {"max_num_seqs": 2}

    editors.EDITS.update(one=repair, two=use)
    config = settle(given)
    assert (config.server.max_n, config.engines["m"].scheduler.max_num_seqs) == (3, 2)
    assert given == document(server={"max_n": "many"}), "what the caller gave stays as it was"
    assert [hook for _, hook in editors.seen] == ["booting"] * 2 + [["engines", "server"]] * 2


def test_hooks_boot_once_and_configure_each_time(editors: Any) -> None:
    settle(document())
    settle(document())
    assert [name for name, hook in editors.seen if hook == "booting"] == ["two", "one"]
    assert [name for name, hook in editors.seen if hook != "booting"] == ["one", "two"] * 2


def test_an_invalid_edit_names_every_plugin_that_edited(editors: Any) -> None:
    editors.EDITS["one"] = lambda config: config["engines"]["m"]["cache"].update(block_size=-1)
    with pytest.raises(ConfigError, match=r"cache\.block_size.*given: -1.*hook of one \(acme-editors\)$"):
        settle(document())
    editors.EDITS["two"] = lambda config: config.update(log_interval_s="soon")
    with pytest.raises(ConfigError, match=r"log_interval_s.*of one \(acme-editors\), two \(acme-editors\)$"):
        settle(document())


def test_of_a_hook_that_raises_no_edit_is_kept(editors: Any, caplog: pytest.LogCaptureFixture) -> None:
    def half(config: dict[str, Any]) -> None:
        config["server"] = {"max_n": 9}
        raise KeyError("rest")

    editors.EDITS["one"] = half
    assert settle(document()).server.max_n == 128
    assert "hook configure of 'one' raised KeyError: 'rest'" in caplog.text
    with pytest.raises(PluginLoadError, match="hook configure of 'one'"):
        settle(document(plugin_policy={"strict": True}))
    # Whoever sets its options wants it.
    with pytest.raises(PluginLoadError, match="hook configure of 'one'"):
        settle(document(plugins={"hooks": {"one": {"code": "x"}}}))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (("plugin_policy", "allow"), ["one", "two", "three"]),
        (("plugin_policy", "pins"), ["hooks:one=other"]),
        (("plugin_policy", "strict"), True),
        (("plugins", "hooks"), {"two": {"code": "x"}}),
        (("server", "endpoints"), ["admin"]),
        (("server", "endpoints"), []),
        (("server", "host"), "0.0.0.0"),
        (("server", "allow_anonymous"), True),
        (("server", "allowed_hosts"), ["*"]),
        (("server", "api_key"), ["mine"]),
        (("server", "api_key_file"), "/tmp/mine"),
        (("server", "admin_key"), ["mine"]),
        (("server", "admin_key_file"), "/tmp/mine"),
    ],
)
def test_hooks_cannot_say_which_plugins_may_act_nor_who_may_ask(
    editors: Any, path: tuple[str, str], value: Any
) -> None:
    """Installing a package must not widen what it or others may do."""
    editors.EDITS["two"] = lambda config: config.setdefault(path[0], {}).update({path[1]: value})
    changed = "plugin_policy" if path[0] == "plugin_policy" else ".".join(path)
    with pytest.raises(ConfigError, match=rf"hooks plugin two \(acme-editors\) changed {changed}, .*operator alone"):
        settle(document(plugin_policy={}))
    editors.EDITS["two"] = lambda config: config.setdefault(path[0], {})
    settle(document(plugin_policy={}))


def test_an_empty_list_is_not_the_same_as_none(editors: Any) -> None:
    """No endpoint at all was asked for; without the setting, those of the default would open."""
    editors.EDITS["two"] = lambda config: config["server"].pop("endpoints")
    with pytest.raises(ConfigError, match=r"two \(acme-editors\) changed server\.endpoints, .*operator alone"):
        settle(document(server={"endpoints": []}))


@pytest.mark.parametrize("edit", [lambda config: config["server"].update(max_n=3), lambda config: config.pop("server")])
def test_keys_are_not_shown_to_hooks_and_are_kept(editors: Any, edit: Any) -> None:
    given = document(server={"api_key": ["s3cret"], "admin_key": ("adm1n",)})
    shown: list[str] = []

    def look(config: dict[str, Any]) -> None:
        shown.append(repr(config))
        edit(config)

    editors.EDITS["one"] = look
    config = settle(given)
    assert (config.server.api_key, config.server.admin_key) == (("s3cret",), ("adm1n",))
    assert "s3cret" not in shown[0]
    assert "adm1n" not in shown[0]
    assert given["server"] == {"api_key": ["s3cret"], "admin_key": ("adm1n",)}


def test_options_of_other_plugins_may_be_edited(editors: Any) -> None:
    editors.EDITS["one"] = lambda config: config.update(plugins={"scheduler": {"fcfs": {"window": 1}}})
    assert settle(document()).plugins == {"scheduler": {"fcfs": {"window": 1}}}


@pytest.mark.parametrize("broken", [{"plugin_policy": 5}, {"plugin_policy": {"allow": 5}}, {"plugins": {"hooks": 5}}])
def test_no_hook_runs_under_settings_that_do_not_say_which(editors: Any, broken: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="invalid configuration"):
        settle(document(**broken, log_level="LOUD"))
    assert editors.seen == []


@pytest.mark.parametrize("allowed", [None, (), ("two",)])
def test_the_allow_list_decides_which_hooks_edit(editors: Any, allowed: tuple[str, ...] | None) -> None:
    settle(document(plugin_policy={"allow": allowed}))
    names = ["one", "two"] if allowed is None else list(allowed)
    assert [name for name, hook in editors.seen if hook != "booting"] == names


def test_command_line_environment_and_file_are_seen_as_given(
    editors: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown: list[dict[str, Any]] = []
    editors.EDITS["one"] = shown.append
    (tmp_path / "file.yaml").write_text("scheduler: {watermark: 0.5}\nlog_level: DEBUG\n")
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=True)
    arguments = parser.parse_args(["m", "--config", str(tmp_path / "file.yaml"), "--max-num-seqs", "4"])
    load_config(arguments, {"HARDPOINT_BLOCK_SIZE": "8"})
    assert shown == [
        {
            "engines": {
                "m": {
                    "model": {"name": "m"},
                    "cache": {"block_size": "8"},
                    "scheduler": {"watermark": 0.5, "max_num_seqs": "4"},
                }
            },
            "log_level": "DEBUG",
            "plugin_policy": {},
        }
    ]


def test_a_bad_pin_is_told_before_any_hook_is_created(editors: Any) -> None:
    with pytest.raises(PluginError, match="hooks:one=other"):
        settle(document(plugin_policy={"pins": ["hooks:one=other"]}))
    assert editors.seen == []

"""Manifests that nobody wrote in good faith: read at once, refused by name, and no command's help suffers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.cli import main
from hardpoint.errors import PluginError
from hardpoint.plugins.manifest import load_manifest
from hardpoint.testing.commands.list import _flag_faults as flag_faults

if TYPE_CHECKING:
    from .conftest import Site


def schema(**options: Any) -> str:
    return json.dumps({"plugins": {"hooks": {"h": {"options": {"properties": options}}}}})


def install(site: Site) -> Path:
    site.install("acme", {"hooks:h": "acme_pack:create"}, modules={"acme_pack.": ""})
    return site.root / "acme_pack" / "hardpoint.json"


@pytest.mark.parametrize(
    "text",
    [
        '{"plugins":{"hooks":{"h":{"options":' + '{"a":' * 50_000 + "1" + "}" * 50_000 + "}}}}",
        schema(k={"description": "x" * 2**20}),
        schema(k={"enum": 5}),
        schema(k={"items": {"anyOf": 5}}),
        schema(k={"items": "text"}),
    ],
    ids=["deep", "huge", "enum", "items", "items-text"],
)
def test_a_manifest_of_no_use_is_refused_by_its_path(site: Site, text: str) -> None:
    path = install(site)
    path.write_text(text)
    with pytest.raises(PluginError, match=rf"plugin manifest {path} is not valid") as caught:
        load_manifest(site.discover().plugins[0])
    assert len(str(caught.value)) < 1000
    assert flag_faults() == ()


def test_a_pipe_is_not_waited_for(site: Site) -> None:
    path = install(site)
    os.mkfifo(path)
    with pytest.raises(PluginError, match="must be a file of at most 1048576 bytes"):
        load_manifest(site.discover().plugins[0])


@pytest.mark.parametrize("items", [True, {"type": "integer"}, [{"type": "integer"}, {"type": "string"}]])
def test_every_form_of_items_is_read(site: Site, items: Any) -> None:
    install(site).write_text(schema(k={"type": "array", "items": items}))
    manifest = load_manifest(site.discover().plugins[0])
    assert manifest is not None
    assert manifest.option_schemas["k"]["items"] == items


def test_help_holds_nothing_that_a_terminal_obeys(site: Site, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "\x1b]0;title\x07"
    site.install(f"acme{evil}", {f"hooks:h{evil}": "acme_pack:create"}, modules={"acme_pack.": ""})
    option = {"flag": "--evil-option", "description": evil, "default": evil, "enum": [evil]}
    text = json.dumps({"plugins": {"hooks": {f"h{evil}": {"options": {"properties": {f"k{evil}": option}}}}}})
    (site.root / "acme_pack" / "hardpoint.json").write_text(text)
    for arguments in (["serve", "--help"], ["serve", "--help=plugins"]):
        with pytest.raises(SystemExit):
            main(arguments)
        shown = capsys.readouterr().out
        assert "--evil-option" in shown
        assert {letter for letter in shown if not letter.isprintable()} == {"\n"}


def test_an_error_s_text_is_plain(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hardpoint.cli._run", lambda *_: (_ for _ in ()).throw(PluginError("one\n\x1b[2Jtwo")))
    assert main(["serve"]) == 1
    assert capsys.readouterr().err == "hardpoint: PluginError: one\n [2Jtwo\n"

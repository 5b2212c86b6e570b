"""Manifests that nobody wrote in good faith: read at once, refused by name, and no command's help suffers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.config.arguments import flag_faults
from hardpoint.errors import PluginError
from hardpoint.plugins.manifest import load_manifest

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

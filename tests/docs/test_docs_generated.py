"""Generated pages say what the code says now."""

from __future__ import annotations

import pytest

from generate_docs import PAGES, configuration, plugin_kinds, stale_pages
from hardpoint.config import AppConfig, EngineConfig, ServerConfig
from hardpoint.plugins import KINDS
from workspace import ROOT, distributions


@pytest.mark.parametrize("name", PAGES)
def test_a_generated_page_is_up_to_date(name: str) -> None:
    advice = "run: python tests/support/generate_docs.py --write"
    assert (ROOT / name).read_text(encoding="utf-8") == PAGES[name](), advice
    assert name not in stale_pages()


def test_every_setting_is_listed_with_its_three_spellings() -> None:
    text = configuration()
    models = [info.annotation for info in EngineConfig.model_fields.values()] + [ServerConfig]
    for model in models:
        for field in getattr(model, "model_fields", {}):
            if field != "name":
                assert f"`{field}` | `--{field.replace('_', '-')}`" in text
                assert f"`HARDPOINT_{field.upper()}`" in text
    assert set(AppConfig.model_fields) == {
        "engines", "server", "plugins", "plugin_policy", "log_level", "log_interval_s",
    }  # fmt: skip


def test_no_type_or_default_is_left_untranslated() -> None:
    rows = [line for line in configuration().splitlines() if line.startswith("| `")]
    assert rows
    assert not [row for row in rows if "Annotated" in row or "<class" in row or "Undefined" in row]


def test_every_kind_and_every_plugin_on_disk_is_listed() -> None:
    text = plugin_kinds()
    assert all(f"| `{kind}`" in text for kind in KINDS)
    names = [name for dist in distributions() for entries in dist.entry_points.values() for name in entries]
    assert all(f"`{name}`" in text for name in names)


def test_every_kind_with_an_interface_names_its_module() -> None:
    rows = {line.split("`")[1]: line for line in plugin_kinds().splitlines() if line.startswith("| `")}
    for kind in ("platform", "hooks", "endpoint", "weight_loader", "kv_cache_spec", "hash", "attention_backend"):
        assert "`hardpoint.interfaces." in rows[kind], kind
    for kind, spec in KINDS.items():
        if spec.required:
            assert "with its first plugin" not in rows[kind], kind

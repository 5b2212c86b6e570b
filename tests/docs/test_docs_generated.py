"""Generated pages say what the code says now."""

from __future__ import annotations

import argparse

import pytest

from generate_docs import PAGES, configuration, options_models, plugin_kinds, plugin_options, stale_pages
from hardpoint.config import AppConfig, EngineConfig, ServerConfig, add_arguments, load_config
from hardpoint.plugins.kinds import KINDS
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


def test_every_option_of_every_plugin_is_listed_and_described() -> None:
    text = plugin_options()
    found = {f"{kind}.{name}": model for kind, name, model in options_models()}
    assert {"endpoint.openai", "stat_logger.prometheus", "executor.multiproc", "worker.torch", "platform.cpu"} <= set(
        found
    )
    for title, model in found.items():
        section = text.partition(f"## `{title}`\n")[2].partition("\n## ")[0]
        for field, info in model.model_fields.items():
            assert f"| `{field}` |" in section
            assert info.description, f"{title}.{field} has no description"
    assert "<class" not in text
    assert "Undefined" not in text


def test_flags_that_take_commas_are_marked() -> None:
    rows = {line.split("`")[1]: line for line in configuration().splitlines() if line.startswith("| `")}
    arguments = ["smollm2", "--endpoints", "a,b", "--allowed-hosts", "a,b", "--api-key", "secret,key"]
    parser = argparse.ArgumentParser()
    add_arguments(parser, with_server=True)
    server = load_config(parser.parse_args(arguments), {}).server
    for field in ("endpoints", "allowed_hosts", "api_key"):
        assert ("with commas" in rows[field]) == (len(getattr(server, field)) == 2)

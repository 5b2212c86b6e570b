"""Generated pages say what the code says now."""

from __future__ import annotations

import argparse

import pytest

from generate_docs import PAGES, configuration, options_models, plugin_kinds, plugin_options, stale_pages
from hardpoint.config import AppConfig, EngineConfig, ServerConfig, add_arguments, load_config
from hardpoint.plugins.kinds import KINDS
from hardpoint.testing.kits import kinds_with_kit, kit_of
from hardpoint.testing.scaffold import available_kinds
from workspace import ROOT, plugin_distributions

EXAMPLES = sorted(ROOT.glob("examples_plugins/*/pyproject.toml"))


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


def sections() -> dict[str, str]:
    """Kind to the text of its section."""
    return {part.partition("`")[0]: part for part in plugin_kinds().split("\n## `")[1:]}


def test_every_kind_and_every_plugin_on_disk_is_listed() -> None:
    text = plugin_kinds()
    assert all(f"| `{kind}`" in text or f"| [`{kind}`](#{kind})" in text for kind in KINDS)
    found = sections()
    for dist in plugin_distributions():
        for group, names in dist.entry_points.items():
            kind = group.split(".")[1]
            if kind != "conformance":
                assert all(f"`{name}` ({dist.name})" in found[kind] for name in names)


def test_every_kind_with_an_interface_names_its_module() -> None:
    rows = {line.split("`")[1]: line for line in plugin_kinds().splitlines() if line.startswith(("| `", "| [`"))}
    for kind in ("platform", "hooks", "endpoint", "weight_loader", "kv_cache_spec", "hash", "attention_backend"):
        assert "`hardpoint.interfaces." in rows[kind], kind
    for kind, spec in KINDS.items():
        if spec.required:
            assert "with its first plugin" not in rows[kind], kind


def test_the_reference_agrees_with_the_scaffold_and_the_kit() -> None:
    """Read from disk there, from installed metadata here."""
    found = sections()
    assert {kind for kind in found if f"`hardpoint plugins new {kind} NAME`" in found[kind]} == {*available_kinds()}
    for kind in kinds_with_kit():
        suite = kit_of(kind)
        assert suite is not None
        assert f".{suite.__name__}` (" in found[kind]
        assert "| context | `" in found[kind], f"{kind} has a kit, but no factory or template to tell its context"


def test_the_reference_tells_contexts_results_and_examples() -> None:
    found = sections()
    assert "`EndpointContext`, which adds `router`, `facts`" in found["endpoint"]
    assert "| the factory returns | `Scheduler` |" in found["scheduler"]
    assert "| the factory returns | `CustomOps` |" in found["custom_op"], "from the template, there is no plugin"
    assert "an object of the plugin's own class" in found["hooks"]
    assert "[Write an attention backend](../extend/write-an-attention-backend.md)" in found["attention_backend"]
    listed = " ".join(found.values())
    assert all(f"examples_plugins/{path.parent.name}/README.md" in listed for path in EXAMPLES)


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

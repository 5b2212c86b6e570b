"""The tutorials as somebody follows them, from the scaffold to a tested package; and what must come of them."""

from __future__ import annotations

import importlib
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from doc_blocks import Block, blocks_of
from doc_reader import TUTORIALS, Reader, story
from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.testing.scaffold import Blueprint, write_package
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.extension import DecoderConfig
from hardpoint_testing_torch import check_parity, make_tiny_model
from scratch_install import write_metadata
from tiny_llama import write_tiny_llama
from workspace import ROOT, read_toml

PAGES = {name: ROOT / f"docs/extend/{name}.md" for name in TUTORIALS}
COUNTS = re.compile(r"PASSED  (\d+ rules kept, \d+ optional not claimed)")
PASSED = "verdict: 1 of 1 plugins keep the rules of their kinds"


class Walk:
    """A page that was followed to its end. ``said`` pairs each step with what it printed."""

    def __init__(self, page: Path, reader: Reader) -> None:
        self.page, self.reader = page, reader
        self.said: list[tuple[Block, str]] = [(block, reader.follow(block)) for block in story(page, slow=True)]

    def after(self, command: str) -> list[str]:
        """Outputs of the steps that hold ``command``, in order."""
        return [text for block, text in self.said if command in block.text]

    def require_counts(self, said: str) -> None:
        """How many rules were kept and not claimed is what the page shows."""
        shown = COUNTS.findall(self.page.read_text(encoding="utf-8"))
        assert shown
        assert shown == COUNTS.findall(said)[: len(shown)]

    def tokens(self, name: str) -> list[int]:
        """Tokens in the file ``name``, where a step put what ``generate --json`` printed."""
        answer: dict[str, Any] = json.loads((self.reader.desk / name).read_text(encoding="utf-8"))
        ids: list[int] = answer["token_ids"]
        return ids


def tokens_of(model: Path, **settings: Any) -> list[int]:
    with LLM(str(model), dtype="float32", num_kv_blocks=64, **settings) as llm:
        (answer,) = llm.generate([Prompt(token_ids=[5, 17, 3, 42, 8])], SamplingParams(temperature=0, max_tokens=6))
    return list(answer.outputs[0].token_ids)


@pytest.mark.parametrize(
    ("kind", "name", "setting", "same"),
    [("attention_backend", "sdpa", "attention_backend", True), ("quantization", "grouped", "quantization", False)],
)
def test_the_code_of_the_page_runs_a_tiny_model(
    kind: str, name: str, setting: str, same: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same files without the time that installing takes."""
    package = write_package(Blueprint.of(kind, name), tmp_path)
    for page in PAGES.values():
        for block in blocks_of(page):
            if block.file is not None and block.file.startswith(package.name):
                (tmp_path / block.file).write_text(block.text, encoding="utf-8")
    write_metadata(read_toml(package / "pyproject.toml")["project"], package / "src")
    model = write_tiny_llama(tmp_path / "tiny")
    plain = tokens_of(model)
    monkeypatch.syspath_prepend(package / "src")
    try:
        assert (tokens_of(model, **{setting: name}) == plain) or not same
        assert package.name.replace("-", "_") in sys.modules, "another plugin computed"
    finally:
        sys.modules.pop(package.name.replace("-", "_"), None)


def test_the_model_of_the_page_computes_what_transformers_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than 120 lines, as many as it says, and every way of cutting prompts comes to the same."""
    (source,) = (block for block in blocks_of(PAGES["add-a-model"]) if (block.file or "").endswith("__init__.py"))
    count = len(source.text.splitlines())
    assert count < 120
    assert f"It takes {count} lines" in PAGES["add-a-model"].read_text(encoding="utf-8")
    (tmp_path / "page_exaone.py").write_text(source.text, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("page_exaone")
    tiny = make_tiny_model("Exaone4ForCausalLM", tmp_path / "tiny", num_hidden_layers=4, sliding_window=7, head_dim=20)
    check_parity(tiny, module.create, ReferenceBackend())


def test_the_page_on_models_tells_every_way_in_which_decoders_differ() -> None:
    """Sizes apart, which all have."""
    text = PAGES["add-a-model"].read_text(encoding="utf-8")
    untold = {one.name for one in fields(DecoderConfig) if f"`{one.name}`" not in text}
    assert untold == {
        *("hidden_size", "intermediate_size", "vocab_size", "head_size", "norm_eps"),
        *("num_layers", "num_heads", "num_kv_heads"),
    }


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    someone = Reader(tmp_path)
    yield someone
    someone.stop()


@pytest.mark.slow
@pytest.mark.timeout(900)
class TestWalks:
    def test_add_a_model(self, reader: Reader) -> None:
        """From an empty folder: pass the kit, generate from a checkpoint of the architecture."""
        walk = Walk(PAGES["add-a-model"], reader)
        assert [PASSED in verdict for verdict in walk.after("plugins test hardpoint-exaone")] == [True]
        assert len(walk.tokens("answer.json")) == 8
        assert "Exaone4ForCausalLM" in walk.after("plugins doctor model")[0]

    def test_write_an_attention_backend(self, reader: Reader) -> None:
        """Scaffold, fill in the forward, pass the kit, generate: the tokens are those of the default backend."""
        walk = Walk(PAGES["write-an-attention-backend"], reader)
        assert [PASSED in verdict for verdict in walk.after("plugins test hardpoint-sdpa")] == [True]
        walk.require_counts(walk.after("plugins test hardpoint-sdpa")[0])
        tokens = walk.tokens("sdpa.json")
        assert len(tokens) == 8
        assert tokens == walk.tokens("default.json")
        assert "active: named by the operator" in walk.after("plugins doctor")[0]

    def test_write_a_quantization_method(self, reader: Reader) -> None:
        """Scaffold, fill in, pass the kit with promises of one's own, generate."""
        walk = Walk(PAGES["write-a-quantization-method"], reader)
        kept, broken = walk.after("plugins test hardpoint-grouped")
        assert PASSED in kept
        walk.require_counts(kept)
        assert "1.062 bytes per weight, promised are 1.05" in broken
        assert len(walk.tokens("grouped.json")) == 8
        assert walk.tokens("grouped.json")[:2] == walk.tokens("default.json")[:2], "eight bits keep what is certain"

    def test_ship_an_endpoint(self, reader: Reader) -> None:
        """Scaffold, fill in, pass the kit, serve: the route answers, with and without a key."""
        walk = Walk(PAGES["ship-an-endpoint"], reader)
        verdicts = walk.after("plugins test hardpoint-summary")
        assert [PASSED in verdict for verdict in verdicts] == [True, True]
        assert "15 rules kept" in verdicts[1], "the disconnect is among what was tested"
        open_to_all, with_key = walk.after("curl -sf")
        assert '"summary"' in open_to_all
        assert '"summary"' in with_key

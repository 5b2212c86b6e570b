"""Every file of a model is a regular file of its folder and of one commit, or the model is refused (classes 9 and 11).

The same tricks are played on each file that a model may have: a rule that only guards the weights is no rule.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import HardpointError, ModelFormatError
from hardpoint_model_io.sources.hub import HubRevision, HubSource
from hardpoint_testing_torch import installed_factory, installed_loader
from tiny_llama import CONFIG, write_tiny_llama

SIDE_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
    "model.safetensors",
)
SENTENCE_FILES = ("modules.json", "1_Pooling/config.json", "sentence_bert_config.json")
MAX_SECONDS = 30
"""Far less than forever, which is how long one waits for the writer of a pipe."""


def fifo(path: Path, outside: Path) -> None:
    del outside
    os.mkfifo(path)


def link_outside(path: Path, outside: Path) -> None:
    path.symlink_to(outside)


def link_to_device(path: Path, outside: Path) -> None:
    del outside
    path.symlink_to("/dev/zero")


def folder_instead(path: Path, outside: Path) -> None:
    del outside
    path.mkdir()
    (path / "inner").write_text("x")


def loop(path: Path, outside: Path) -> None:
    del outside
    path.symlink_to(path)


def complete(folder: Path) -> None:
    """Files that a model may do without."""
    (folder / "generation_config.json").write_text("{}")
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "1_Pooling").mkdir()
    pooling = {"type": "sentence_transformers.models.Pooling", "path": "1_Pooling"}
    (folder / "modules.json").write_text(json.dumps([{"type": "Transformer", "path": ""}, pooling]))
    (folder / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    (folder / "sentence_bert_config.json").write_text(json.dumps({"max_seq_length": 64}))


def describe(folder: Path) -> Any:
    """What the launcher reads before anything starts."""
    artifact = installed_source("local").resolve(str(folder), None)
    return installed_loader("safetensors").describe(artifact)


def installed_source(name: str) -> Any:
    from hardpoint.interfaces.plugin import NoOptions, PluginContext

    return installed_factory("model_source", name)(PluginContext(name, 1, frozenset()), NoOptions())


def test_a_folder_with_all_files_is_a_model(folder: Path) -> None:
    """Otherwise the refusals below would mean nothing."""
    complete(folder)
    with LLM(str(folder), num_kv_blocks=64) as llm:
        assert llm.generate("Hello", SamplingParams(max_tokens=1))


def outcome(model: Path, **limits: Any) -> str:
    """What goes wrong with starting and using ``model``, or nothing."""
    try:
        with LLM(str(model), num_kv_blocks=64, **limits) as llm:
            llm.generate("Hello", SamplingParams(max_tokens=2, temperature=0.0))
    except HardpointError as error:
        return f"{type(error).__name__}: {error}"
    return ""


def quick_or_slow(name: str) -> Any:
    is_quick = name in ("config.json", "model.safetensors")
    return pytest.param(name, marks=() if is_quick else pytest.mark.slow)


@pytest.mark.parametrize("trick", [fifo, link_outside, link_to_device, folder_instead, loop])
@pytest.mark.parametrize("name", [quick_or_slow(name) for name in (*SIDE_FILES, *SENTENCE_FILES)])
def test_no_file_of_a_model_may_be_something_else(
    name: str, trick: Callable[[Path, Path], None], folder: Path, tmp_path: Path
) -> None:
    """Class 11: neither waits for a writer, nor reads what lies elsewhere, even where it would be sound."""
    complete(folder)
    outside = tmp_path / "outside"
    path = folder / name
    shutil.copy(path, outside)
    path.unlink()
    trick(path, outside)
    started = time.monotonic()
    found = outcome(folder)
    assert time.monotonic() - started < MAX_SECONDS
    # A folder of that name is no file at all: what a model may do without, it then has not.
    may_run = trick is folder_instead and name not in ("config.json", "model.safetensors", "tokenizer.json")
    assert (may_run and not found) or (found.startswith("ModelFormatError: ") and str(folder) in found), found


@pytest.mark.parametrize("where", ["../elsewhere", "/etc", "..", "a/../../elsewhere", "x\0y"])
def test_the_pooling_module_cannot_lead_elsewhere(where: str, folder: Path, tmp_path: Path) -> None:
    """Class 11: the one path that a side file names."""
    complete(folder)
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere/config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    (tmp_path / "config.json").write_text(json.dumps({"pooling_mode_cls_token": True}))
    modules = [{"type": "Pooling", "path": where}]
    (folder / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ModelFormatError, match=str(folder)):
        describe(folder)


@dataclass(slots=True)
class MovingHub:
    """A hub whose branch moves with every answer; a commit has a folder of its own."""

    root: Path
    commits: list[str]
    asked: list[tuple[str, str]] = field(default_factory=list)
    lookups: int = 0

    def is_offline(self) -> bool:
        return False

    def lookup(self, repo_id: str, revision: str) -> HubRevision:
        del repo_id, revision
        commit = self.commits[min(self.lookups, len(self.commits) - 1)]
        self.lookups += 1
        folder = self.root / "snapshots" / commit
        return HubRevision(commit, tuple(sorted(path.name for path in folder.iterdir())))

    def fetch(self, repo_id: str, file: str, commit: str) -> str:
        del repo_id
        self.asked.append((file, commit))
        return str(self.root / "snapshots" / commit / file)

    def cached_snapshot(self, repo_id: str, revision: str) -> str | None:
        del repo_id, revision
        return None


def test_all_files_come_from_the_commit_that_was_looked_up(tmp_path: Path) -> None:
    """Class 9: weights, configuration, tokenizer and template, while the branch moves on to other ones."""
    old, new = "a" * 40, "b" * 40
    write_tiny_llama(tmp_path / "snapshots" / old)
    write_tiny_llama(tmp_path / "snapshots" / new, seed=9, max_position_embeddings=64)
    hub = MovingHub(tmp_path, [old, new])
    artifact = HubSource(lambda: hub).resolve("org/name", "main")
    assert artifact is not None
    assert hub.lookups == 1
    assert {commit for _, commit in hub.asked} == {old}
    assert {file for file, _ in hub.asked} == set(artifact.files)
    assert {"config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"} <= set(artifact.files)
    assert (artifact.revision, artifact.root) == (old, str(tmp_path / "snapshots" / old))
    info = installed_loader("safetensors").describe(artifact)
    assert info.max_position == CONFIG["max_position_embeddings"]


def mutated(data: bytes, source: random.Random, reach: int) -> bytes:
    """A few bytes changed among the first ``reach``; now and then cut, spliced or with an extreme number."""
    found = bytearray(data)
    for _ in range(source.randint(1, 4)):
        place = source.randrange(min(len(found), reach))
        match source.randrange(4):
            case 0:
                found[place] = source.randrange(256)
            case 1:
                found[place] ^= 1 << source.randrange(8)
            case 2:
                found[place : place + 8] = source.choice((2**64 - 1, 2**63, 2**31, 0)).to_bytes(8, "little")
            case _:
                found[place : place + 12] = data[(other := source.randrange(min(len(data), reach))) : other + 12]
    return bytes(found[: source.randrange(len(found))]) if source.random() < 0.1 else bytes(found)


FIRST_BYTES = {
    "config.json": 4_000,
    "model.safetensors": 3_000,
    "tokenizer.json": 20_000,
    "tokenizer_config.json": 2_000,
}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*FIRST_BYTES, "tiny.gguf"])
def test_a_mutated_model_runs_or_is_refused(name: str, folder: Path, sound_gguf: Path, tmp_path: Path) -> None:
    """Class 11: whatever a file says, it is a model or one error, through the whole engine."""
    source = random.Random(name)
    sound = sound_gguf.read_bytes() if name.endswith(".gguf") else (folder / name).read_bytes()
    path = tmp_path / name if name.endswith(".gguf") else folder / name
    model = path if name.endswith(".gguf") else folder
    limits = {"block_size": 16, "max_model_len": 64, "max_num_seqs": 2}
    outcomes = []
    for _ in range(40):
        path.write_bytes(mutated(sound, source, FIRST_BYTES.get(name, 20_000)))
        outcomes.append(outcome(model, **limits))
    assert sum(map(bool, outcomes)) > 5

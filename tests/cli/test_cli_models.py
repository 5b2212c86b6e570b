"""``hardpoint models``: every installed architecture is listed and described, and nothing is imported for it."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from cli_support import CommandLine
from hardpoint.testing.model_facts import ModelFacts, installed_models
from hardpoint_terminal.models import as_json
from hardpoint_testing_torch import MODES
from models_page import OWN_ORACLES, Rows, read_page
from scratch_install import write_metadata
from workspace import plugin_distributions

NAMES = sorted(point.name for point in entry_points(group="hardpoint.model.v1"))
MAX_SECONDS, MAX_RATIO = 0.3, 2.0
WITHOUT_FRAMEWORKS = """
import json, sys
for name in ("torch", "transformers", "numpy"):
    sys.modules[name] = None  # an import of it fails
from hardpoint.cli import main
status = main({arguments!r})
print("\\n" + json.dumps([status, sorted({{name.partition(".")[0] for name, one in sys.modules.items() if one}})]))
"""
PLUGIN_PACKAGES = {distribution.package for distribution in plugin_distributions()} - {"hardpoint_terminal"}


@pytest.fixture(scope="module")
def rows() -> Rows:
    return read_page()


def test_every_architecture_is_listed(hardpoint: CommandLine, rows: Rows) -> None:
    lines = hardpoint("models", "list").out.splitlines()
    assert lines[0].split()[:2] == ["ARCHITECTURE", "TASKS"]
    assert [line.split()[0] for line in lines[1:]] == NAMES
    listed = json.loads(hardpoint("models", "list", "--json").out)
    assert [row["architecture"] for row in listed] == NAMES
    ours = [row for row in listed if row["distribution"] == "hardpoint-models"]
    assert all("safetensors" in row["formats"] and row["tasks"] for row in ours)
    compared = {architecture for architecture, _ in rows}
    assert {row["architecture"] for row in ours if row["verified"]} == compared


@pytest.mark.slow
def test_every_architecture_of_ours_has_a_record(rows: Rows) -> None:
    """In the slow tier, since one may land a commit before its rows."""
    ours = {model.architecture for model in installed_models().models if model.distribution == "hardpoint-models"}
    assert ours - {architecture for architecture, _ in rows} <= set(OWN_ORACLES)


@pytest.fixture(scope="module")
def told() -> dict[str, dict[str, Any]]:
    """By architecture, what ``show --json`` prints."""
    return {model.architecture: as_json(model) for model in installed_models().models}


@pytest.mark.parametrize("name", NAMES)
def test_each_architecture_is_described(
    hardpoint: CommandLine, name: str, told: dict[str, dict[str, Any]], rows: Rows
) -> None:
    """What the page says of it is what is shown, cell by cell."""
    text = hardpoint("models", "show", name).out
    assert text.startswith(f"{name}\n  plugin ")
    known = told[name]
    assert known["factory"] in text
    mine = {configuration: cells for (one, configuration), cells in rows.items() if one == name}
    assert {one["configuration"]: one["modes"] for one in known["comparisons"]} == {
        configuration: {mode: str(cell) for mode, cell in cells.items()} for configuration, cells in mine.items()
    }
    left_out = {mode for cells in mine.values() for mode, cell in cells.items() if str(cell) == "not run"}
    assert {mode for modes in known["not_run"].values() for mode in modes} == left_out
    assert [reason for reason in known["not_run"] if reason not in text] == []
    assert set(known["shown"]) == (set(MODES) - left_out if mine else set())


def test_json_of_one_is_what_list_says_and_more(hardpoint: CommandLine, told: dict[str, dict[str, Any]]) -> None:
    assert json.loads(hardpoint("models", "show", "BertModel", "--json").out) == [told["BertModel"]]
    (row,) = [
        one for one in json.loads(hardpoint("models", "list", "--json").out) if one["architecture"] == "BertModel"
    ]
    assert row.items() <= told["BertModel"].items()


@pytest.mark.parametrize("task", ["generate", "classify"])
def test_a_task_can_be_asked_for(hardpoint: CommandLine, task: str) -> None:
    rows = json.loads(hardpoint("models", "list", "--task", task, "--json").out)
    assert 0 < len(rows) < len(NAMES)
    assert all(task in row["tasks"] for row in rows)


def test_a_task_that_nothing_serves_is_refused_with_those_there_are(hardpoint: CommandLine) -> None:
    done = hardpoint("models", "list", "--task", "foo")
    assert (done.status, done.out) == (1, "")
    assert "serves the task 'foo'; give --task one of classify, embed, generate" in done.complaint()


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("LlavaForConditionalGeneration", "image: pixel_values float32 [channels, side, side]"),
        ("WhisperForConditionalGeneration", "audio: input_features float32 [mel bins, frames]"),
        ("Qwen2VLForConditionalGeneration", "video: pixel_values_videos float32 [patches, values]; video_grid_thw"),
    ],
)
def test_what_a_model_takes_beside_tokens_is_told(
    hardpoint: CommandLine, name: str, line: str, told: dict[str, dict[str, Any]]
) -> None:
    assert f"  takes       {line}" in hardpoint("models", "show", name).out
    assert line.partition(": ")[0] in told[name]["inputs"]
    assert told["LlamaForCausalLM"]["inputs"] == {}


@pytest.mark.parametrize(
    ("asked", "near"),
    [
        ("LamaForCausalLM", "LlamaForCausalLM"),
        ("llamaforcausallm", "LlamaForCausalLM"),
        ("whisper", "WhisperForConditionalGeneration"),
        ("Qwen3ForCausalLN", "Qwen3ForCausalLM"),
    ],
)
def test_an_unknown_architecture_names_the_nearest(hardpoint: CommandLine, asked: str, near: str) -> None:
    done = hardpoint("models", "show", asked)
    assert done.status == 1
    line = done.complaint()
    assert f"UnsupportedModelError: no installed plugin has the architecture '{asked}'" in line
    assert near in line.partition("the nearest are ")[2].partition(";")[0]


@pytest.mark.parametrize("asked", ["", "Ghost" * 100, "\x1b[31m"])
def test_what_is_like_no_architecture_is_one_line_too(hardpoint: CommandLine, asked: str) -> None:
    line = hardpoint("models", "show", asked).complaint()
    assert "`hardpoint models list` shows all" in line
    assert "\x1b" not in line
    assert len(line) < 600


@pytest.mark.parametrize("arguments", [("models",), ("models", "shw"), ("models", "show"), ("models", "list", "--jsn")])
def test_misuse_ends_with_status_two(hardpoint: CommandLine, arguments: tuple[str, ...]) -> None:
    assert hardpoint(*arguments).status == 2


@pytest.mark.parametrize("arguments", [["list"], ["show", "LlamaForCausalLM"], ["show", "BertModel", "--json"]])
def test_no_framework_and_no_plugin_is_needed(arguments: list[str]) -> None:
    source = WITHOUT_FRAMEWORKS.format(arguments=["models", *arguments])
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    status, names = json.loads(done.stdout.splitlines()[-1])
    assert status == 0
    assert PLUGIN_PACKAGES.intersection(names) == set()


def test_it_is_about_as_quick_as_the_list_of_plugins() -> None:
    """On a machine that is busy with other things, what is quick elsewhere takes longer too."""

    def seconds(command: str) -> float:
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "hardpoint.cli", command, "list"], capture_output=True, check=True)
        return time.perf_counter() - start

    pairs = ((seconds("models"), seconds("plugins")) for _ in range(5))
    assert any(mine < max(MAX_SECONDS, MAX_RATIO * theirs) for mine, theirs in pairs)


RECORD = {
    "facts_version": 1,
    "architectures": {
        "GhostForCausalLM": {
            "comparisons": [{"configuration": "plain", "modes": {"prefill": "ok 1e-6", "tp2": "not run"}}],
            "not_run": {"its heads cannot be divided": ["tp2"]},
            "claims": [{"claim": "haunts", "test": "tests/ghost.py::test_haunts"}],
        },
        "OddForCausalLM": {"comparisons": [{"configuration": "plain", "modes": {"prefill": "over limit 1e0"}}]},
    },
}
PROJECT = {
    "name": "ghost-models",
    "version": "3.1",
    "entry-points": {
        "hardpoint.model.v1": dict.fromkeys(("GhostForCausalLM", "OddForCausalLM", "New"), "ghost_models:create")
    },
}


@pytest.fixture
def ghost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stranger's package, which would fail if it were imported."""
    package = tmp_path / "ghost_models"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('imported')\n", encoding="utf-8")
    write_metadata(PROJECT, tmp_path)
    (package / "models.json").write_text(json.dumps(RECORD), encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    return package


def test_architectures_of_strangers_are_listed(hardpoint: CommandLine, ghost: Path) -> None:
    lines = {line.split()[0]: line for line in hardpoint("models", "list").out.splitlines()}
    assert lines.keys() >= {*NAMES, "GhostForCausalLM", "OddForCausalLM", "New"}
    assert "below 1e-6 in 1 configuration" in lines["GhostForCausalLM"]
    assert "over the limit" in lines["OddForCausalLM"]
    assert "no record" in lines["New"]
    assert all("not told" in lines[name] and "ghost-models 3.1" in lines[name] for name in ("New", "GhostForCausalLM"))
    text = hardpoint("models", "show", "GhostForCausalLM").out
    assert "tp2: its heads cannot be divided" in text
    assert "haunts (tests/ghost.py::test_haunts)" in text
    rows = json.loads(hardpoint("models", "list", "--json").out)
    verified = {row["architecture"]: row["verified"] for row in rows}
    assert [verified[name] for name in ("GhostForCausalLM", "OddForCausalLM", "New")] == [True, False, False]


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"architectures": {"New": {"comparisons": [{"configuration": "x", "modes": {"prefill": "fine"}}]}}}',
     '{"architectures": {}, "facts_version": 2}', '{"architectures": {}, "more": 1}', "\x00"],
)  # fmt: skip
def test_a_record_that_cannot_be_read_is_named_and_hides_nothing(
    hardpoint: CommandLine, ghost: Path, text: str
) -> None:
    (ghost / "models.json").write_text(text, encoding="utf-8")
    done = hardpoint("models", "list")
    assert done.status == 0
    assert str(ghost / "models.json") in done.err
    assert done.err.count("\n") == 1
    assert "GhostForCausalLM" in done.out


def test_plugins_that_this_core_refuses_are_told(
    hardpoint: CommandLine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry = {"hardpoint.model.v9": {"LaterForCausalLM": "later:create"}}
    write_metadata({"name": "later", "version": "1", "entry-points": entry}, tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    done = hardpoint("models", "list")
    assert "LaterForCausalLM (later) is not usable: written for API version 9" in done.err
    assert "LaterForCausalLM" not in done.out


def test_the_worst_error_of_each_precision_is_told_apart() -> None:
    (llama,) = [one for one in installed_models().models if one.architecture == "LlamaForCausalLM"]
    assert llama.facts is not None
    single, low = llama.facts.worst(), llama.facts.worst(low_precision=True)
    assert single is not None
    assert low is not None
    assert single < -4 < low
    assert ModelFacts().worst() is None
    assert not ModelFacts().is_verified

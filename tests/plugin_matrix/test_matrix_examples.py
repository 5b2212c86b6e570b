"""The examples as users get them: built as wheels, installed into scratch environments, alone and all together."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cli_support import Finished, run_process
from partial_environment import make_environment
from tiny_llama import write_tiny_llama
from workspace import ROOT, read_toml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

EXAMPLES = sorted(path.parent for path in ROOT.glob("examples_plugins/*/pyproject.toml"))
EACH = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
MODEL = "MODEL"
GENERATE = ("generate", MODEL, "--prompt", "Hello", "--max-tokens", "6", "--temperature", "0", "--json")
SMALL = ("--num-kv-blocks", "64", "--dtype", "float32")


@dataclass(frozen=True, slots=True)
class Use:
    """How an example is selected for a generation. ``same``: must the tokens be those without it? None: they may be."""

    flags: tuple[str, ...] = ()
    environ: Mapping[str, str] = field(default_factory=dict)
    same: bool | None = True


USES: Mapping[str, Use] = {
    "audit_hooks": Use(("--audit-file", "FOLDER/audit.jsonl")),
    "background_platform": Use(environ={"BACKGROUND_CORES": "1"}),
    "hello_endpoint": Use(),
    "json_lines_stats": Use(),
    "multiple_choice": Use(("--io-processor", "multiple_choice")),
    "no_repeat_ngrams": Use(
        (
            *("--plugin", "worker.torch.logits_processors=[no_repeat_ngrams]"),
            *("--plugin", "logits_processor.no_repeat_ngrams.size=1"),
        ),
        same=None,  # a few tokens need not repeat
    ),
    "numpy_attention": Use(("--attention-backend", "numpy")),
    "recent_tokens": Use(),
    "rtn_int8": Use(("--quantization", "rtn_int8"), same=False),
    "shortest_job_first": Use(("--scheduler", "shortest_job_first")),
}


def name_of(example: Path) -> str:
    name: str = read_toml(example / "pyproject.toml")["project"]["name"]
    return name


def pip(python: Path, *arguments: object) -> None:
    command = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """One wheel per example, by the example's folder name."""
    folder = tmp_path_factory.mktemp("wheels")
    sources = []
    for example in EXAMPLES:
        # A build writes into its source folder, which is not ours to change.
        sources.append(shutil.copytree(example, tmp_path_factory.mktemp("sources") / example.name))
    pip(Path(sys.executable), "wheel", "--no-deps", "--no-index", "--no-build-isolation", "-w", folder, *sources)
    return {example.name: next(folder.glob(f"{name_of(example).replace('-', '_')}-*.whl")) for example in EXAMPLES}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def plain(model: Path) -> list[int]:
    """What the model says without any example."""
    return tokens_of(hardpoint(Path(sys.executable), *GENERATE, *SMALL, model=model))


@pytest.fixture(scope="module")
def crowded(wheels: Mapping[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment in which every example is installed."""
    python = make_environment(tmp_path_factory.mktemp("crowded") / "all", [])
    pip(python, "install", "--no-deps", "--no-index", *wheels.values())
    return python


def hardpoint(python: Path, *arguments: str, model: Path, environ: Mapping[str, str] | None = None) -> Finished:
    words = [str(model) if word == MODEL else word for word in arguments]
    return run_process(*words, command=[str(python), "-m", "hardpoint.cli"], environ=environ, timeout=300)


def tokens_of(done: Finished) -> list[int]:
    (answer,) = done.json_lines()
    ids: list[int] = answer["token_ids"]
    return ids


def flags_of(use: Use, folder: Path) -> list[str]:
    return [flag.replace("FOLDER", str(folder)) for flag in use.flags]


def test_every_example_has_a_row() -> None:
    assert {example.name for example in EXAMPLES} == {*USES}
    assert len(EXAMPLES) >= 10


@EACH
def test_alone_it_installs_keeps_its_rules_and_works(
    example: Path, wheels: Mapping[str, Path], model: Path, plain: list[int], tmp_path: Path
) -> None:
    """R12.1."""
    python = make_environment(tmp_path / "environment", [])
    pip(python, "install", "--no-deps", "--no-index", wheels[example.name])
    judged = hardpoint(python, "plugins", "test", name_of(example), "--json", model=model)
    report = json.loads(judged.out)
    assert judged.status == 0, judged.out
    assert all(verdict["note"] == "" for verdict in report["verdicts"]), "the kit was not run as a whole"
    use = USES[example.name]
    done = hardpoint(python, *GENERATE, *SMALL, *flags_of(use, tmp_path), model=model, environ=use.environ)
    assert use.same is None or (tokens_of(done) == plain) is use.same
    assert tokens_of(done)


def test_all_together_the_doctor_is_content(crowded: Path, model: Path) -> None:
    """P12.12: more extension points, more interactions. The background platform is absent without its variable."""
    done = hardpoint(crowded, "plugins", "doctor", "--json", "--endpoints", "openai,ops,hello", model=model)
    report: dict[str, Any] = json.loads(done.out)
    assert done.status == 0, report["problems"]
    installed = {
        row["plugin"]["distribution"]
        for kind in report["kinds"]
        for row in kind["plugins"]
        if row["state"] != "refused"
    }
    assert {name_of(example) for example in EXAMPLES} <= installed


def test_all_together_the_tokens_are_the_same(crowded: Path, model: Path, plain: list[int], tmp_path: Path) -> None:
    """R12.5, P12.12: platform, scheduler, attention, hooks and IO processor of examples in one engine."""
    calm = [use for use in USES.values() if use.same]
    flags = [flag for use in calm for flag in flags_of(use, tmp_path)]
    environ = {name: value for use in calm for name, value in use.environ.items()}
    done = hardpoint(crowded, *GENERATE, *SMALL, *flags, model=model, environ=environ)
    assert tokens_of(done) == plain
    events = [json.loads(line)["event"] for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert events == ["process_started", "request_added", "request_finished", "process_stopping"]


def test_all_together_the_end_to_end_tests_pass(crowded: Path, tmp_path: Path) -> None:
    """P12.12: the project's own end-to-end tests, run in the environment that holds every example."""
    command = [str(crowded), "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [f"--basetemp={tmp_path / 'files'}", str(ROOT / "tests/end_to_end")]
    # Not a part of this run, whose workers some plugins of pytest take it for.
    environ = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(command, cwd=ROOT, env=environ, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stdout[-6_000:] + done.stderr[-2_000:]

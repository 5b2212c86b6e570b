"""Each plugin distribution taken away in turn: the core starts, and what needs the missing part says what to install.

ARCHITECTURE, first paragraph: first-party plugins have no privileges, so any of them may be absent.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from cli_support import Finished, run_process
from hardpoint.plugins.kinds import KINDS
from partial_environment import make_environment, site_packages
from tiny_llama import write_tiny_llama
from workspace import ROOT, Distribution, plugin_distributions

MAX_SECONDS = 10
MODEL = "MODEL"
GENERATE = ("generate", MODEL, "--prompt", "Hello", "--max-tokens", "2", "--json", "--num-kv-blocks", "64")
SERVE = ("serve", MODEL, "--port", "0")
EACH = pytest.mark.parametrize("distribution", plugin_distributions(), ids=lambda dist: dist.name)


@dataclass(frozen=True, slots=True)
class Need:
    """A command that cannot work without the distribution, and what its message must name, within ``max_seconds``."""

    command: tuple[str, ...]
    named: tuple[str, ...]
    status: int = 1
    max_seconds: float = MAX_SECONDS


NEEDS: Mapping[str, Need] = {
    "hardpoint-attention": Need(
        (*GENERATE, "--attention-backend", "torch_reference"), ("hardpoint.attention_backend.v1:torch_reference",)
    ),
    "hardpoint-bench": Need(("bench", MODEL), ("'bench'", "hardpoint.cli_command.v1:bench"), 2),
    "hardpoint-cpu": Need((*GENERATE, "--platform", "cpu"), ("hardpoint.platform.v1:cpu",)),
    "hardpoint-cuda": Need((*GENERATE, "--platform", "cuda"), ("hardpoint.platform.v1:cuda",)),
    "hardpoint-executors": Need(GENERATE, ("executor plugin 'uniproc'", "hardpoint.executor.v1:uniproc")),
    "hardpoint-model-io": Need(GENERATE, ("chat_renderer plugin 'jinja'", "hardpoint.chat_renderer.v1:jinja")),
    "hardpoint-gpu": Need(
        (*GENERATE, "--platform", "cpu", "--plugin", "worker.torch.graph_backend=cuda_graphs"),
        ("hardpoint.graph_backend.v1:cuda_graphs",),
        max_seconds=6 * MAX_SECONDS,  # said by the worker, which loads the model first
    ),
    "hardpoint-models": Need(
        (*GENERATE, "--plugin", "worker.torch.fallback_model=null"), ("hardpoint.model.v1:LlamaForCausalLM",)
    ),
    "hardpoint-observability": Need((*SERVE, "--plugins", "log"), ("'log'", "install its distribution")),
    "hardpoint-parallel": Need(
        (*GENERATE, "--tensor-parallel-size", "2"),
        ("tensor_parallel_size is 2", "hardpoint.communicator.v1:gloo"),
        max_seconds=6 * MAX_SECONDS,  # said by ranks, which are processes that import the framework
    ),
    "hardpoint-quantization": Need((*GENERATE, "--quantization", "int8"), ("hardpoint.quantization.v1:int8",)),
    "hardpoint-rocm": Need((*GENERATE, "--platform", "rocm"), ("hardpoint.platform.v1:rocm",)),
    "hardpoint-scheduling": Need(
        GENERATE, ("hardpoint.scheduler.v1:fcfs", "hardpoint.hash.v1:sha256", "hardpoint.kv_layout.v1:layer_outermost")
    ),
    "hardpoint-serving": Need(SERVE, ("hardpoint.endpoint.v1:openai", "hardpoint.endpoint.v1:ops")),
    "hardpoint-terminal": Need(GENERATE, ("'generate'", "hardpoint.cli_command.v1:generate"), 2),
    "hardpoint-torch-runtime": Need(GENERATE, ("worker plugin 'torch'", "hardpoint.worker.v1:torch")),
    "hardpoint-transformers-models": Need(
        (*GENERATE, "--plugin", "worker.torch.model=transformers"), ("hardpoint.model.v1:transformers",)
    ),
    "hardpoint-triton-kernels": Need(
        (*GENERATE, "--plugin", 'worker.torch.kernel_overrides={"rms_norm":"triton_rms_norm"}'),
        ("hardpoint.kernel_override.v1:triton_rms_norm",),
        max_seconds=6 * MAX_SECONDS,
    ),
}
NEEDED_BY_NO_COMMAND = {"hardpoint-testing-torch"}
START_UP = """
import contextlib, importlib.util, io, json, sys
from hardpoint.cli import main

def run(*arguments):
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        status = main(arguments)
    return status, out.getvalue(), err.getvalue()

commands = (["--version"], ["--help"], ["plugins", "list", "--json"], ["plugins", "doctor", "--json"])
print(json.dumps([importlib.util.find_spec(sys.argv[1]) is None, *(run(*command) for command in commands)]))
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="module")
def pythons(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """For each distribution the Python of an environment without it."""
    folder = tmp_path_factory.mktemp("without")
    names = [distribution.name for distribution in plugin_distributions()]
    return {name: make_environment(folder / name, [name]) for name in names}


def hardpoint(python: Path, command: tuple[str, ...], model: Path) -> Finished:
    arguments = [str(model) if part == MODEL else part for part in command]
    return run_process(*arguments, command=[str(python), "-m", "hardpoint.cli"])


def require_named(done: Finished, need: Need) -> None:
    assert done.status == need.status, done.err
    assert "Traceback" not in done.err
    assert [text for text in need.named if text not in done.err] == [], done.err
    assert "install a distribution that provides the entry point" in done.err or "install its" in done.err
    assert done.out == ""
    assert done.seconds < need.max_seconds


def test_every_distribution_has_a_row() -> None:
    assert {distribution.name for distribution in plugin_distributions()} == {*NEEDS, *NEEDED_BY_NO_COMMAND}


@EACH
def test_without_it_the_core_starts_and_tells(distribution: Distribution, pythons: Mapping[str, Path]) -> None:
    """I12.6."""
    done = run_process(distribution.package, command=[str(pythons[distribution.name]), "-c", START_UP])
    assert done.status == 0, done.err
    is_gone, told_version, told_help, told_list, told_doctor = json.loads(done.out)
    assert is_gone
    assert told_version[0] == told_help[0] == told_list[0] == 0
    shown = {
        plugin["plugin"]["distribution"] for kind in json.loads(told_list[1])["kinds"] for plugin in kind["plugins"]
    }
    expected = {other.name for other in plugin_distributions() if other.entry_points} - {distribution.name}
    assert expected <= shown
    assert distribution.name not in shown
    problems = " ".join(json.loads(told_doctor[1])["problems"])
    missing = required_kinds(distribution)
    assert [kind for kind in missing if f"no {kind} plugin" not in problems] == []
    assert told_doctor[0] == (1 if problems else 0)
    assert told_list[2] == told_doctor[2] == ""


def required_kinds(distribution: Distribution) -> list[str]:
    """Kinds that nothing works without and that only this distribution of the workspace provides."""
    others = {group for other in plugin_distributions() if other is not distribution for group in other.entry_points}
    return [
        spec.name for spec in KINDS.values() if spec.required and spec.group in {*distribution.entry_points} - others
    ]


RATED = [
    pytest.param(name, marks=pytest.mark.slow if need.max_seconds > MAX_SECONDS else ()) for name, need in NEEDS.items()
]


@pytest.mark.parametrize("name", RATED)
def test_what_needs_it_names_what_to_install(name: str, pythons: Mapping[str, Path], model: Path) -> None:
    """I12.6."""
    require_named(hardpoint(pythons[name], NEEDS[name].command, model), NEEDS[name])


def test_what_does_not_need_them_works_without_several(tmp_path: Path, model: Path) -> None:
    absent = ["hardpoint-bench", "hardpoint-observability", "hardpoint-serving", "hardpoint-testing-torch"]
    done = hardpoint(make_environment(tmp_path / "few", absent), GENERATE, model)
    (answer,) = done.json_lines()
    assert len(answer["token_ids"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_real_uninstalls_end_in_the_same_messages(tmp_path: Path, model: Path) -> None:
    """Wheels of the whole workspace, really installed; then two of them really uninstalled, one after the other."""
    names = [distribution.name for distribution in plugin_distributions()]
    python = make_environment(tmp_path / "real", ["hardpoint", "hardpoint-core", *names])
    wheels = tmp_path / "wheels"
    folders = [ROOT / "core", *(distribution.folder for distribution in plugin_distributions())]
    options = ["--no-deps", "--no-index", "--no-build-isolation", "-w", wheels]
    pip(Path(sys.executable), "wheel", *options, *folders)
    pip(python, "install", "--no-deps", "--no-index", *sorted(wheels.iterdir()))
    assert (site_packages(tmp_path / "real") / "hardpoint/py.typed").is_file()
    assert hardpoint(python, GENERATE, model).json_lines()
    for name in ("hardpoint-scheduling", "hardpoint-terminal"):
        pip(python, "uninstall", "-y", name)
        assert run_process("--version", command=[str(python), "-m", "hardpoint.cli"]).status == 0
        require_named(hardpoint(python, NEEDS[name].command, model), NEEDS[name])


def pip(python: Path, *arguments: object) -> None:
    command = [str(python), "-m", "pip", "-q", "--disable-pip-version-check", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr

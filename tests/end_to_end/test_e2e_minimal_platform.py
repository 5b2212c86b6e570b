"""R12.27: what a platform from outside the tree must say of itself, and no more, is enough to run a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_support import Finished, run_process
from scratch_install import write_metadata
from tiny_llama import write_tiny_llama

pytestmark = pytest.mark.timeout(300)

SOURCE = """
from hardpoint.interfaces import DeviceDescription, Platform, ProbeResult, ProbeStatus, ThreadPlan, plugin

class Least(Platform):
    name = "least"

    def describe(self, device):
        return DeviceDescription(device_type=self.device_type, name="least", memory_bytes=1 << 28)

    def check_and_update(self, settings):
        settings.worker = "torch"
        settings.executor = settings.executor or "uniproc"
        settings.dtype = settings.dtype or "float32"
        settings.kv_cache_bytes = settings.kv_cache_bytes or 1 << 24

    def thread_plan(self, world_size, environment):
        return ThreadPlan(compute_threads=1)

    def attention_candidates(self):
        return ("torch_reference",)

    def memory_budget(self, device):
        return 1 << 28

    def memory_used(self, device):
        return 0

    def init_worker(self, device, threads):
        import torch
        return torch.device(self.device_type)

@plugin("platform", probe=lambda: ProbeResult(ProbeStatus.AVAILABLE, "always"))
def create(ctx, options):
    return Least()
"""
METHODS = (
    "describe", "check_and_update", "thread_plan", "attention_candidates", "memory_budget", "memory_used",
    "init_worker",
)  # fmt: skip


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("least") / "tiny")


def command(model: Path) -> tuple[object, ...]:
    words = ("--prompt", "ab ba", "--max-tokens", "6", "--temperature", "0", "--json", "--dtype", "float32")
    return ("generate", model, *words)


def generate(folder: Path, model: Path, source: str, *flags: str) -> Finished:
    (folder / "least_platform.py").write_text(source)
    points = {"hardpoint.platform.v1": {"least": "least_platform:create"}}
    write_metadata({"name": "least-platform", "version": "1.0", "entry-points": points}, folder)
    return run_process(*command(model), *flags, environ={"PYTHONPATH": str(folder)}, timeout=200)


@pytest.mark.parametrize("executor", ["uniproc", "multiproc"])
def test_it_runs_a_model_without_being_named(tmp_path: Path, model: Path, executor: str) -> None:
    """R12.27, R12.30: kind and device type have defaults; each process creates it and the tokens are the CPU's."""
    done = generate(tmp_path, model, SOURCE, "--executor", executor)
    assert done.status == 0, done.err
    by_cpu = run_process(*command(model), timeout=200)
    assert done.json_lines()[0]["token_ids"] == by_cpu.json_lines()[0]["token_ids"]


@pytest.mark.parametrize("method", METHODS)
def test_less_than_that_is_refused_by_name(tmp_path: Path, model: Path, method: str) -> None:
    """R12.27: a platform that leaves one out stops the start, which names the platform and what it lacks."""
    said = generate(tmp_path, model, SOURCE.replace(f"def {method}(", f"def other_{method}(")).complaint()
    assert "platform:least (least-platform 1.0)" in said
    assert method in said


def test_without_a_worker_it_is_refused(tmp_path: Path, model: Path) -> None:
    """R12.28, P12.10: as the operator sees it."""
    said = generate(tmp_path, model, SOURCE.replace('settings.worker = "torch"', "pass")).complaint()
    assert "platform 'least' set no worker" in said

"""A distribution with an operator and a kernel override, as an installer would leave it: selected, used, refused."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint.errors import ConfigError, PluginConflictError, PluginNotFoundError
from hardpoint.launch import launch_config
from hardpoint.roles import ProcessRole
from scratch_install import write_metadata
from tiny_llama import write_tiny_llama

PROMPTS = ["abababab", "The wing", "0123456789 " * 12]
NUM_TOKENS = 12

SOURCE = '''
"""An operator, and an override of ``silu_and_mul`` that calls it."""

import torch

from hardpoint.interfaces import CustomOperator, CustomOps, KernelOverride, WorkerContext, plugin
from hardpoint_torch_runtime.ops import load_custom_ops

import os

calls = []


def gated(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate) * up


def fake_gated(gate_up):
    return gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)


def samples(device):
    return [(torch.randn(rows, 16, device=device),) for rows in (1, 5)]


@plugin("custom_op")
def create_ops(ctx, options):
    return CustomOps((CustomOperator("gated", {"cpu": gated}, fake_gated, samples),), namespace=NAMESPACE)


@plugin("kernel_override")
def create_override(ctx: WorkerContext, options):
    operator = load_custom_ops(ctx.plugins, "PREFIX_ops", config=ctx.config, device=ctx.device)["gated"]

    def silu_and_mul(gate_up):
        calls.append(tuple(gate_up.shape))
        if os.environ.get("ACME_LOG"):
            with open(os.environ["ACME_LOG"], "a") as log:
                log.write(f"{os.getpid()}\\n")
        return operator(gate_up)

    return KernelOverride("silu_and_mul", silu_and_mul, frozenset({"cpu"}), frozenset({"float32"}))
'''


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("kernels") / "tiny")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """Installs a distribution into a folder of its own and gives its module, once something has imported it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    modules: list[str] = []

    def install(distribution: str, prefix: str, namespace: str | None = None) -> Callable[[], Any]:
        package = distribution.replace("-", "_")
        source = SOURCE.replace("PREFIX", prefix).replace("NAMESPACE", repr(namespace))
        (tmp_path / f"{package}.py").write_text(source, encoding="utf-8")
        points = {
            "hardpoint.custom_op.v1": {f"{prefix}_ops": f"{package}:create_ops"},
            "hardpoint.kernel_override.v1": {f"{prefix}_gate": f"{package}:create_override"},
        }
        write_metadata(
            {"name": distribution, "version": "1.0", "dependencies": ["hardpoint-core"], "entry-points": points},
            tmp_path,
        )
        modules.append(package)
        return lambda: sys.modules[package]

    yield install
    for name in modules:
        sys.modules.pop(name, None)


def config(model: Path, dtype: str = "float32", executor: str = "uniproc", **worker: Any) -> AppConfig:
    engine = EngineConfig.sections(str(model), dtype=dtype, num_kv_blocks=64, max_model_len=256, executor=executor)
    return AppConfig.model_validate({"engines": {"tiny": engine}, "plugins": {"worker": {"torch": worker}}})


def greedy(settings: AppConfig) -> list[tuple[int, ...]]:
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    with LLM.from_config(settings) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def test_a_named_override_is_used_and_computes_the_same_tokens(
    model: Path, site: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    """R10.56 through the whole engine; the table of kernels says what was chosen."""
    module = site("acme-gates", "acme")
    plain = greedy(config(model))
    assert "acme_gates" not in sys.modules, "installed is not selected"
    with caplog.at_level(logging.INFO, "hardpoint"):
        assert greedy(config(model, kernel_overrides={"silu_and_mul": "acme_gate"})) == plain
    calls = module().calls
    assert {shape[-1] for shape in calls} == {128}, "gate and up of the tiny model's feed-forward"
    assert len(calls) >= 2 * NUM_TOKENS, "two layers in every step"
    assert torch.ops.acme_gates.gated(torch.ones(1, 4)).shape == (1, 2)
    table = next(record.getMessage() for record in caplog.records if "kernels by seam" in record.getMessage())
    assert "silu_and_mul      acme_gate (named)" in table
    assert "rms_norm          reference (no override is named)" in table


def test_a_worker_process_of_its_own_registers_for_itself(
    model: Path, site: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R12.13: once in each process that needs it, and in no other."""
    site("acme-apart", "apart")
    log = tmp_path / "calls.log"
    monkeypatch.setenv("ACME_LOG", str(log))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    plain = greedy(config(model))
    named = {"silu_and_mul": "apart_gate"}
    assert greedy(config(model, executor="multiproc", custom_ops=["apart_ops"], kernel_overrides=named)) == plain
    assert "acme_apart" not in sys.modules
    pids = set(log.read_text(encoding="utf-8").split())
    assert len(pids) == 1
    assert pids != {str(os.getpid())}


def test_switched_off_it_is_not_even_imported(model: Path, site: Callable[..., Any]) -> None:
    site("acme-idle", "idle")
    named = {"silu_and_mul": "idle_gate"}
    assert len(greedy(config(model, kernel_overrides=named, use_kernel_overrides=False))) == len(PROMPTS)
    assert "acme_idle" not in sys.modules


def test_what_cannot_be_used_stops_the_start(model: Path, site: Callable[..., Any]) -> None:
    """No silent fallback."""
    site("acme-picky", "picky")
    with pytest.raises(ConfigError, match="no kernel seam 'silu'; .* silu_and_mul, rms_norm"):
        greedy(config(model, kernel_overrides={"silu": "picky_gate"}))
    with pytest.raises(ConfigError, match="picky_gate: it computes float32, not bfloat16"):
        greedy(config(model, dtype="bfloat16", kernel_overrides={"silu_and_mul": "picky_gate"}))
    with pytest.raises(ConfigError, match="picky_gate: it replaces the seam 'silu_and_mul', not 'rms_norm'"):
        greedy(config(model, kernel_overrides={"rms_norm": "picky_gate"}))
    with pytest.raises(PluginNotFoundError, match="no kernel_override plugin 'piky_gate'.*did you mean 'picky_gate'"):
        greedy(config(model, kernel_overrides={"silu_and_mul": "piky_gate"}))
    assert len(greedy(config(model, dtype="bfloat16", kernel_overrides={"silu_and_mul": ["picky_gate", "reference"]})))


def test_a_namespace_that_is_anothers_names_its_owner(model: Path, site: Callable[..., Any]) -> None:
    """L12.26: duplicate operator registration."""
    site("acme-near", "near", namespace="acme_near_by")
    site("acme-near-by", "nearby")
    with pytest.raises(PluginConflictError, match="acme-near-by defines .* the namespace of acme-near;"):
        greedy(config(model, custom_ops=["near_ops", "nearby_ops"]))


def test_engines_with_different_kernels_have_different_fingerprints(model: Path, site: Callable[..., Any]) -> None:
    """L12.22: cache keys ignore plugin kernels."""
    site("acme-marked", "marked")
    roles = frozenset({ProcessRole.API, ProcessRole.ENGINE, ProcessRole.WORKER})
    choices: list[dict[str, Any]] = [{}, {"kernel_overrides": {"silu_and_mul": "marked_gate"}}]
    choices.append({"custom_ops": ["marked_ops"]})
    found = [launch_config(config(model, **worker), roles).runtime.fingerprint() for worker in choices]
    assert len(set(found)) == len(choices)
    assert found[1] == launch_config(config(model, **choices[1]), roles).runtime.fingerprint()


def test_it_is_selected_with_one_flag(model: Path, site: Callable[..., Any], tmp_path: Path) -> None:
    site("acme-flagged", "flag")
    arguments = [str(model), "--dtype", "float32", "--num-kv-blocks", "64", "--max-model-len", "256"]
    arguments += ["--plugin", 'worker.torch.kernel_overrides={"silu_and_mul": "flag_gate"}', "--log-level", "INFO"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-m", "hardpoint.cli", "generate", *arguments, "--max-tokens", "4", "--prompt", "ab"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "flag_gate (named)" in done.stderr

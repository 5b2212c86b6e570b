"""What the plugins declare, with Triton and without it."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch

from hardpoint.errors import PluginError
from hardpoint.interfaces.kernel_override import KernelCase
from hardpoint.interfaces.plugin import NoOptions, ProbeStatus, ProcessRole, declaration_of
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_torch_runtime.ops import OPERATORS, SEAMS
from hardpoint_triton_kernels import availability, operators, overrides

OVERRIDES = {
    point.name: point.load()
    for point in entry_points(group="hardpoint.kernel_override.v1")
    if point.value.startswith("hardpoint_triton_kernels")
}


def context(name: str) -> WorkerContext:
    roles = frozenset({ProcessRole.WORKER})
    return WorkerContext(name=name, api_version=1, roles=roles, rank=0, device=torch.device("cpu"))


@pytest.fixture
def without_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """The probe finds no such package."""
    find = importlib.util.find_spec

    def find_others(name: str, package: str | None = None) -> Any:
        return None if name == "triton" else find(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_others)


def test_overrides_are_named_after_their_seams() -> None:
    pytest.importorskip("triton")
    assert len(OVERRIDES) == 5
    for name, factory in OVERRIDES.items():
        made = factory(context(name), NoOptions())
        assert name == f"triton_{made.seam}"
        assert made.is_batch_invariant
        dtype = SEAMS[made.seam].dtype or "bfloat16"
        assert made.refusal(KernelCase(made.seam, "cuda", dtype, batch_invariant=True)) is None
        assert made.refusal(KernelCase(made.seam, "cuda", "float64")) is not None


def test_only_interpreted_kernels_run_on_the_host() -> None:
    assert availability.device_types(None) == {"cuda"}
    assert availability.device_types(type("InterpretedFunction", (), {})()) == {"cuda", "cpu"}


def test_the_probe_says_what_is_there() -> None:
    pytest.importorskip("triton")
    answer = availability.probe()
    assert answer.status is ProbeStatus.AVAILABLE
    assert answer.reason.startswith("triton 3")
    for factory in (*OVERRIDES.values(), operators.create_ops):
        declared = declaration_of(factory)
        assert declared is not None
        assert declared.probe is availability.probe


def test_without_triton_overrides_say_what_to_install(without_triton: None) -> None:
    """R10.30: what is absent is said, and nothing else breaks."""
    assert availability.probe().status is ProbeStatus.ABSENT
    for name, factory in OVERRIDES.items():
        with pytest.raises(
            PluginError, match=r"triton is not installed: pip install 'hardpoint-triton-kernels\[triton\]'"
        ):
            factory(context(name), NoOptions())


def test_without_triton_operators_exist_and_refuse_by_name(without_triton: None) -> None:
    """R10.31."""
    described = operators.create_ops(context("triton_ops"), NoOptions())
    found = OPERATORS.register(described, "hardpoint-triton-kernels-absent")
    assert set(found.missing) == {operator.name for operator in described.operators}
    with pytest.raises(PluginError, match="fused_moe is not available on this platform.*triton is not installed"):
        found["fused_moe"](*[None] * 6)


@pytest.mark.slow
def test_the_plugins_are_imported_without_triton() -> None:
    """Where a GPU's packages are missing, listing and loading plugins must not notice."""
    script = (
        "import sys; sys.modules['triton'] = None\n"
        "import hardpoint_triton_kernels.operators, hardpoint_triton_kernels.overrides\n"
        "assert not [name for name in sys.modules if name.startswith('hardpoint_triton_kernels.kernels')]"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_every_operator_of_the_docstring_is_there() -> None:
    import hardpoint_triton_kernels

    described = operators.create_ops(context("triton_ops"), NoOptions())
    names = {operator.name for operator in described.operators}
    assert len(names) == 9
    told = hardpoint_triton_kernels.__doc__ or ""
    assert [name for name in (*names, *OVERRIDES) if f"``{name}``" not in told] == []
    assert set(overrides.__all__) == {factory.__name__ for factory in OVERRIDES.values()}

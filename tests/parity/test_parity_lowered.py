"""Every configuration of the models' table with the CPU's native kernels, against itself in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint_cpu.compiler import NativeCompiler
from hardpoint_cpu.host import Host
from hardpoint_cpu.kernels import KernelProvider
from hardpoint_testing_torch import (
    LocalDriver,
    ParityCase,
    TinyModel,
    build_model,
    installed_backend,
    installed_factory,
    installed_loader,
    make_tiny_model,
    relative_error,
    worker_config,
)
from model_cases import CASES

TOLERANCE = 3e-5
"""Rounding alone. Recurrent states carry it from token to token: the largest seen is 1.2e-5, of Mamba."""

ALONE: Sequence[Mapping[str, Sequence[int]]] = ({"a": [3, 14, 15, 92, 65]}, {"b": [8, 79, 32]})
STEPS: Sequence[Mapping[str, Sequence[int]]] = (
    {"a": [3, 14, 15, 92, 65]},
    {"a": [35], "b": [8, 79, 93, 23, 84, 62, 6]},
    {"a": [43], "b": [38], "c": list(range(1, 30))},
    {"a": [33], "b": [83], "c": [27]},
)


@pytest.fixture(scope="module")
def kernels() -> KernelProvider:
    provider = KernelProvider(Host(), build="wait")
    assert provider.library() is not None, provider.report().reason
    return provider


def build(tiny: TinyModel) -> tuple[Any, LocalDriver]:
    backend = installed_backend("torch_reference")
    factory, loader = installed_factory("model", tiny.info.architecture), installed_loader("safetensors")
    model, toolkit = build_model(factory, loader, worker_config(tiny.info), backend)
    return model, LocalDriver(model, toolkit)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.name}".replace(" ", "_"))
def test_native_kernels_change_nothing_but_rounding(case: ParityCase, kernels: KernelProvider, tmp_path: Path) -> None:
    """I9.2. Whatever is not lowered has a reason."""
    tiny = make_tiny_model(case.architecture, tmp_path, **case.config)
    (model, lowered), (_, plain) = build(tiny), build(tiny)
    ranges = NativeCompiler(kernels, worker_config(tiny.info), logging.getLogger("hardpoint.test")).lower(model)
    assert ranges[0].tokens is not None
    assert [one for one in ranges if one.tokens is None and not one.reason] == []
    for step in STEPS if plain.takes_chunks else ALONE:
        found, expected = lowered.step(step), plain.step(step)
        for name in step:
            assert relative_error(found[name], expected[name]) < TOLERANCE
            assert torch.equal(found[name].argmax(-1), expected[name].argmax(-1))

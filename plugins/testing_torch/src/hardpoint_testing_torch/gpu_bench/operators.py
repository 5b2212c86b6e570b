"""Operators of installed distributions (``custom_op``), against plain computations of the same.

Only those can be measured of whom :data:`PROBLEMS` knows what they compute; others are told of.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from hardpoint.errors import HardpointError
from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOperator, CustomOps
from hardpoint.interfaces.plugin import NoOptions, ProbeStatus, ProcessRole
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_testing_torch.gpu_bench.measure import num_bytes, seconds_per_call
from hardpoint_testing_torch.gpu_bench.operator_problems import PROBLEMS, OperatorProblem
from hardpoint_testing_torch.gpu_bench.records import KernelRow, Scale, Skipped
from hardpoint_testing_torch.installed import installed_factory

__all__ = ["describe_operators", "measure_operators", "operator_error"]

TOLERANCE = 1e-4
"""Samples are float32; devices round sums and exponentials otherwise than the processor."""


def describe_operators(name: str, device: torch.device) -> CustomOps:
    """What the installed plugin ``name`` defines. Raises ``PluginError`` where it cannot be used."""
    context = WorkerContext(name=name, api_version=1, roles=frozenset({ProcessRole.WORKER}), device=device)
    made: CustomOps = installed_factory("custom_op", name)(context, NoOptions())
    return made


def measure_operators(
    name: str, device: torch.device, dtype: torch.dtype, scale: Scale, ops: CustomOps | None = None
) -> Iterator[KernelRow | Skipped]:
    """One row for each operator of the plugin ``name``, or why there is none. ``ops``: instead of the installed."""
    try:
        found = describe_operators(name, device) if ops is None else ops
    except (HardpointError, RuntimeError) as fault:
        yield Skipped(name=name, reason=f"{type(fault).__name__}: {fault}")
        return
    for operator in found.operators:
        try:
            yield _measured(operator, device, dtype, scale)
        except (HardpointError, RuntimeError) as fault:
            yield Skipped(name=operator.name, reason=f"{type(fault).__name__}: {fault}")


def _measured(operator: CustomOperator, device: torch.device, dtype: torch.dtype, scale: Scale) -> KernelRow | Skipped:
    answer = None if operator.probe is None else operator.probe()
    if answer is not None and answer.status is not ProbeStatus.AVAILABLE:
        return Skipped(name=operator.name, reason=answer.reason)
    run = operator.implementations.get(device.type, operator.implementations.get(ANY_DEVICE))
    if run is None:
        return Skipped(name=operator.name, reason=f"it has no implementation for {device.type}")
    problem = PROBLEMS.get(operator.name)
    if problem is None:
        return Skipped(name=operator.name, reason="no plain computation of the same is known")
    error = max((operator_error(run, problem, sample) for sample in operator.samples(device.type)), default=0.0)
    arguments = problem.large(device, dtype, scale)
    written = num_bytes(*tree_leaves(run(*arguments))) + (num_bytes(arguments[0]) if problem.rewrites else 0)
    return KernelRow(
        group="operators",
        name=operator.name,
        case=" x ".join(map(str, arguments[0].shape)),
        error=error,
        tolerance=TOLERANCE,
        seconds=seconds_per_call(partial(run, *arguments), device, scale.budget_s),
        plain_seconds=seconds_per_call(partial(problem.plain, *arguments), device, scale.budget_s),
        bytes=num_bytes(*arguments) + written,
        flops=problem.flops(*arguments),
    )


def operator_error(run: Callable[..., Any], problem: OperatorProblem, sample: tuple[Any, ...]) -> float:
    """Largest deviation from the plain computation, relative to values above one, in results and arguments."""
    wanted, given = _copied(sample), _copied(sample)
    pairs = zip(tree_leaves((problem.plain(*wanted), wanted)), tree_leaves((run(*given), given)), strict=True)
    return max((_deviation(one, other) for one, other in pairs if isinstance(one, torch.Tensor)), default=0.0)


def _copied(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    copies: tuple[Any, ...] = tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, sample)
    return copies


def _deviation(wanted: torch.Tensor, found: torch.Tensor) -> float:
    if wanted.shape != found.shape or wanted.dtype != found.dtype:
        return float("inf")
    if not wanted.numel():
        return 0.0
    one, other = wanted.double(), found.double()
    same = (one == other) | (one.isnan() & other.isnan())  # infinities among them
    largest = torch.where(same, 0.0, (one - other).abs() / one.abs().clamp_min(1.0)).max()
    return float(largest) if bool(torch.isfinite(largest)) else float("inf")

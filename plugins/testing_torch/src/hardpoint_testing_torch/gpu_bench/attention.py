"""Attention backends over paged caches, against the dense oracle and against a plain loop over sequences.

Legend: T tokens of the step, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch

from hardpoint.errors import HardpointError
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import NoOptions, ProcessRole, declaration_of
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_testing_torch.attention_oracle import dense_attention
from hardpoint_testing_torch.attention_problems import LAYER, AttentionProblem, make_problem, run_backend
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.gpu_bench.measure import num_bytes, seconds_per_call
from hardpoint_testing_torch.gpu_bench.records import KernelRow, Scale, Skipped
from hardpoint_testing_torch.installed import installed_factory
from hardpoint_testing_torch.linear_bench import bench_info
from hardpoint_testing_torch.local_driver import worker_config

__all__ = ["AttentionCase", "attention_cases", "create_backend", "largest_error", "measure_attention"]

SMALL_ROWS: Sequence[tuple[int, int]] = ((0, 33), (17, 1), (63, 1), (64, 2), (30, 7), (0, 1))
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}


@dataclass(frozen=True, slots=True)
class AttentionCase:
    """``rows`` are (context, query) token counts of the large problem."""

    title: str
    shape: AttentionShape
    rows: tuple[tuple[int, int], ...]


def attention_cases(scale: Scale, dtype: torch.dtype) -> Iterator[AttentionCase]:
    """Shapes of common models, with everything that masks and caches may ask for once."""
    grouped = AttentionShape(num_heads=32, num_kv_heads=8, head_size=128, block_size=16, dtype=dtype)
    decode = ((scale.context, 1),) * scale.decode_rows
    prefill = ((0, scale.prefill),) * scale.prefill_rows
    chunk = ((scale.context, scale.prefill // 2),) + ((scale.context, 1),) * (scale.decode_rows // 2)
    yield AttentionCase("decode", grouped, decode)
    yield AttentionCase("prefill", grouped, prefill)
    yield AttentionCase("chunk and decode", grouped, chunk)
    yield AttentionCase(
        "decode, heads of 64, no groups", replace(grouped, num_heads=16, num_kv_heads=16, head_size=64), decode
    )
    yield AttentionCase("decode, heads of 256", replace(grouped, num_heads=16, num_kv_heads=4, head_size=256), decode)
    yield AttentionCase("decode, window", replace(grouped, sliding_window=max(4, scale.context // 4)), decode)
    yield AttentionCase("decode, soft cap", replace(grouped, logits_soft_cap=30.0), decode)
    yield AttentionCase("decode, sinks", replace(grouped, uses_sinks=True), decode)
    yield AttentionCase("decode, fp8 cache", replace(grouped, kv_cache_dtype="fp8"), decode)
    latent = replace(grouped, num_heads=16, num_kv_heads=1, head_size=576, latent_values=512)
    yield AttentionCase("decode, latent (MLA)", latent, decode)


def create_backend(name: str, device: torch.device) -> AttentionBackend:
    """The installed backend ``name`` as a worker on ``device`` creates it. Raises what its factory raises."""
    factory = installed_factory("attention_backend", name)
    declaration = declaration_of(factory)
    options = NoOptions() if declaration is None else declaration.options()
    config = worker_config(bench_info())
    context = WorkerContext(
        name=name, api_version=1, roles=frozenset({ProcessRole.WORKER}), rank=0, config=config, device=device
    )
    made: AttentionBackend = factory(context, options)
    return made


def measure_attention(
    backend: AttentionBackend, case: AttentionCase, device: torch.device, description: DeviceDescription, scale: Scale
) -> KernelRow | Skipped:
    """What the backend makes of the case, or why it does not."""
    label = f"{backend.name}: {case.title}"
    try:
        reason = backend.objection(case.shape.need(description))
        if reason is not None:
            return Skipped(name=label, reason=reason)
        error = largest_error(backend, make_problem(case.shape, SMALL_ROWS), device)
        problem = make_problem(case.shape, case.rows).to(device)
        seconds = _seconds(backend, problem, device, scale)
    except (HardpointError, RuntimeError) as fault:
        return Skipped(name=label, reason=f"{type(fault).__name__}: {fault}")
    return KernelRow(
        group="attention",
        name=backend.name,
        case=case.title,
        error=error,
        tolerance=TOLERANCES[case.shape.dtype],
        seconds=seconds,
        plain_seconds=plain_seconds(problem, device, scale),
        bytes=needed_bytes(problem),
        flops=needed_flops(problem),
    )


def largest_error(backend: AttentionBackend, problem: AttentionProblem, device: torch.device) -> float:
    """Largest deviation from the float64 answer; infinite where something is not a number."""
    found = run_backend(backend, problem.to(device)).double().cpu()
    expected, _ = dense_attention(problem)
    error = (found - expected).abs().max()
    return float(error) if bool(torch.isfinite(error)) else float("inf")


def _seconds(backend: AttentionBackend, problem: AttentionProblem, device: torch.device, scale: Scale) -> float:
    """Of ``forward`` alone: the step's metadata and its keys and values are there."""
    impl, cache, output = backend.create_impl(problem.params()), problem.kv_cache(), problem.empty_output()
    builder = backend.create_builder(problem.spec(), [LAYER], len(problem.rows), problem.num_tokens, device)
    metadata = builder.build(problem.common())
    if backend.kv_write_mode.value == "separate":
        impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())

    def run() -> None:
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)

    return seconds_per_call(run, device, scale.budget_s)


def plain_seconds(problem: AttentionProblem, device: torch.device, scale: Scale) -> float:
    """One call of the framework's attention per sequence, over keys and values that already lie dense: what a program
    without paging does at best."""
    calls, begin = [], 0
    for row, (context, length) in enumerate(problem.rows):
        step = slice(begin, begin + length)
        begin += length
        old_keys, old_values = problem.history[row]
        keys = torch.cat((old_keys, problem.key[step])).transpose(0, 1)[None]
        values = torch.cat((old_values, problem.value[step])).transpose(0, 1)[None]
        query = problem.query[step].transpose(0, 1)[None]
        mask = None
        if length > 1:
            mask = torch.arange(context, context + length, device=device)[:, None] >= torch.arange(
                context + length, device=device
            )
        calls.append((query, keys, values, mask))

    def run() -> None:
        for query, keys, values, mask in calls:
            torch.nn.functional.scaled_dot_product_attention(query, keys, values, mask, enable_gqa=True)

    return seconds_per_call(run, device, scale.budget_s)


def _seen(problem: AttentionProblem) -> Iterator[tuple[int, int]]:
    """(queries, keys that at least one of them sees) per row; a window shortens what has to be read."""
    window = problem.shape.sliding_window
    for context, length in problem.rows:
        total = context + length
        yield length, total if window is None else min(total, window + length - 1)


def needed_bytes(problem: AttentionProblem) -> float:
    """Queries in, outputs out, and every visible key and value once, as the cache stores them."""
    shape = problem.shape
    width = shape.head_size + (0 if shape.latent_values is not None else shape.head_size)
    stored = problem.stored.empty(1, 1, 1, shape.head_size).element_size()
    keys = sum(keys for _, keys in _seen(problem))
    return num_bytes(problem.query, problem.empty_output()) + keys * shape.num_kv_heads * width * stored


def needed_flops(problem: AttentionProblem) -> float:
    """Two products per visible pair of query and key; half of a prompt's own square is masked."""
    shape = problem.shape
    pairs = sum(length * keys - length * (length - 1) / 2 for length, keys in _seen(problem))
    return 2 * pairs * shape.num_heads * (shape.head_size + shape.value_size)

"""FlashInfer's wrappers by kind of layer: planned once per step, then run by every layer of the kind.

Planning takes host time and copies; it belongs to building a step, not to the layers' forwards.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint_attention.flashinfer.steps import PagedRows, Step

__all__ = ["PlanKey", "PlanTable", "load_package"]

LAYOUT = "HND"
"""Heads before tokens in a page, as the cache is laid out."""

GROUP_FOR_TENSOR_CORES = 4
"""Query heads per KV head from which decoding is worth a matrix unit."""


@dataclass(frozen=True, slots=True)
class PlanKey:
    """What wrappers are planned for. Layers that agree share them. ``window_left`` -1: no window."""

    num_heads: int
    num_kv_heads: int
    head_size: int
    scale: float
    causal: bool
    window_left: int
    soft_cap: float


@dataclass(frozen=True, slots=True)
class _Planned:
    """A wrapper with the step it is planned for."""

    wrapper: Any
    step: Step


class PlanTable:
    """The wrappers of one KV group. Nothing is planned for more than one step at a time.

    ``query_dtype`` and ``stored_dtype``: of queries, and of what the cache holds.
    """

    def __init__(
        self,
        package: Callable[[], Any],
        device: torch.device,
        stored_dtype: torch.dtype,
        *,
        workspace_bytes: int,
        max_pages: int,
        batch_invariant: bool,
    ) -> None:
        self._package = package
        self._device = device
        self._stored = stored_dtype
        self._max_pages = max_pages
        self._batch_invariant = batch_invariant
        self._workspace_bytes = workspace_bytes
        self._workspace: torch.Tensor | None = None
        self._wrappers: dict[tuple[object, ...], Any] = {}
        self._planned: dict[tuple[object, ...], _Planned] = {}

    def start(self, step: Step, keys: Iterable[tuple[PlanKey, torch.dtype]]) -> None:
        """Plan ``step`` for layers that are known by now; others follow with their first forward."""
        self._planned.clear()
        for key, dtype in keys:
            if step.decodes is not None:
                self.decode(key, step, dtype)
            if step.others is not None:
                self.prefill(key, step, dtype)

    def decode(self, key: PlanKey, step: Step, dtype: torch.dtype) -> Any:
        """The wrapper for the step's decodes, planned."""
        rows = _required(step.decodes, "decodes")
        size = rows.num_rows if step.for_graph else None
        return self._ready(
            ("decode", key, dtype, size), step, lambda wrapper: self._plan_decode(wrapper, key, step, rows, dtype)
        )

    def prefill(self, key: PlanKey, step: Step, dtype: torch.dtype) -> Any:
        """The wrapper for all other rows, planned."""
        rows = _required(step.others, "longer rows")
        return self._ready(
            ("prefill", key, dtype, None), step, lambda wrapper: self._plan_prefill(wrapper, key, step, rows, dtype)
        )

    def fresh(self, key: PlanKey, step: Step, dtype: torch.dtype, *, is_cross: bool) -> Any:
        """The wrapper over the step's own keys, planned."""
        name = "cross" if is_cross else "fresh"
        key_starts = step.fresh_key_starts if is_cross else step.fresh_starts
        return self._ready(
            (name, key, dtype, None), step, lambda wrapper: self._plan_fresh(wrapper, key, step, key_starts, dtype)
        )

    def _ready(self, name: tuple[object, ...], step: Step, plan: Callable[[Any], None]) -> Any:
        planned = self._planned.get(name)
        if planned is None or planned.step is not step:
            wrapper = self._wrappers.get(name)
            if wrapper is None:
                wrapper = self._wrappers[name] = self._create(name)
            plan(wrapper)
            planned = self._planned[name] = _Planned(wrapper, step)
        return planned.wrapper

    def _create(self, name: tuple[object, ...]) -> Any:
        package, kind, size = self._package(), name[0], name[3]
        if self._workspace is None:
            self._workspace = torch.zeros(self._workspace_bytes, dtype=torch.uint8, device=self._device)
        if kind == "prefill":
            return package.BatchPrefillWithPagedKVCacheWrapper(self._workspace, LAYOUT)
        if kind in ("fresh", "cross"):
            return package.BatchPrefillWithRaggedKVCacheWrapper(self._workspace, "NHD")
        key = name[1]
        group = key.num_heads // key.num_kv_heads if isinstance(key, PlanKey) else 1
        graph: dict[str, Any] = {}
        if isinstance(size, int):
            # A captured kernel reads these buffers, so each size of step has its own for good (R5.38).
            def buffer(length: int) -> torch.Tensor:
                return torch.zeros(length, dtype=torch.int32, device=self._device)

            graph = {
                "use_cuda_graph": True,
                "paged_kv_indptr_buffer": buffer(size + 1),
                "paged_kv_indices_buffer": buffer(self._max_pages),
                "paged_kv_last_page_len_buffer": buffer(size),
            }
        return package.BatchDecodeWithPagedKVCacheWrapper(
            self._workspace, LAYOUT, use_tensor_cores=group >= GROUP_FOR_TENSOR_CORES, **graph
        )

    def _plan_decode(self, wrapper: Any, key: PlanKey, step: Step, rows: PagedRows, dtype: torch.dtype) -> None:
        wrapper.plan(
            rows.page_starts,
            rows.page_ids,
            rows.last_page_lens,
            key.num_heads,
            key.num_kv_heads,
            key.head_size,
            step.page_size,
            window_left=key.window_left,
            logits_soft_cap=key.soft_cap,
            sm_scale=key.scale,
            q_data_type=dtype,
            kv_data_type=self._stored_for(dtype),
        )

    def _plan_prefill(self, wrapper: Any, key: PlanKey, step: Step, rows: PagedRows, dtype: torch.dtype) -> None:
        wrapper.plan(
            rows.query_starts,
            rows.page_starts,
            rows.page_ids,
            rows.last_page_lens,
            key.num_heads,
            key.num_kv_heads,
            key.head_size,
            step.page_size,
            causal=key.causal,
            window_left=key.window_left,
            logits_soft_cap=key.soft_cap,
            sm_scale=key.scale,
            q_data_type=dtype,
            kv_data_type=self._stored_for(dtype),
            **self._invariance(),
        )

    def _plan_fresh(self, wrapper: Any, key: PlanKey, step: Step, key_starts: torch.Tensor, dtype: torch.dtype) -> None:
        wrapper.plan(
            step.fresh_starts,
            key_starts,
            key.num_heads,
            key.num_kv_heads,
            key.head_size,
            causal=key.causal,
            window_left=key.window_left,
            logits_soft_cap=key.soft_cap,
            sm_scale=key.scale,
            q_data_type=dtype,
            kv_data_type=dtype,
            **self._invariance(),
        )

    def _stored_for(self, dtype: torch.dtype) -> torch.dtype:
        return self._stored if self._stored.itemsize == 1 else dtype

    def _invariance(self) -> dict[str, Any]:
        # Split keys are summed in an order that depends on the other rows.
        return {"disable_split_kv": True} if self._batch_invariant else {}


def load_package() -> Any:
    """Import FlashInfer. Raises ``ConfigError`` naming what to install when that fails."""
    try:
        return importlib.import_module("flashinfer")
    except ImportError as error:
        raise ConfigError(
            f"FlashInfer cannot be loaded ({error}); install flashinfer-python for this device, or choose another "
            "backend with --attention-backend"
        ) from error


def _required(rows: PagedRows | None, what: str) -> PagedRows:
    if rows is None:
        raise RuntimeError(f"the step has no {what} to plan for")
    return rows

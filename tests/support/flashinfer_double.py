"""A stand-in for the FlashInfer package: the published wrappers and limits, numerics in float64, calls recorded."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import torch

from flash_double import KeyRow, Recorded, Seen, attend, fresh_rows

__all__ = ["FlashInferDouble"]

NO_KEYS = -5e4
"""The package's stand-in for minus infinity, to base 2: what it says of a query that saw no key."""


@dataclass(slots=True)
class FlashInferDouble:
    """``installed()`` puts the module into ``sys.modules`` while its block lasts. ``calls``: plans and runs."""

    calls: list[Recorded] = field(default_factory=list)
    created: list[Any] = field(default_factory=list)

    def named(self, *functions: str) -> list[Recorded]:
        return [call for call in self.calls if call.function in functions]

    @contextmanager
    def installed(self) -> Iterator[FlashInferDouble]:
        double = self

        class Prefill(_Prefill):
            calls, created = double.calls, double.created

        class Decode(_Decode):
            calls, created = double.calls, double.created

        class Ragged(_Ragged):
            calls, created = double.calls, double.created

        module, before = ModuleType("flashinfer"), sys.modules.get("flashinfer")
        vars(module).update(
            BatchPrefillWithPagedKVCacheWrapper=Prefill,
            BatchDecodeWithPagedKVCacheWrapper=Decode,
            BatchPrefillWithRaggedKVCacheWrapper=Ragged,
        )
        sys.modules["flashinfer"] = module
        try:
            yield self
        finally:
            if before is None:
                del sys.modules["flashinfer"]
            else:
                sys.modules["flashinfer"] = before


class _Wrapper:
    """What all wrappers share: a plan that must come first, host-side offsets, exact numbers of tokens."""

    calls: list[Recorded]
    created: list[Any]

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str = "NHD", **buffers: Any) -> None:
        _require(float_workspace_buffer.dtype == torch.uint8, "a workspace of bytes")
        self.kv_layout = kv_layout
        self.workspace = float_workspace_buffer
        self.buffers = buffers
        self.options: dict[str, Any] = {}
        self.query_starts = torch.zeros(1, dtype=torch.int32)
        self.created.append(self)

    def _record(self, function: str, arguments: dict[str, Any]) -> None:
        kept = {name: value for name, value in arguments.items() if name not in ("self", "options")}
        self.calls.append(Recorded(function, {**kept, **arguments.get("options", {})}))

    def _keep(self, heads: int, kv_heads: int, head_size: int, options: dict[str, Any]) -> None:
        known = {"causal", "window_left", "logits_soft_cap", "sm_scale", "q_data_type", "kv_data_type"}
        _require(options.keys() <= {*known, "disable_split_kv", "fixed_split_size"}, f"no options {sorted(options)}")
        self.options = {**options, "heads": heads, "kv_heads": kv_heads, "head_size": head_size}

    def _compute(
        self, q: torch.Tensor, rows: list[KeyRow], out: torch.Tensor | None, *, causal: bool, return_lse: bool
    ) -> Any:
        options = self.options
        _require(q.shape == (int(self.query_starts[-1]), options["heads"], options["head_size"]), f"not {q.shape}")
        _require(q.dtype == options["q_data_type"], "queries of the planned dtype")
        _require(out is None or out.shape == q.shape, "an output as large as the queries")
        seen = Seen(causal, (options.get("window_left", -1), -1))
        result, lse = attend(q, rows, options["sm_scale"], seen, options.get("logits_soft_cap") or 0.0)
        if out is not None:
            result = out.copy_(result)
        binary = torch.where(lse == torch.inf, NO_KEYS, lse / math.log(2.0))
        return (result, binary.t()) if return_lse else result


class _Paged(_Wrapper):
    page_starts: torch.Tensor
    page_ids: torch.Tensor
    last_page_lens: torch.Tensor
    page_size: int

    def _keep_pages(self, starts: torch.Tensor, ids: torch.Tensor, last: torch.Tensor, page_size: int) -> None:
        _require(starts.dtype == ids.dtype == last.dtype == torch.int32, "int32")
        _require(len(ids) == int(starts[-1]), "as many page ids as the offsets say")
        self.page_starts, self.page_ids, self.last_page_lens, self.page_size = starts, ids, last, page_size

    def _rows(self, cache: tuple[torch.Tensor, torch.Tensor]) -> list[KeyRow]:
        _require(self.kv_layout == "HND", "pages with heads before tokens")
        keys, values = cache
        _require(keys.stride() == values.stride() and keys.stride(-1) == 1, "keys and values of equal strides")
        _require(keys.shape[2] == self.page_size, "pages of the planned size")
        _require(keys.dtype == self.options["kv_data_type"], "a cache of the planned dtype")
        rows = []
        for row in range(len(self.page_starts) - 1):
            begin, end = int(self.page_starts[row]), int(self.page_starts[row + 1])
            length = max(end - begin - 1, 0) * self.page_size + int(self.last_page_lens[row])
            pages = self.page_ids[begin:end].long()
            gathered = [states[pages].double().transpose(1, 2).flatten(0, 1)[:length] for states in (keys, values)]
            tokens = slice(int(self.query_starts[row]), int(self.query_starts[row + 1]))
            rows.append(KeyRow(row, tokens, gathered[0], gathered[1]))
        return rows


class _Prefill(_Paged):
    def plan(
        self,
        qo_indptr: torch.Tensor,
        paged_kv_indptr: torch.Tensor,
        paged_kv_indices: torch.Tensor,
        paged_kv_last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self._record("prefill.plan", locals())
        self._keep(num_qo_heads, num_kv_heads, head_dim_qk, options)
        self.query_starts = qo_indptr
        self._keep_pages(paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len, page_size)

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        self._record("prefill.run", locals())
        causal = bool(self.options.get("causal", False))
        return self._compute(q, self._rows(paged_kv_cache), out, causal=causal, return_lse=return_lse)


class _Decode(_Paged):
    """Captured ones have buffers for offsets, page ids and lengths, into which plans are copied."""

    def plan(
        self,
        indptr: torch.Tensor,
        indices: torch.Tensor,
        last_page_len: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim: int,
        page_size: int,
        **options: Any,
    ) -> None:
        self._record("decode.plan", locals())
        self._keep(num_qo_heads, num_kv_heads, head_dim, options)
        self.query_starts = torch.arange(len(indptr), dtype=torch.int32)
        self._keep_pages(indptr, indices, last_page_len, page_size)
        if self.buffers.get("use_cuda_graph"):
            starts, ids, last = (
                self.buffers[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")
            )
            _require(len(starts) == len(indptr), "the batch size of a captured wrapper never changes")
            self.page_starts, self.last_page_lens = starts.copy_(indptr), last.copy_(last_page_len)
            ids[: len(indices)].copy_(indices)
            self.page_ids = ids

    def run(
        self,
        q: torch.Tensor,
        paged_kv_cache: tuple[torch.Tensor, torch.Tensor],
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        self._record("decode.run", locals())
        return self._compute(q, self._rows(paged_kv_cache), out, causal=True, return_lse=return_lse)


class _Ragged(_Wrapper):
    key_starts: torch.Tensor

    def plan(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        num_qo_heads: int,
        num_kv_heads: int,
        head_dim_qk: int,
        **options: Any,
    ) -> None:
        self._record("ragged.plan", locals())
        self._keep(num_qo_heads, num_kv_heads, head_dim_qk, options)
        self.query_starts, self.key_starts = qo_indptr, kv_indptr

    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        out: torch.Tensor | None = None,
        return_lse: bool = False,
    ) -> Any:
        self._record("ragged.run", locals())
        _require(len(k) == len(v) == int(self.key_starts[-1]), "exactly the planned keys")
        rows = fresh_rows(self.query_starts, self.key_starts, k, v)
        causal = bool(self.options.get("causal", False))
        return self._compute(q, rows, out, causal=causal, return_lse=return_lse)


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(f"the FlashInfer double wants: {text}")

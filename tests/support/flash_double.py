"""Stand-ins for the FlashAttention packages: the published signatures and limits, numerics in float64, calls recorded.

Legend: T query tokens, H query heads, K KV heads, D head size, N pages, B page size, R rows.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

__all__ = ["FlashDouble", "KeyRow", "Recorded", "Seen", "attend", "fresh_rows"]

STALE = 1e4
"""What a thread block that acts on a left-over schedule entry writes."""


@dataclass(slots=True)
class Recorded:
    """One call: the function's name and its arguments, the very objects."""

    function: str
    arguments: dict[str, Any]

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]


@dataclass(slots=True)
class KeyRow:
    """One row of a call: keys and values [S, K, D] in float64, and which of them each query sees."""

    number: int
    tokens: slice
    keys: torch.Tensor
    values: torch.Tensor


@dataclass(slots=True)
class FlashDouble:
    """``installed()`` puts the modules into ``sys.modules`` for as long as its block lasts.

    Attributes:
        calls: every call of a kernel or of the scheduler, in order.
        with_out: functions of generation 3 and 4 take ``out``, as some builds do.
        num_mask_compilations: of ``cute.jit``.
    """

    calls: list[Recorded] = field(default_factory=list)
    with_out: bool = False
    num_mask_compilations: int = 0

    def kernel_calls(self) -> list[Recorded]:
        return [call for call in self.calls if call.function != "get_scheduler_metadata"]

    @property
    def last(self) -> Recorded:
        return self.kernel_calls()[-1]

    @contextmanager
    def installed(self) -> Iterator[FlashDouble]:
        modules = self._modules()
        before = {name: sys.modules.get(name) for name in modules}
        sys.modules.update(modules)
        try:
            yield self
        finally:
            for name, module in before.items():
                if module is None:
                    del sys.modules[name]
                else:
                    sys.modules[name] = module

    def _modules(self) -> dict[str, ModuleType]:
        package, cute_package, utils = (ModuleType(f"flash_attn{rest}") for rest in ("", ".cute", ".cute.utils"))
        hopper, cutlass, cute = ModuleType("flash_attn_interface"), ModuleType("cutlass"), ModuleType("cutlass.cute")
        fields: list[tuple[ModuleType, dict[str, Any]]] = [
            (package, {"flash_attn_varlen_func": self._varlen_2, "cute": cute_package}),
            (cute_package, {"flash_attn_varlen_func": self._varlen_4(), "utils": utils}),
            (utils, {"scalar_to_ssa": _lane}),
            (
                hopper,
                {
                    "flash_attn_with_kvcache": self._with_kvcache_3(),
                    "flash_attn_varlen_func": self._varlen_3,
                    "get_scheduler_metadata": self._scheduler,
                },
            ),
            (cutlass, {"Int32": torch.int32, "cute": cute}),
            (cute, {"jit": self._jit}),
        ]
        for module, entries in fields:
            vars(module).update(entries)
        return {module.__name__: module for module, _ in fields}

    def _jit(self, function: Callable[..., Any]) -> Callable[..., Any]:
        self.num_mask_compilations += 1
        return function

    def _varlen_2(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        alibi_slopes: torch.Tensor | None = None,
        deterministic: bool = False,
        return_attn_probs: bool = False,
        block_table: torch.Tensor | None = None,
    ) -> Any:
        self._record("flash_attn_varlen_func.2", locals())
        _require(dropout_p == 0.0, "no dropout")
        _require(block_table is None or k.shape[1] % 256 == 0, "pages must be of a multiple of 256 tokens")
        _require(q.dtype == k.dtype == v.dtype, "one dtype")
        lens = cu_seqlens_k[1:] - cu_seqlens_k[:-1]
        rows = _paged_rows(cu_seqlens_q, k, v, lens, block_table) if block_table is not None else None
        out, lse = attend(
            q,
            rows or fresh_rows(cu_seqlens_q, cu_seqlens_k, k, v),
            softmax_scale,
            Seen(causal, window_size),
            softcap,
            slopes=alibi_slopes,
        )
        return (out, lse, None) if return_attn_probs else out

    def _varlen_3(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens_q: torch.Tensor,
        cu_seqlens_k: torch.Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        seqused_q: torch.Tensor | None = None,
        seqused_k: torch.Tensor | None = None,
        softmax_scale: float | None = None,
        causal: bool = False,
        qv: torch.Tensor | None = None,
        q_descale: torch.Tensor | None = None,
        k_descale: torch.Tensor | None = None,
        v_descale: torch.Tensor | None = None,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        softcap: float = 0.0,
        num_splits: int = 1,
        pack_gqa: bool | None = None,
        deterministic: bool = False,
        sm_margin: int = 0,
        return_attn_probs: bool = False,
    ) -> Any:
        self._record("flash_attn_varlen_func.3", locals())
        _require_aligned(q, k, v)
        rows = fresh_rows(cu_seqlens_q, cu_seqlens_k, k, v)
        out, lse = attend(q, rows, softmax_scale, Seen(causal, window_size, attention_chunk), softcap)
        return (out, lse) if return_attn_probs else out

    def _with_kvcache_3(self) -> Callable[..., Any]:
        def flash_attn_with_kvcache(
            q: torch.Tensor,
            k_cache: torch.Tensor,
            v_cache: torch.Tensor,
            k: torch.Tensor | None = None,
            v: torch.Tensor | None = None,
            qv: torch.Tensor | None = None,
            rotary_cos: torch.Tensor | None = None,
            rotary_sin: torch.Tensor | None = None,
            cache_seqlens: torch.Tensor | None = None,
            cache_batch_idx: torch.Tensor | None = None,
            cache_leftpad: torch.Tensor | None = None,
            page_table: torch.Tensor | None = None,
            cu_seqlens_q: torch.Tensor | None = None,
            cu_seqlens_k_new: torch.Tensor | None = None,
            max_seqlen_q: int | None = None,
            rotary_seqlens: torch.Tensor | None = None,
            q_descale: torch.Tensor | None = None,
            k_descale: torch.Tensor | None = None,
            v_descale: torch.Tensor | None = None,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size: tuple[int, int] = (-1, -1),
            attention_chunk: int = 0,
            softcap: float = 0.0,
            rotary_interleaved: bool = True,
            scheduler_metadata: torch.Tensor | None = None,
            num_splits: int = 0,
            pack_gqa: bool | None = None,
            sm_margin: int = 0,
            return_softmax_lse: bool = False,
            out: torch.Tensor | None = None,
        ) -> Any:
            self._record("flash_attn_with_kvcache", locals())
            _require(q.dtype == k_cache.dtype == v_cache.dtype, "queries of the cache's dtype")
            if page_table is None:
                raise ValueError("this double takes pages only")
            _require_aligned(q, k_cache, v_cache)
            _require_descale(k_descale, page_table, k_cache)
            rows = _paged_rows(cu_seqlens_q, k_cache, v_cache, cache_seqlens, page_table, k_descale, v_descale)
            seen = Seen(causal, window_size, attention_chunk)
            result, lse = attend(q, rows, softmax_scale, seen, softcap, out=out)
            if scheduler_metadata is not None:
                _act_on_schedule(scheduler_metadata, page_table.shape[0], result)
            return (result, lse) if return_softmax_lse else result

        return flash_attn_with_kvcache if self.with_out else _without_out(flash_attn_with_kvcache)

    def _scheduler(
        self,
        batch_size: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        num_heads_q: int,
        num_heads_kv: int,
        headdim: int,
        cache_seqlens: torch.Tensor,
        qkv_dtype: torch.dtype = torch.bfloat16,
        headdim_v: int | None = None,
        cu_seqlens_q: torch.Tensor | None = None,
        cu_seqlens_k_new: torch.Tensor | None = None,
        cache_leftpad: torch.Tensor | None = None,
        page_size: int | None = None,
        max_seqlen_k_new: int = 0,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        attention_chunk: int = 0,
        has_softcap: bool = False,
        num_splits: int = 0,
        pack_gqa: bool | None = None,
        sm_margin: int = 0,
    ) -> torch.Tensor:
        self._record("get_scheduler_metadata", locals())
        _require(cache_seqlens.shape == (batch_size,), "one length per row")
        return torch.arange(1 + batch_size, dtype=torch.int32)

    def _varlen_4(self) -> Callable[..., Any]:
        def flash_attn_varlen_func(
            q: torch.Tensor,
            k: torch.Tensor,
            v: torch.Tensor,
            cu_seqlens_q: torch.Tensor | None = None,
            cu_seqlens_k: torch.Tensor | None = None,
            max_seqlen_q: int | None = None,
            max_seqlen_k: int | None = None,
            seqused_q: torch.Tensor | None = None,
            seqused_k: torch.Tensor | None = None,
            page_table: torch.Tensor | None = None,
            softmax_scale: float | None = None,
            causal: bool = False,
            window_size: tuple[int | None, int | None] = (None, None),
            learnable_sink: torch.Tensor | None = None,
            softcap: float = 0.0,
            num_splits: int = 1,
            pack_gqa: bool | None = None,
            deterministic: bool = False,
            score_mod: Callable[..., Any] | None = None,
            mask_mod: Callable[..., Any] | None = None,
            aux_tensors: list[torch.Tensor] | None = None,
            k_descale: torch.Tensor | None = None,
            v_descale: torch.Tensor | None = None,
            return_lse: bool = False,
            out: torch.Tensor | None = None,
        ) -> Any:
            self._record("flash_attn_varlen_func.4", locals())
            _require(page_table is None or cu_seqlens_k is None, "pages exclude prefix sums of keys")
            _require(learnable_sink is None or learnable_sink.dtype == torch.bfloat16, "sinks in bfloat16")
            _require_aligned(q, k, v)
            # The built-in options cut a mask short (P5.4).
            seen = Seen(causal, tuple(-1 if side is None else side for side in window_size), 0, mask_mod, aux_tensors)
            if page_table is not None:
                rows = _paged_rows(cu_seqlens_q, k, v, seqused_k, page_table, k_descale, v_descale)
            elif cu_seqlens_q is None or cu_seqlens_k is None:
                raise ValueError("this double takes rows of different lengths only")
            else:
                rows = fresh_rows(cu_seqlens_q, cu_seqlens_k, k, v)
            result, lse = attend(q, rows, softmax_scale, seen, softcap, sinks=learnable_sink, out=out)
            return result, lse if return_lse else None

        return flash_attn_varlen_func if self.with_out else _without_out(flash_attn_varlen_func)

    def _record(self, function: str, arguments: dict[str, Any]) -> None:
        named = {name: value for name, value in arguments.items() if name != "self"}
        _require(
            all(
                value.dtype == torch.int32 and value.is_contiguous()
                for name, value in named.items()
                if _is_lens(name, value)
            ),
            "lengths and offsets must be contiguous int32",
        )
        self.calls.append(Recorded(function, named))


@dataclass(slots=True)
class Seen:
    causal: bool
    window: tuple[int, ...]
    chunk: int = 0
    mask: Callable[..., Any] | None = None
    tensors: list[torch.Tensor] | None = None

    def matrix(self, row: int, offset: int, queries: int, keys: int) -> torch.Tensor:
        """bool [queries, keys]; the last query and the last key are aligned."""
        position = torch.arange(queries)[:, None] + keys - queries
        key = torch.arange(keys)[None]
        seen = key <= position if self.causal else torch.ones(queries, keys, dtype=torch.bool)
        left, right = self.window
        if left >= 0:
            seen = seen & (key >= position - left)
        if right >= 0:
            seen = seen & (key <= position + right)
        if self.chunk:
            seen = seen & (key // self.chunk == position // self.chunk)
        if self.mask is not None:
            seen = seen & self._masked(row, offset, queries, keys)
        return seen

    def _masked(self, row: int, offset: int, queries: int, keys: int) -> torch.Tensor:
        """One call per query, with that query's index in the chunk: a mask reads one lane of it."""
        assert self.mask is not None
        _require(getattr(self.mask, "__vec_size__", None) == 1, "a mask that loads bounds is pinned to one lane")
        lengths = SimpleNamespace(offset_q=offset, seqlen_q=queries, seqlen_k=keys)
        batch, head, key = torch.tensor([row]), torch.tensor([0]), torch.arange(keys)
        lines = [self.mask(batch, head, torch.tensor([i]), key, lengths, self.tensors) for i in range(queries)]
        return torch.stack(lines) if lines else torch.zeros(0, keys, dtype=torch.bool)


def attend(
    q: torch.Tensor,
    rows: list[KeyRow],
    scale: float | None,
    seen: Seen,
    softcap: float,
    *,
    slopes: torch.Tensor | None = None,
    sinks: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, D], NaN where no row is, and log-sum-exp [H, T], +inf where a query sees nothing."""
    dtype = q.dtype if q.dtype.itemsize > 1 else torch.bfloat16
    heads, size = q.shape[1], rows[0].values.shape[-1] if rows else q.shape[2]
    result = torch.full((q.shape[0], heads, size), torch.nan, dtype=dtype) if out is None else out
    lse = torch.full((heads, q.shape[0]), torch.nan)
    for row in rows:
        queries = q[row.tokens].double()
        group = heads // row.keys.shape[1]
        keys, values = (states.repeat_interleave(group, 1) for states in (row.keys, row.values))
        scores = torch.einsum("qhd,khd->hqk", queries, keys) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if softcap:
            scores = softcap * torch.tanh(scores / softcap)
        count = len(queries)
        if slopes is not None:
            distance = torch.arange(count)[:, None] + len(keys) - count - torch.arange(len(keys))
            scores = scores - slopes.double()[:, None, None] * distance.abs()
        visible = seen.matrix(row.number, row.tokens.start, count, len(keys))
        scores = scores.masked_fill(~visible, -torch.inf)
        total = torch.logsumexp(scores, -1) if len(keys) else torch.full((heads, count), -torch.inf).double()
        if sinks is not None:
            total = torch.logaddexp(total, sinks.double()[:, None].expand_as(total))
        weights = torch.exp(scores - total.unsqueeze(-1)).nan_to_num(0.0)
        result[row.tokens] = torch.einsum("hqk,khd->qhd", weights, values).to(dtype)
        lse[:, row.tokens] = torch.where(total == -torch.inf, torch.inf, total).float()
    return result, lse


def fresh_rows(cu_q: torch.Tensor, cu_k: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> list[KeyRow]:
    rows = []
    for row in range(len(cu_q) - 1):
        step = slice(int(cu_k[row]), int(cu_k[row + 1]))
        rows.append(KeyRow(row, slice(int(cu_q[row]), int(cu_q[row + 1])), k[step].double(), v[step].double()))
    return rows


def _paged_rows(
    cu_q: torch.Tensor | None,
    k: torch.Tensor,
    v: torch.Tensor,
    lens: torch.Tensor | None,
    table: torch.Tensor | None,
    k_descale: torch.Tensor | None = None,
    v_descale: torch.Tensor | None = None,
) -> list[KeyRow]:
    assert cu_q is not None
    assert lens is not None
    assert table is not None
    _require(table.shape[0] == len(cu_q) - 1 == len(lens), "as many rows in the table as there are queries and lengths")
    _require(table.stride(-1) == 1, "the table's columns are adjacent")
    rows = []
    for row in range(len(lens)):
        length = int(lens[row])
        pages = table[row, : -(-length // k.shape[1])].long()
        _require(len(pages) * k.shape[1] >= length, "the table has pages for all keys")
        keys, values = (cache[pages].double().flatten(0, 1)[:length] for cache in (k, v))
        if k_descale is not None:
            keys = keys * k_descale[row].double()[None, :, None]
        if v_descale is not None:
            values = values * v_descale[row].double()[None, :, None]
        rows.append(KeyRow(row, slice(int(cu_q[row]), int(cu_q[row + 1])), keys, values))
    return rows


def _act_on_schedule(schedule: torch.Tensor, batch: int, output: torch.Tensor) -> None:
    """A captured kernel reads its schedule to the end of the buffer: left-over entries overwrite output (P5.1)."""
    whole = torch.empty(0, dtype=torch.int32).set_(schedule.untyped_storage())
    for entry in whole[1:].tolist():
        if entry > batch:
            output[0] = STALE


def _require_aligned(*tensors: torch.Tensor) -> None:
    """Strides that a tensor memory accelerator would take: 16 bytes each, also those nobody follows (P5.3)."""
    for tensor in tensors:
        _require(tensor.stride(-1) == 1, "adjacent entries")
        strides = [stride * tensor.element_size() for stride in tensor.stride()[:-1]]
        _require(all(stride % 16 == 0 and stride > 0 for stride in strides), f"strides of 16 bytes, not {strides}")


def _require_descale(descale: torch.Tensor | None, table: torch.Tensor | None, k: torch.Tensor) -> None:
    assert table is not None
    _require(descale is None or descale.shape == (table.shape[0], k.shape[2]), "a scale per row and KV head")


def _is_lens(name: str, value: Any) -> bool:
    return isinstance(value, torch.Tensor) and name.startswith(("cu_seqlens", "seqused", "cache_seqlens"))


def _lane(value: Any, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor([int(value)], dtype=dtype)


def _without_out(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same without the parameter ``out``, also for those who look at the signature."""
    import functools
    import inspect

    @functools.wraps(function)
    def shorter(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    signature = inspect.signature(function)
    kept = [parameter for name, parameter in signature.parameters.items() if name != "out"]
    shorter.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return shorter


def _require(condition: bool, text: str) -> None:
    if not condition:
        raise ValueError(f"the FlashAttention double wants: {text}")

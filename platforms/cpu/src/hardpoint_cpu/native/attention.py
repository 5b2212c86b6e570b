"""Bindings of the attention kernels: the structures that they read, and calls that check tensors first.

Legend: T tokens, H query heads, K KV heads, D head size, R rows, B blocks, S tokens per block.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hardpoint_cpu.native.library import INT64, POINTER, NativeLibrary

__all__ = [
    "MAX_HEAD_SIZE",
    "STORED_DTYPES",
    "AttentionLayer",
    "AttentionRows",
    "AttentionTokens",
    "FreshKV",
    "KVCache",
    "LayerFacts",
    "RowFacts",
    "attention",
    "attention_fresh",
    "cache_view",
    "write_kv",
]

MAX_HEAD_SIZE = 256
UNBOUNDED = 2**63 - 1
STORED_DTYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


class KVCache(ctypes.Structure):
    """``hp::KVCache``. Strides count elements."""

    _fields_ = (
        ("data", POINTER),
        ("blocks", INT64),
        ("block_size", INT64),
        ("block_stride", INT64),
        ("head_stride", INT64),
        ("state_stride", INT64),
        ("stored", ctypes.c_int32),
    )


class AttentionLayer(ctypes.Structure):
    """``hp::AttentionLayer``."""

    _fields_ = (
        ("heads", INT64),
        ("kv_heads", INT64),
        ("head_size", INT64),
        ("window", INT64),
        ("alibi_slopes", POINTER),
        ("sinks", POINTER),
        ("scale", ctypes.c_float),
        ("soft_cap", ctypes.c_float),
        ("parts", ctypes.c_int32),
    )


class AttentionRows(ctypes.Structure):
    """``hp::AttentionRows``."""

    _fields_ = (
        ("query_start", POINTER),
        ("seq_lens", POINTER),
        ("block_table", POINTER),
        ("rows", INT64),
        ("table_columns", INT64),
        ("table_stride", INT64),
        ("causal", ctypes.c_int32),
    )


class AttentionTokens(ctypes.Structure):
    """``hp::AttentionTokens``."""

    _fields_ = (
        ("query", POINTER),
        ("output", POINTER),
        ("lse", POINTER),
        ("tokens", INT64),
        ("query_stride", INT64),
        ("output_stride", INT64),
    )


class FreshKV(ctypes.Structure):
    """``hp::FreshKV``."""

    _fields_ = (("key", POINTER), ("value", POINTER), ("key_stride", INT64), ("value_stride", INT64))


@dataclass(frozen=True, slots=True)
class LayerFacts:
    """A layer's fixed properties as kernels read them; keeps alive what ``struct`` points to."""

    struct: AttentionLayer
    slopes: torch.Tensor | None
    sinks: torch.Tensor | None

    @classmethod
    def make(
        cls,
        num_heads: int,
        num_kv_heads: int,
        head_size: int,
        scale: float,
        *,
        window: int | None = None,
        soft_cap: float | None = None,
        alibi_slopes: Sequence[float] | None = None,
        sinks: torch.Tensor | None = None,
        parts: int = 0,
    ) -> LayerFacts:
        """``sinks`` float32 [H] is read at every call. Raises ``ValueError`` for one of another kind.

        ``parts``: what matrix units that know bfloat16 only may take a float apart into for prompts. 3 keep all of it,
        1 only its first bits, and with 0 they are not used: a token's bits then depend on nothing beside it.
        """
        slopes = None if alibi_slopes is None else torch.tensor(list(alibi_slopes), dtype=torch.float32)
        for name, given in (("ALiBi slopes", slopes), ("sinks", sinks)):
            if given is not None:
                _demand(name, given, torch.float32, (num_heads,))
        struct = AttentionLayer(
            heads=num_heads,
            kv_heads=num_kv_heads,
            head_size=head_size,
            window=UNBOUNDED if window is None else window,
            alibi_slopes=None if slopes is None else slopes.data_ptr(),
            sinks=None if sinks is None else sinks.data_ptr(),
            scale=scale,
            soft_cap=math.inf if soft_cap is None else soft_cap,
            parts=parts,
        )
        return cls(struct, slopes, sinks)

    @property
    def address(self) -> int:
        """Of ``struct``, which then names where ``sinks`` lie now."""
        if self.sinks is not None:
            self.struct.sinks = self.sinks.data_ptr()
        return ctypes.addressof(self.struct)


@dataclass(frozen=True, slots=True)
class RowFacts:
    """The rows of a step as kernels read them; keeps alive what ``struct`` points to."""

    struct: AttentionRows
    query_start: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor | None

    @classmethod
    def make(
        cls,
        query_start: torch.Tensor,
        seq_lens: torch.Tensor,
        block_table: torch.Tensor | None,
        *,
        rows: int | None = None,
        causal: bool = True,
    ) -> RowFacts:
        """``query_start`` int32 [R + 1], ``seq_lens`` int32 [R], ``block_table`` int32 [R, B] or None for rows whose
        keys are the step's own; the first ``rows`` of them count. Raises ``ValueError`` for other tensors."""
        count = seq_lens.shape[0] if rows is None else rows
        _demand("query_start", query_start, torch.int32, (None,))
        _demand("seq_lens", seq_lens, torch.int32, (None,))
        if query_start.shape[0] <= count or seq_lens.shape[0] < count:
            raise ValueError(f"{count} rows need {count + 1} starts and {count} lengths, not {query_start.shape[0]}")
        if block_table is not None:
            _demand("block_table", block_table, torch.int32, (None, None))
            if block_table.shape[0] < count:
                raise ValueError(f"{count} rows need as many rows of block_table, not {block_table.shape[0]}")
        struct = AttentionRows(
            query_start=query_start.data_ptr(),
            seq_lens=seq_lens.data_ptr(),
            block_table=None if block_table is None else block_table.data_ptr(),
            rows=count,
            table_columns=0 if block_table is None else block_table.shape[1],
            table_stride=0 if block_table is None else _stride(block_table, block_table.shape[1]),
            causal=int(causal),
        )
        return cls(struct, query_start, seq_lens, block_table)

    @property
    def address(self) -> int:
        """Of ``struct``."""
        return ctypes.addressof(self.struct)


def cache_view(cache: torch.Tensor, num_kv_heads: int, head_size: int) -> KVCache:
    """``cache`` [B, K, S, 2 * D] with any strides but a contiguous last dimension, in one of ``STORED_DTYPES``.

    Raises ``ValueError`` for anything else. The caller keeps ``cache``.
    """
    sizes = (cache.shape[0], num_kv_heads, cache.shape[2], 2 * head_size) if cache.dim() == 4 else ()
    if cache.dtype not in STORED_DTYPES or tuple(cache.shape) != sizes or cache.device.type != "cpu":
        raise ValueError(
            f"a KV cache must be a float32, bfloat16 or float16 CPU tensor [blocks, {num_kv_heads}, block size, "
            f"{2 * head_size}], not {cache.dtype} {list(cache.shape)}"
        )
    if cache.stride(3) != 1:
        raise ValueError(f"a KV cache's content must be contiguous, not strides {cache.stride()}")
    return KVCache(
        data=cache.data_ptr(),
        blocks=cache.shape[0],
        block_size=cache.shape[2],
        block_stride=cache.stride(0),
        head_stride=cache.stride(1),
        state_stride=cache.stride(2),
        stored=STORED_DTYPES[cache.dtype],
    )


def attention(
    library: NativeLibrary,
    layer: LayerFacts,
    rows: RowFacts,
    cache: KVCache,
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of ``query`` float32 [T, H, D] into ``output`` likewise, and into ``lse`` float32 [T, H].

    Tokens may be any distance apart. Raises ``ValueError`` for what does not fit together.
    """
    run = library.function("hp_attention", POINTER, POINTER, POINTER, POINTER, POINTER)
    tokens = _tokens(layer, query, output, lse)
    library.check(run(library.runtime, layer.address, rows.address, _at(cache), _at(tokens)))


def attention_fresh(
    library: NativeLibrary,
    layer: LayerFacts,
    rows: RowFacts,
    key: torch.Tensor,
    value: torch.Tensor,
    query: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """The same over the step's own ``key`` and ``value`` float32 [T, K, D]; each row's length is its query's."""
    run = library.function("hp_attention_fresh", POINTER, POINTER, POINTER, POINTER, POINTER)
    tokens, fresh = _tokens(layer, query, output, lse), _fresh(layer, key, value)
    if key.shape[0] < query.shape[0] or value.shape[0] < query.shape[0]:
        raise ValueError(f"{query.shape[0]} queries have {key.shape[0]} keys and {value.shape[0]} values")
    library.check(run(library.runtime, layer.address, rows.address, _at(fresh), _at(tokens)))


def write_kv(
    library: NativeLibrary,
    layer: LayerFacts,
    key: torch.Tensor,
    value: torch.Tensor,
    slots: torch.Tensor,
    cache: KVCache,
) -> None:
    """Put the first N of ``key`` and ``value`` float32 [T, K, D] into ``slots`` int64 [N], negative ones skipped."""
    _demand("slots", slots, torch.int64, (None,))
    count = slots.shape[0]
    if key.shape[0] < count or value.shape[0] < count:
        raise ValueError(f"{count} slots have {key.shape[0]} keys and {value.shape[0]} values")
    run = library.function("hp_write_kv", POINTER, POINTER, POINTER, POINTER, INT64, POINTER)
    fresh = _fresh(layer, key, value)
    library.check(run(library.runtime, layer.address, _at(fresh), slots.data_ptr(), count, _at(cache)))


def _tokens(layer: LayerFacts, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None) -> AttentionTokens:
    heads, size = layer.struct.heads, layer.struct.head_size
    for name, tensor in (("query", query), ("output", output)):
        _demand_heads(name, tensor, heads, size)
    if output.shape[0] < query.shape[0]:
        raise ValueError(f"output has {output.shape[0]} tokens, query has {query.shape[0]}")
    if lse is not None:
        _demand("lse", lse, torch.float32, (query.shape[0], heads))
    return AttentionTokens(
        query=query.data_ptr(),
        output=output.data_ptr(),
        lse=None if lse is None else lse.data_ptr(),
        tokens=query.shape[0],
        query_stride=_stride(query, heads * size),
        output_stride=_stride(output, heads * size),
    )


def _fresh(layer: LayerFacts, key: torch.Tensor, value: torch.Tensor) -> FreshKV:
    heads, size = layer.struct.kv_heads, layer.struct.head_size
    for name, tensor in (("key", key), ("value", value)):
        _demand_heads(name, tensor, heads, size)
    return FreshKV(key.data_ptr(), value.data_ptr(), _stride(key, heads * size), _stride(value, heads * size))


def _at(struct: ctypes.Structure) -> int:
    return ctypes.addressof(struct)


def _stride(tensor: torch.Tensor, natural: int) -> int:
    # The stride of a dimension of size one means nothing.
    return tensor.stride(0) if tensor.shape[0] > 1 else natural


def _demand(name: str, tensor: torch.Tensor, dtype: torch.dtype, sizes: tuple[int | None, ...]) -> None:
    shape = tuple(tensor.shape)
    fits = len(shape) == len(sizes) and all(want in (None, size) for size, want in zip(shape, sizes, strict=True))
    if not fits or tensor.dtype is not dtype or tensor.device.type != "cpu":
        wanted = ", ".join("any" if size is None else str(size) for size in sizes)
        raise ValueError(f"{name} must be a {dtype} CPU tensor [{wanted}], not {tensor.dtype} {list(shape)}")
    if shape and shape[-1] > 1 and tensor.stride(-1) != 1:
        raise ValueError(f"{name} must have contiguous rows, not strides {tensor.stride()}")
    if len(sizes) == 2 and sizes[0] is not None and not tensor.is_contiguous():
        raise ValueError(f"{name} must be contiguous, not strides {tensor.stride()}")


def _demand_heads(name: str, tensor: torch.Tensor, heads: int, size: int) -> None:
    _demand(name, tensor, torch.float32, (None, heads, size))
    if heads > 1 and tensor.stride(1) != size:
        raise ValueError(f"heads of {name} must lie side by side, not strides {tensor.stride()}")

"""Random paged-attention problems and their float64 answer.

Legend: R rows, T tokens of the step, H query heads, K KV heads, D head size, V size of a head's values (D but for
latents), B block size, N cache blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionKind,
    AttentionLayerParams,
    AttentionNeed,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec, MLASpec
from hardpoint.interfaces.platform import DeviceDescription

__all__ = ["AttentionProblem", "AttentionShape", "dense_attention", "make_problem", "run_backend"]

LAYER = "layer"


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The layer's side of a problem. ``rows`` of the problem are (context, query) token counts.

    ``latent_values``: a latent layer (MLA); keys are all that is cached, and values their first ``latent_values``
    entries. It has one KV head.
    """

    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 4
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    uses_alibi: bool = False
    uses_sinks: bool = False
    causal: bool = True
    kind: AttentionKind = AttentionKind.DECODER
    dtype: torch.dtype = torch.float32
    latent_values: int | None = None

    @property
    def value_size(self) -> int:
        return self.head_size if self.latent_values is None else self.latent_values

    def need(self, device: DeviceDescription | None = None) -> AttentionNeed:
        """The same as a question to a backend."""
        name = str(self.dtype).removeprefix("torch.")
        return AttentionNeed(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=name,
            kv_cache_dtype=name,
            device=device or DeviceDescription(device_type="cpu", name="test"),
            block_size=self.block_size,
            kind=self.kind,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            uses_alibi=self.uses_alibi,
            uses_sinks=self.uses_sinks,
            uses_mla=self.latent_values is not None,
        )


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One step. ``key`` [T, K, D] and ``value`` [T, K, V] are the new tokens'; ``history`` holds what the cache must
    contain before: per row, keys and values, with ``context`` in place of T. Cache entries nobody owns are NaN."""

    shape: AttentionShape
    rows: tuple[tuple[int, int], ...]
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    history: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    block_table: torch.Tensor
    num_blocks: int
    alibi_slopes: tuple[float, ...] | None = None
    sinks: torch.Tensor | None = None
    num_padding: int = 0

    @property
    def num_tokens(self) -> int:
        return sum(query for _, query in self.rows)

    def params(self, name: str = LAYER) -> AttentionLayerParams:
        shape = self.shape
        return AttentionLayerParams(
            layer_name=name,
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            scale=shape.head_size**-0.5,
            kind=shape.kind,
            sliding_window=shape.sliding_window,
            logits_soft_cap=shape.logits_soft_cap,
            alibi_slopes=self.alibi_slopes,
            sinks=self.sinks,
        )

    def spec(self) -> FullAttentionSpec:
        shape = self.shape
        kind = FullAttentionSpec if shape.latent_values is None else MLASpec
        return kind(
            block_size=shape.block_size,
            num_kv_heads=shape.num_kv_heads,
            head_size=shape.head_size,
            dtype=str(shape.dtype).removeprefix("torch."),
            sliding_window=shape.sliding_window,
        )

    def slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        """int64 slots of the row's positions [begin, end)."""
        positions = torch.arange(begin, end)
        block_size = self.shape.block_size
        return self.block_table[row].long()[positions // block_size] * block_size + positions % block_size

    def slot_mapping(self) -> torch.Tensor:
        """int64 [T + padding], -1 for padding."""
        real = [self.slots(row, context, context + query) for row, (context, query) in enumerate(self.rows)]
        return torch.cat([*real, torch.full((self.num_padding,), -1)])

    def kv_cache(self) -> torch.Tensor:
        """[N, K, B, D + V], or [N, 1, B, D] of latents, with the history in place and NaN everywhere else."""
        shape = self.shape
        width = self.cached(self.key, self.value).shape[-1]
        size = (self.num_blocks, shape.num_kv_heads, shape.block_size, width)
        cache = torch.full(size, torch.nan, dtype=shape.dtype)
        for row, (keys, values) in enumerate(self.history):
            slots = self.slots(row, 0, keys.shape[0])
            states = self.cached(keys, values)
            cache.transpose(1, 2)[slots // shape.block_size, slots % shape.block_size] = states
        return cache

    def cached(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """What the cache holds of tokens."""
        return keys if self.shape.latent_values is not None else torch.cat((keys, values), dim=-1)

    def empty_output(self) -> torch.Tensor:
        """NaN [T, H, V], padding included."""
        return torch.full((*self.query.shape[:2], self.shape.value_size), torch.nan, dtype=self.query.dtype)

    def common(self) -> CommonAttentionMetadata:
        starts = np.concatenate(([0], np.cumsum([query for _, query in self.rows]))).astype(np.int32)
        seq_lens = np.array([context + query for context, query in self.rows], dtype=np.int32)
        return CommonAttentionMetadata(
            num_rows=len(self.rows),
            num_tokens=self.num_tokens,
            max_query_len=max((query for _, query in self.rows), default=0),
            max_seq_len=int(seq_lens.max(initial=0)),
            query_start_loc=torch.from_numpy(starts),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(seq_lens),
            seq_lens_cpu=seq_lens,
            block_table=self.block_table,
            slot_mapping=self.slot_mapping(),
            block_size=self.shape.block_size,
            causal=self.shape.causal,
        )

    def permuted(self, seed: int) -> AttentionProblem:
        """The same problem with other block ids."""
        generator = torch.Generator().manual_seed(seed)
        new_ids = torch.cat(
            (torch.zeros(1, dtype=torch.long), 1 + torch.randperm(self.num_blocks - 1, generator=generator))
        )
        return replace(self, block_table=new_ids[self.block_table.long()].int())

    def alone(self, row: int) -> AttentionProblem:
        """Only ``row`` of the problem, in the same blocks."""
        begin = sum(query for _, query in self.rows[:row])
        step = slice(begin, begin + self.rows[row][1])
        return replace(
            self,
            rows=self.rows[row : row + 1],
            query=self.query[step],
            key=self.key[step],
            value=self.value[step],
            history=self.history[row : row + 1],
            block_table=self.block_table[row : row + 1],
        )

    def padded(self, num_padding: int) -> AttentionProblem:
        """The same problem with NaN tokens behind the real ones (R5.48)."""

        def pad(values: torch.Tensor) -> torch.Tensor:
            real = values[: self.num_tokens]
            return torch.cat((real, torch.full((num_padding, *real.shape[1:]), torch.nan, dtype=real.dtype)))

        return replace(self, query=pad(self.query), key=pad(self.key), value=pad(self.value), num_padding=num_padding)


@dataclass(slots=True)
class _Source:
    generator: torch.Generator
    dtype: torch.dtype
    shape: tuple[int, ...] = field(default=())

    def normal(self, *size: int) -> torch.Tensor:
        return torch.randn(*size, generator=self.generator).to(self.dtype)

    def keys_values(self, shape: AttentionShape, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys = self.normal(tokens, shape.num_kv_heads, shape.head_size)
        if shape.latent_values is not None:
            return keys, keys[..., : shape.latent_values]
        return keys, self.normal(tokens, shape.num_kv_heads, shape.head_size)


def make_problem(
    shape: AttentionShape, rows: Sequence[tuple[int, int]], seed: int = 0, spare_blocks: int = 3
) -> AttentionProblem:
    """Random problem with (context, query) token counts ``rows`` and shuffled block ids; block 0 stays unowned."""
    generator = torch.Generator().manual_seed(seed)
    source = _Source(generator, shape.dtype)
    blocks_per_row = [-(-(context + query) // shape.block_size) for context, query in rows]
    num_blocks = 1 + sum(blocks_per_row) + spare_blocks
    ids = 1 + torch.randperm(num_blocks - 1, generator=generator)
    table = torch.zeros(len(rows), max(blocks_per_row, default=0) + 1, dtype=torch.int32)
    used = 0
    for row, count in enumerate(blocks_per_row):
        table[row, :count] = ids[used : used + count].int()
        used += count
    tokens = sum(query for _, query in rows)
    history = tuple(source.keys_values(shape, context) for context, _ in rows)
    slopes = tuple(2.0 ** -(1 + head) for head in range(shape.num_heads)) if shape.uses_alibi else None
    query = source.normal(tokens, shape.num_heads, shape.head_size)
    key, value = source.keys_values(shape, tokens)
    return AttentionProblem(
        shape=shape,
        rows=tuple(rows),
        query=query,
        key=key,
        value=value,
        history=history,
        block_table=table,
        num_blocks=num_blocks,
        alibi_slopes=slopes,
        sinks=torch.randn(shape.num_heads, generator=generator) if shape.uses_sinks else None,
    )


def dense_attention(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """The answer in float64: output [T, H, V] and log-sum-exp [T, H]. One row, one mask at a time; no paging."""
    outputs, lses = [], []
    begin = 0
    for (context, length), (old_keys, old_values) in zip(problem.rows, problem.history, strict=True):
        step = slice(begin, begin + length)
        begin += length
        keys = torch.cat((old_keys, problem.key[step])).double()
        values = torch.cat((old_values, problem.value[step])).double()
        output, lse = _dense_row(problem, problem.query[step].double(), keys, values, context)
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs), torch.cat(lses)


def _dense_row(
    problem: AttentionProblem, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, context: int
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = problem.shape
    group = shape.num_heads // shape.num_kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * shape.head_size**-0.5
    if shape.logits_soft_cap is not None:
        scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
    query_positions = torch.arange(context, context + query.shape[0])[:, None]
    distance = query_positions - torch.arange(keys.shape[0])[None, :]
    if problem.alibi_slopes is not None:
        scores = scores - torch.tensor(problem.alibi_slopes, dtype=torch.float64)[:, None, None] * distance
    hidden = torch.zeros_like(distance, dtype=torch.bool)
    if shape.causal:
        hidden |= distance < 0
    if shape.sliding_window is not None:
        hidden |= distance.abs() >= shape.sliding_window
    scores = scores.masked_fill(hidden, -torch.inf)
    if problem.sinks is not None:
        sink = problem.sinks.double()[:, None, None].expand(-1, query.shape[0], 1)
        weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
        lse = torch.logsumexp(torch.cat((scores, sink), dim=-1), dim=-1)
    else:
        weights, lse = torch.softmax(scores, dim=-1), torch.logsumexp(scores, dim=-1)
    return torch.einsum("hqk,khd->qhd", weights, values), lse.transpose(0, 1)


def run_backend(
    backend: AttentionBackend, problem: AttentionProblem, cache: torch.Tensor | None = None
) -> torch.Tensor:
    """What ``backend`` makes of the problem: cache write, metadata, forward. Output [T, H, V] without padding."""
    common = problem.common()
    impl = backend.create_impl(problem.params())
    tokens = problem.query.shape[0]
    builder = backend.create_builder(problem.spec(), [LAYER], len(problem.rows), tokens, problem.query.device)
    if problem.shape.kind is AttentionKind.DECODER:
        cache = problem.kv_cache() if cache is None else cache
        if backend.kv_write_mode.value == "separate":
            impl.write_kv(problem.key, problem.value, cache, common.slot_mapping)
    output = problem.empty_output()
    impl.forward(problem.query, problem.key, problem.value, cache, builder.build(common), output)
    return output[: problem.num_tokens]

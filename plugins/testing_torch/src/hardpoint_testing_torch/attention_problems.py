"""Random paged-attention problems. ``attention_oracle`` has their answer, ``attention_storage`` how caches keep them.

Legend: R rows, T tokens of the step, E keys of the step (T but for cross-attention), H query heads, K KV heads, D head
size, V size of a head's values (D but for latents), B block size, N cache blocks, W elements of a cache entry, C keys
selected for a query.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.kv_cache_specs import AttentionSpec, CrossAttentionSpec, FullAttentionSpec, MLASpec
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_storage import StoredStates
from hardpoint_torch_runtime.layers import SelectedKeysImpl

__all__ = ["LAYER", "AttentionProblem", "AttentionShape", "make_problem", "run_backend", "run_impl"]

LAYER = "layer"


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """One step. ``key`` [E, K, D] and ``value`` [E, K, V] are the new tokens'; ``history`` holds what the cache must
    contain before: per row, keys and values, with their number in place of E. All are real values, also where the cache
    keeps them quantized. Cache entries nobody owns are NaN.

    ``encoder_rows``: in cross-attention, numbers of encoder tokens per row, in the cache and of this step.
    ``num_padding`` tokens and ``num_padding_rows`` rows follow on the real ones. ``selected``: int32 [T, C], as
    :class:`~hardpoint_torch_runtime.layers.SelectedKeysImpl` takes it.
    """

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
    encoder_rows: tuple[tuple[int, int], ...] | None = None
    mm_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    prompt_lens: tuple[int, ...] | None = None
    row_causal: tuple[bool, ...] | None = None
    key_scale: torch.Tensor | None = None
    value_scale: torch.Tensor | None = None
    relative_bias: torch.Tensor | None = None
    num_padding_rows: int = 0
    num_common_prefix_blocks: int = 0
    selected: torch.Tensor | None = None

    @property
    def num_tokens(self) -> int:
        return sum(query for _, query in self.rows)

    @property
    def key_rows(self) -> tuple[tuple[int, int], ...]:
        """Keys per row: those before this step, and those of this step."""
        return self.rows if self.encoder_rows is None else self.encoder_rows

    @property
    def row_causality(self) -> tuple[bool, ...]:
        is_causal = self.shape.causal and self.shape.kind is not AttentionKind.ENCODER_DECODER
        return (is_causal,) * len(self.rows) if self.row_causal is None else self.row_causal

    @property
    def stored(self) -> StoredStates:
        """How the cache keeps keys and values."""
        shape = self.shape
        return StoredStates(shape.stored_as, _on_cpu(self.key_scale), _on_cpu(self.value_scale), shape.latent_values)

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
            chunk_size=shape.chunk_size,
            keeps_prompt=shape.keeps_prompt,
            key_scale=self.key_scale,
            value_scale=self.value_scale,
            relative_bias=self.relative_bias,
        )

    def spec(self) -> AttentionSpec:
        shape, storage = self.shape, self.stored.storage
        stated: dict[str, Any] = {
            "block_size": shape.block_size,
            "num_kv_heads": shape.num_kv_heads,
            "head_size": shape.head_size,
            "dtype": storage.dtype,
            "quantization": storage.quantization,
            "scale_bytes": storage.scale_bytes,
        }
        if shape.kind is AttentionKind.ENCODER_DECODER:
            return CrossAttentionSpec(**stated, max_encoder_tokens=max(map(sum, self.key_rows)))
        kind = FullAttentionSpec if shape.latent_values is None else MLASpec
        return kind(**stated, sliding_window=shape.sliding_window, chunk_size=shape.chunk_size)

    def slots(self, row: int, begin: int, end: int) -> torch.Tensor:
        """int64 slots of the row's key positions [begin, end), on the CPU."""
        positions = torch.arange(begin, end)
        block_size = self.shape.block_size
        return self.block_table[row].cpu().long()[positions // block_size] * block_size + positions % block_size

    def slot_mapping(self) -> torch.Tensor:
        """int64 [E + padding], -1 for padding."""
        real = [self.slots(row, before, before + new) for row, (before, new) in enumerate(self.key_rows)]
        return torch.cat([*real, torch.full((self.num_padding,), -1)]).to(self.query.device)

    def kv_cache(self) -> torch.Tensor:
        """[N, K, B, W] as it is stored, with the history in place and NaN everywhere else."""
        shape, stored = self.shape, self.stored
        cache = stored.empty(self.num_blocks, shape.num_kv_heads, shape.block_size, shape.head_size)
        # Torch does not scatter all dtypes of one byte; their bytes it does.
        places = _as_bytes(cache).transpose(1, 2)
        for row, (keys, values) in enumerate(self.history):
            slots = self.slots(row, 0, keys.shape[0])
            states = _as_bytes(stored.encode(keys.cpu(), values.cpu()))
            places[slots // shape.block_size, slots % shape.block_size] = states
        return cache.to(self.query.device)

    def visible_states(self, row: int, step: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """Float64 keys and values of ``row``, with ``step`` of the step's: what the cache makes of them, if any."""
        old_keys, old_values = self.history[row]
        keys, values = torch.cat((old_keys, self.key[step])), torch.cat((old_values, self.value[step]))
        if self.shape.has_cache and not (self.stored.is_exact and self.shape.kv_cache_dtype is None):
            keys, values = self.stored.round_trip(keys, values)
        return keys.double(), values.double()

    def empty_output(self) -> torch.Tensor:
        """NaN [T, H, V], padding included."""
        return torch.full_like(self.query[..., :1], torch.nan).repeat(1, 1, self.shape.value_size)

    def common(self) -> CommonAttentionMetadata:
        device, padding = self.query.device, self.num_padding_rows
        lengths = [query for _, query in self.rows] + [0] * padding
        starts = np.concatenate(([0], np.cumsum(lengths))).astype(np.int32)
        seq_lens = np.array([*map(sum, self.key_rows), *[0] * padding], dtype=np.int32)
        row_causal = None if self.row_causal is None else np.array([*self.row_causal, *[True] * padding])
        prompts = None if self.prompt_lens is None else np.array([*self.prompt_lens, *[0] * padding], dtype=np.int32)
        causal = all(self.row_causality) if row_causal is None else torch.from_numpy(row_causal).to(device)
        return CommonAttentionMetadata(
            num_rows=len(self.rows),
            num_tokens=self.num_tokens,
            max_query_len=max(lengths, default=0),
            max_seq_len=int(seq_lens.max(initial=0)),
            query_start_loc=torch.from_numpy(starts).to(device),
            query_start_loc_cpu=starts,
            seq_lens=torch.from_numpy(seq_lens).to(device),
            seq_lens_cpu=seq_lens,
            block_table=torch.nn.functional.pad(self.block_table, (0, 0, 0, padding)),
            slot_mapping=self.slot_mapping(),
            block_size=self.shape.block_size,
            causal=causal,
            num_common_prefix_blocks=self.num_common_prefix_blocks,
            row_causal_cpu=row_causal,
            mm_ranges=self.mm_ranges,
            prompt_lens=None if prompts is None else torch.from_numpy(prompts).to(device),
            prompt_lens_cpu=prompts,
        )

    def to(self, device: torch.device | str) -> AttentionProblem:
        """The same problem with its tensors on ``device``."""
        values = {each.name: getattr(self, each.name) for each in fields(self)}
        tensors: dict[str, Any] = {
            name: value.to(device) for name, value in values.items() if isinstance(value, torch.Tensor)
        }
        history = tuple((keys.to(device), values.to(device)) for keys, values in self.history)
        return replace(self, history=history, **tensors)

    def permuted(self, seed: int) -> AttentionProblem:
        """The same problem with other block ids."""
        generator = torch.Generator().manual_seed(seed)
        new_ids = torch.cat(
            (torch.zeros(1, dtype=torch.long), 1 + torch.randperm(self.num_blocks - 1, generator=generator))
        )
        return replace(self, block_table=new_ids.to(self.block_table.device)[self.block_table.long()].int())

    def alone(self, row: int) -> AttentionProblem:
        """Only ``row`` of the problem, in the same blocks."""
        return self.picked((row,))

    def picked(self, order: Sequence[int]) -> AttentionProblem:
        """The rows of these numbers, in this order and in the same blocks; without padding."""
        ends = np.cumsum([query for _, query in self.rows])
        key_ends = np.cumsum([new for _, new in self.key_rows])
        queries = torch.cat([torch.arange(ends[row] - self.rows[row][1], ends[row]) for row in order])
        keys = torch.cat([torch.arange(key_ends[row] - self.key_rows[row][1], key_ends[row]) for row in order])
        by_row = ("rows", "history", "encoder_rows", "mm_ranges", "prompt_lens", "row_causal")
        values = {name: getattr(self, name) for name in by_row}
        chosen: dict[str, Any] = {
            name: tuple(value[row] for row in order) for name, value in values.items() if value is not None
        }
        return replace(
            self,
            query=self.query[queries],
            key=self.key[keys],
            value=self.value[keys],
            selected=None if self.selected is None else self.selected[queries],
            block_table=self.block_table[list(order)],
            num_padding=0,
            num_padding_rows=0,
            **chosen,
        )

    def padded(self, num_padding: int, num_rows: int = 0) -> AttentionProblem:
        """The same problem with NaN tokens behind the real ones, and empty rows of the null block (R5.48)."""
        num_keys = sum(new for _, new in self.key_rows)

        def pad(values: torch.Tensor, length: int) -> torch.Tensor:
            real = values[:length]
            filler = torch.nan if real.is_floating_point() else torch.iinfo(real.dtype).max
            return torch.cat((real, real.new_full((num_padding, *real.shape[1:]), filler)))

        return replace(
            self,
            query=pad(self.query, self.num_tokens),
            key=pad(self.key, num_keys),
            value=pad(self.value, num_keys),
            selected=None if self.selected is None else pad(self.selected, self.num_tokens),
            num_padding=num_padding,
            num_padding_rows=num_rows,
        )


def make_problem(
    shape: AttentionShape,
    rows: Sequence[tuple[int, int]],
    seed: int = 0,
    spare_blocks: int = 3,
    encoder_rows: Sequence[tuple[int, int]] | None = None,
) -> AttentionProblem:
    """Random problem with (context, query) token counts ``rows`` and shuffled block ids; block 0 stays unowned.

    Cross-attention: ``encoder_rows`` are (before, of this step) numbers of encoder tokens; by default they come with a
    row's first queries.
    """
    generator = torch.Generator().manual_seed(seed)
    if shape.kind is AttentionKind.ENCODER_DECODER and encoder_rows is None:
        encoder_rows = [(2 + 5 * row, 0) if context else (0, 3 + 4 * row) for row, (context, _) in enumerate(rows)]
    key_rows = rows if encoder_rows is None else encoder_rows

    def states(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        size = (tokens, shape.num_kv_heads, shape.head_size)
        keys = torch.randn(size, generator=generator).to(shape.dtype)
        if shape.latent_values is not None:
            return keys, keys[..., : shape.latent_values]
        return keys, torch.randn(size, generator=generator).to(shape.dtype)

    table, num_blocks = _shuffled_table([-(-sum(row) // shape.block_size) for row in key_rows], spare_blocks, generator)
    history = tuple(states(before) for before, _ in key_rows)
    tokens = sum(query for _, query in rows)
    query = torch.randn(tokens, shape.num_heads, shape.head_size, generator=generator).to(shape.dtype)
    key, value = states(sum(new for _, new in key_rows))
    scales = _scales(shape)
    return AttentionProblem(
        shape=shape,
        rows=tuple(rows),
        query=query,
        key=key,
        value=value,
        history=history,
        block_table=table,
        num_blocks=num_blocks,
        alibi_slopes=tuple(2.0 ** -(1 + head) for head in range(shape.num_heads)) if shape.uses_alibi else None,
        sinks=torch.randn(shape.num_heads, generator=generator) if shape.uses_sinks else None,
        encoder_rows=None if encoder_rows is None else tuple(encoder_rows),
        mm_ranges=tuple(_ranges(row, *counts) for row, counts in enumerate(rows)) if shape.uses_mm_prefix else None,
        prompt_lens=tuple(_prompt_len(row, *counts) for row, counts in enumerate(rows)) if shape.keeps_prompt else None,
        row_causal=tuple(row % 2 == 0 for row in range(len(rows))) if shape.uses_row_causality else None,
        key_scale=scales[0],
        value_scale=scales[1],
        relative_bias=_bias(shape, generator),
        selected=_selection(rows, generator) if shape.uses_sparse else None,
    )


def _bias(shape: AttentionShape, generator: torch.Generator) -> torch.Tensor | None:
    """Fewer distances than rows are long, so that the last one stands for several."""
    if not shape.uses_relative_bias:
        return None
    return torch.randn(shape.num_heads, 7, generator=generator)


def _shuffled_table(
    blocks_per_row: Sequence[int], spare_blocks: int, generator: torch.Generator
) -> tuple[torch.Tensor, int]:
    """Block table int32 [R, most blocks + 1], and how many blocks there are."""
    num_blocks = 1 + sum(blocks_per_row) + spare_blocks
    ids = 1 + torch.randperm(num_blocks - 1, generator=generator)
    table = torch.zeros(len(blocks_per_row), max(blocks_per_row, default=0) + 1, dtype=torch.int32)
    used = 0
    for row, count in enumerate(blocks_per_row):
        table[row, :count] = ids[used : used + count].int()
        used += count
    return table, num_blocks


def _selection(rows: Sequence[tuple[int, int]], generator: torch.Generator, count: int = 5) -> torch.Tensor:
    """int32 [T, count]: of each query's row some positions, later ones than its own among them; -1 where a row has
    fewer tokens."""
    selected = torch.full((sum(query for _, query in rows), count), -1, dtype=torch.int32)
    lengths = [context + query for context, query in rows for _ in range(query)]
    for places, length in zip(selected, lengths, strict=True):
        chosen = torch.randperm(length, generator=generator)[:count]
        places[: len(chosen)] = chosen.int()
    return selected


def _ranges(row: int, context: int, query: int) -> tuple[tuple[int, int], ...]:
    """One range that begins before the step's queries, if it can, and one that ends behind them; none in a few rows."""
    if row % 3 == 2:
        return ()
    begin, end = max(context - 3, 0), context + min(2, query)
    return ((begin, end), (end + 1, context + query + 4)) if query > 4 else ((begin, end),)


def _prompt_len(row: int, context: int, query: int) -> int:
    """Prompts that end at once, within the context, or behind the queries."""
    return (1 + context // 3, max(context - 1, 1), context + query + 1)[row % 3]


def _scales(shape: AttentionShape) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Other scales for keys than for values, and no powers of two; none where states are stored as they are."""
    stored = StoredStates(shape.stored_as)
    if stored.is_exact or stored.storage.scale_bytes:
        return None, None
    heads = torch.arange(shape.num_kv_heads if shape.per_head_scales else 1)
    return 0.03 * (heads + 1), 0.07 / (heads + 1)


def _as_bytes(states: torch.Tensor) -> torch.Tensor:
    return states.view(torch.uint8) if states.dtype.itemsize == 1 else states


def _on_cpu(scale: torch.Tensor | None) -> torch.Tensor | None:
    return None if scale is None else scale.cpu()


def run_backend(
    backend: AttentionBackend, problem: AttentionProblem, cache: torch.Tensor | None = None
) -> torch.Tensor:
    """What ``backend`` makes of the problem: cache write, metadata, forward. Output [T, H, V] without padding."""
    common = problem.common()
    impl = backend.create_impl(problem.params())
    tokens, rows = problem.query.shape[0], len(problem.rows) + problem.num_padding_rows
    builder = backend.create_builder(problem.spec(), [LAYER], rows, tokens, problem.query.device)
    if problem.shape.has_cache:
        cache = problem.kv_cache() if cache is None else cache
        if backend.kv_write_mode.value == "separate":
            impl.write_kv(problem.key, problem.value, cache, common.slot_mapping)
    output = problem.empty_output()
    run_impl(impl, problem, cache, builder.build(common), output)
    return output[: problem.num_tokens]


def run_impl(
    impl: AttentionImpl, problem: AttentionProblem, cache: torch.Tensor | None, metadata: Any, output: torch.Tensor
) -> torch.Tensor:
    """The forward of the problem's layer, that with a selection of keys where it has one.

    Raises ``AssertionError`` for a computation that has no such forward, although its backend accepted the need.
    """
    states = problem.query, problem.key, problem.value
    if problem.selected is None:
        return impl.forward(*states, cache, metadata, output)
    assert isinstance(impl, SelectedKeysImpl), (
        f"uses_sparse is accepted, but {type(impl).__name__} has no forward_selected"
    )
    return impl.forward_selected(*states, cache, metadata, problem.selected, output)

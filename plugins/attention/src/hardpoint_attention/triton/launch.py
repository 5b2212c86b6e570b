"""From tensors to kernel arguments. Importing this module imports Triton.

Legend: T tokens of the step, R rows, H query heads, K KV heads, D head size, V of values, S splits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from hardpoint_attention.triton.configs import INTERPRETED_TOKENS, WRITE_TOKENS, TileConfig, next_power_of_two
from hardpoint_attention.triton.kernels.attention import attend
from hardpoint_attention.triton.kernels.cache_write import write_states
from hardpoint_attention.triton.kernels.partials import LN_2, combine_parts, merge_pair

__all__ = ["LN2", "AttendCall", "RowTensors", "combine", "merge_partials", "run_attend", "strided", "write"]

LN2 = LN_2.value
IS_INTERPRETED = not isinstance(attend, triton.JITFunction)
"""Kernels of this process run on the CPU, wherever tensors lie."""
_COMPUTE = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def strided(tensor: torch.Tensor | None) -> tuple[Any, ...] | None:
    """A tensor as kernels take it."""
    return None if tensor is None else (tensor, *tensor.stride())


@dataclass(frozen=True, slots=True)
class RowTensors:
    """Rows as the kernel reads them: see ``attend``. ``num_tokens``: of all their queries."""

    num_rows: int
    num_tokens: int
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    key_starts: torch.Tensor

    def arguments(self) -> tuple[Any, ...]:
        return self.starts, self.lengths, self.table, self.table.stride(0), self.key_starts


@dataclass(frozen=True, slots=True)
class AttendCall:
    """Everything about a call but the query and where the answer goes.

    Attributes:
        keys, values: [blocks, K, B, D] with ``block_size`` B, or [K, T, D] with block size 0. ``values`` None: the
            first entries of the keys.
        token_scales: float32 [blocks, K, B, 2] or None.
        key_scale, value_scale: float32 [1] or [K], or None.
        masks: causality by row, prompt lengths, range starts and ranges, or None each.
        causal: 0, 1, or 2 where rows differ.
        shaping: factor of products, soft cap, slopes and sinks, or None.
        value_size: V.
        key_begin: keys before it are not looked at.
    """

    rows: RowTensors
    keys: torch.Tensor
    values: torch.Tensor | None
    token_scales: torch.Tensor | None
    key_scale: torch.Tensor | None
    value_scale: torch.Tensor | None
    masks: tuple[torch.Tensor | None, ...]
    shaping: tuple[Any, ...]
    block_size: int
    value_size: int
    causal: int
    window: int
    chunk: int
    keeps_prompt: bool
    tiles: TileConfig
    splits: int = 1
    key_begin: int = 0


def run_attend(query: torch.Tensor, call: AttendCall, output: torch.Tensor, lse: tuple[Any, ...] | None) -> None:
    """``query`` [T, H, D] to ``output`` [T, H, S, V]. ``lse``: None, or a tensor [T, H, S], its strides and the factor
    for base-2 logarithms."""
    _, num_heads, size = query.shape
    num_kv_heads = call.keys.shape[-3]
    group = num_heads // num_kv_heads
    heads = min(group, call.tiles.block_m)
    block_q = call.tiles.block_m // heads
    blocks = call.rows.num_tokens // block_q + call.rows.num_rows
    is_latent = call.values is None
    rest = size - call.value_size if is_latent else 0
    grid = (blocks, num_kv_heads * -(-group // heads), call.splits)
    attend[grid](
        strided(query),
        (_places(call.keys), _places(call.values), strided(call.token_scales)),
        strided(output),
        lse,
        call.rows.arguments(),
        call.masks,
        call.shaping,
        (_by_head(call.key_scale), _by_head(call.value_scale)),
        call.rows.num_rows,
        call.key_begin,
        GROUP=group,
        HEADS=heads,
        SIZE=size,
        VALUES=call.value_size,
        PAD=next_power_of_two(call.value_size),
        # Latents without a rest would look like keys with values apart.
        REST=next_power_of_two(rest) if is_latent else 0,
        BLOCK_SIZE=call.block_size,
        CAUSAL=call.causal,
        WINDOW=call.window,
        CHUNK=call.chunk,
        KEEPS_PROMPT=call.keeps_prompt,
        HAS_RANGES=call.masks[3] is not None,
        SPLITS=call.splits,
        BLOCK_M=call.tiles.block_m,
        TILE=call.tiles.tile,
        COMPUTE=_compute(query),
        num_warps=call.tiles.num_warps,
        num_stages=call.tiles.num_stages,
    )


def _compute(query: torch.Tensor) -> Any:
    """The dtype of products. The interpreter cannot calculate in bfloat16, so there it is float32 always."""
    return tl.float32 if IS_INTERPRETED else _COMPUTE[query.dtype]


def _places(states: torch.Tensor | None) -> tuple[Any, ...] | None:
    """[blocks, K, B, D], or given states [K, T, D] with a stride of blocks that is never used."""
    if states is None:
        return None
    strides = states.stride()
    return (states, *strides) if len(strides) == 4 else (states, 0, *strides)


def _by_head(scale: torch.Tensor | None) -> tuple[Any, int] | None:
    """A pointer and its stride over heads; one scale serves all by a stride of 0 (R5.43)."""
    if scale is None:
        return None
    return scale, 0 if scale.numel() == 1 else scale.stride(0)


def combine(parts: torch.Tensor, part_lse: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None) -> None:
    """Parts [T, H, S, V] with base-2 log-sum-exps [T, H, S] to ``output`` [T, H, V] and natural ``lse`` [T, H]."""
    num_tokens, num_heads, splits, size = parts.shape
    combine_parts[(num_tokens, num_heads)](
        *(strided(parts), strided(part_lse), strided(output), strided(lse)),
        SIZE=size,
        PAD=next_power_of_two(size),
        SPLITS=splits,
    )


def merge_partials(
    left: torch.Tensor,
    left_lse: torch.Tensor,
    right: torch.Tensor,
    right_lse: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention over two sets of keys from that over each: outputs [T, H, V], natural log-sum-exps float32 [T, H].

    ``lse`` takes the log-sum-exp over both. Returns ``output``, which may be one of the inputs.
    """
    num_tokens, num_heads, size = output.shape
    if num_tokens:
        merge_pair[(num_tokens, num_heads)](
            *(strided(left), strided(left_lse), strided(right), strided(right_lse), strided(output), strided(lse)),
            SIZE=size,
            PAD=next_power_of_two(size),
        )
    return output


_MANTISSAS = {torch.float8_e4m3fn: 3, torch.float8_e5m2: 2}
"""Bits of the fractions of 8-bit floats."""


def write(
    key: torch.Tensor,
    value: torch.Tensor | None,
    cache: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
    *,
    scales: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None),
    token_scales: torch.Tensor | None = None,
    limit: float | None = None,
) -> None:
    """Scatter ``key`` and ``value`` [T, K, D] into ``cache``, views [blocks, K, B, D]. The number of ``slots`` counts.

    ``scales``: by tensor or head. ``token_scales``: float32 [blocks, K, B, 2], filled here. ``limit``: largest
    magnitude that the cache's elements hold. A cache of uint8 takes codes of float8_e4m3fn.
    """
    if not slots.numel():
        return
    size, mantissa = key.shape[-1], 0
    if cache[0].dtype is torch.uint8:
        mantissa = _MANTISSAS[torch.float8_e4m3fn]
    elif IS_INTERPRETED and cache[0].dtype in _MANTISSAS:
        # The interpreter casts to 8 bits without rounding, or without its carry.
        mantissa = _MANTISSAS[cache[0].dtype]
        cache = (cache[0].view(torch.uint8), cache[1].view(torch.uint8))
    tokens = INTERPRETED_TOKENS if IS_INTERPRETED else WRITE_TOKENS
    write_states[(triton.cdiv(slots.shape[0], tokens), key.shape[1])](
        *(strided(key), strided(value), strided(cache[0]), strided(cache[1]), strided(slots)),
        *(_by_head(scales[0]), _by_head(scales[1]), strided(token_scales), limit, slots.shape[0]),
        TOKENS=tokens,
        SIZE=size,
        PAD=triton.next_power_of_2(size),
        BLOCK_SIZE=cache[0].shape[2],
        MANTISSA=mantissa,
    )

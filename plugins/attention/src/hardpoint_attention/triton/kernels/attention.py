"""Attention of a mixed batch of prefills and decodes over paged or given keys, one program per block of queries and
KV head, and per part of the keys where these are split.

Tiles: BLOCK_M lanes hold all heads of a KV head for BLOCK_M / HEADS queries, so that keys and values are read once for
all of them. TILE keys are read at once, from as many blocks of the cache as they lie in.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint_attention.triton.kernels.scores import finish, shape_scores, start_softmax, update_softmax
from hardpoint_attention.triton.kernels.visibility import find_row, is_visible, key_bounds
from hardpoint_torch_runtime.float8_kernels import decode_e4m3

__all__ = ["attend"]


@triton.jit
def _places(
    states: tl.tensor,
    position: tl.tensor,
    is_read: tl.tensor,
    kv_head: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """64-bit offsets [N] of the states at ``position``: [blocks, K, B, D] by table, or [K, T, D] from a start."""
    if BLOCK_SIZE == 0:
        token = tl.load(rows[4] + row).to(tl.int64) + position
        return token * states[3] + kv_head.to(tl.int64) * states[2]
    entry = rows[2] + row.to(tl.int64) * rows[3] + position // BLOCK_SIZE
    block = tl.load(entry, mask=is_read, other=0).to(tl.int64)
    return block * states[1] + kv_head.to(tl.int64) * states[2] + (position % BLOCK_SIZE).to(tl.int64) * states[3]


@triton.jit
def _queries(
    query: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    in_use: tl.tensor,
    begin: tl.constexpr,
    end: tl.constexpr,
    PAD: tl.constexpr,
) -> tl.tensor:
    """[M, PAD] of entries from ``begin`` to ``end``."""
    entry = begin + tl.arange(0, PAD)
    place = token.to(tl.int64) * query[1] + head.to(tl.int64) * query[2]
    mask = in_use[:, None] & (entry < end)[None, :]
    return tl.load(query[0] + place[:, None] + (entry * query[3])[None, :], mask=mask, other=0.0)


@triton.jit
def _states(
    states: tl.tensor, place: tl.tensor, is_read: tl.tensor, begin: tl.constexpr, end: tl.constexpr, PAD: tl.constexpr
) -> tl.tensor:
    """[N, PAD] of entries from ``begin`` to ``end``; zero beyond, where memory may hold anything. Bytes are codes of
    float8_e4m3fn."""
    entry = begin + tl.arange(0, PAD)
    mask = is_read[:, None] & (entry < end)[None, :]
    values = tl.load(states[0] + place[:, None] + (entry * states[4])[None, :], mask=mask, other=0.0)
    if states[0].dtype.element_ty == tl.uint8:
        values = decode_e4m3(values)
    return values


@triton.jit
def _multiply(left: tl.tensor, right: tl.tensor, COMPUTE: tl.constexpr) -> tl.tensor:
    return tl.dot(left.to(COMPUTE), right.to(COMPUTE), input_precision="ieee")


@triton.jit
def _lanes(
    begin: tl.tensor, count: tl.tensor, GROUP: tl.constexpr, HEADS: tl.constexpr, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """The program's KV head; and of its lanes [M] the query's number in its row, the head, whether there is such a
    head, and whether there is such a query as well."""
    HEAD_BLOCKS: tl.constexpr = (GROUP + HEADS - 1) // HEADS
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    lane = tl.arange(0, BLOCK_M)
    member = tl.program_id(1) % HEAD_BLOCKS * HEADS + lane % HEADS
    index = begin + lane // HEADS
    in_use = (member < GROUP) & (index < count) & (lane < BLOCK_M // HEADS * HEADS)
    return kv_head, index, kv_head * GROUP + member, member < GROUP, in_use


@triton.jit
def _block(rows: tl.tensor, num_rows: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """The row of the program's queries; where it starts among all queries, how many it has, and which of them is the
    program's first."""
    row = find_row(rows[0], tl.program_id(0), num_rows, BLOCK_Q)
    start = tl.load(rows[0] + row)
    count = tl.load(rows[0] + row + 1) - start
    return row, start, count, (tl.program_id(0) - start // BLOCK_Q - row) * BLOCK_Q


@triton.jit
def _bounds(
    first: tl.tensor,
    key_begin: tl.tensor,
    seq_len: tl.tensor,
    row: tl.tensor,
    masks: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    BLOCK_Q: tl.constexpr,
) -> tl.tensor:
    """Half-open range of keys for the queries from position ``first`` on."""
    last = tl.minimum(first + BLOCK_Q, seq_len) - 1
    low, high = key_bounds(first, last, seq_len, row, masks, CAUSAL, WINDOW, CHUNK, HAS_RANGES)
    return tl.maximum(low, key_begin), high


@triton.jit
def _products(
    main: tl.tensor,
    rest: tl.tensor,
    keys: tl.tensor,
    states: tl.tensor,
    place: tl.tensor,
    is_read: tl.tensor,
    VALUES: tl.constexpr,
    SIZE: tl.constexpr,
    REST: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> tl.tensor:
    """Of queries and keys [M, N]; of latents also what their keys have beyond ``keys``."""
    products = _multiply(main, tl.trans(keys), COMPUTE)
    if REST > 0:
        tail = _states(states, place, is_read, VALUES, SIZE, REST)
        products += _multiply(rest, tl.trans(tail), COMPUTE)
    return products


@triton.jit
def _values(
    keys: tl.tensor,
    states: tl.tensor,
    position: tl.tensor,
    is_read: tl.tensor,
    kv_head: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    VALUES: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """Of the tile [N, PAD]; without ``states`` of their own, of latents, they are the ``keys``."""
    values = keys
    if states is not None:
        place = _places(states, position, is_read, kv_head, row, rows, BLOCK_SIZE)
        values = _states(states, place, is_read, 0, VALUES, PAD)
    return values


@triton.jit
def _token_scales(
    scales: tl.tensor,
    which: tl.constexpr,
    position: tl.tensor,
    is_read: tl.tensor,
    kv_head: tl.tensor,
    row: tl.tensor,
    rows: tl.tensor,
    BLOCK_SIZE: tl.constexpr,
) -> tl.tensor:
    """[N] that lie behind each head and token: 0 keys', 1 values'."""
    place = _places(scales, position, is_read, kv_head, row, rows, BLOCK_SIZE) + which * scales[4]
    return tl.load(scales[0] + place, mask=is_read, other=0.0)


@triton.jit
def _by_head(values: tl.tensor, scale: tl.tensor, kv_head: tl.tensor) -> tl.tensor:
    """Times the scale, if there is one: of all heads (stride 0) or one each."""
    if scale is not None:
        values *= tl.load(scale[0] + kv_head * scale[1])
    return values


@triton.jit
def _tile_keys(
    number: tl.tensor, prompt_tiles: tl.tensor, first_tile: tl.tensor, KEEPS_PROMPT: tl.constexpr, TILE: tl.constexpr
) -> tl.tensor:
    """Positions [N] of the tile that is the ``number``-th to be read; see ``_part``."""
    tile = first_tile + number
    if KEEPS_PROMPT:
        tile = tl.where(number < prompt_tiles, number, tile - prompt_tiles)
    return tile * TILE + tl.arange(0, TILE)


@triton.jit
def _part(
    low: tl.tensor,
    high: tl.tensor,
    prompt_len: tl.tensor,
    SPLITS: tl.constexpr,
    TILE: tl.constexpr,
    KEEPS_PROMPT: tl.constexpr,
) -> tl.tensor:
    """Numbers of the tiles to read: this part's first and end, the tiles of the prompt before ``low``, and the first
    tile from there on. Tiles between are skipped."""
    first_tile = low // TILE
    num_tiles = tl.maximum(tl.cdiv(high, TILE) - first_tile, 0)
    prompt_tiles = num_tiles * 0
    if KEEPS_PROMPT:
        prompt_tiles = tl.minimum(tl.cdiv(tl.minimum(prompt_len, high), TILE), first_tile)
        num_tiles += prompt_tiles
    per_part = tl.cdiv(num_tiles, SPLITS)
    begin = tl.program_id(2) * per_part
    return begin, tl.minimum(begin + per_part, num_tiles), prompt_tiles, first_tile


@triton.jit
def _store(
    output: tl.tensor,
    lse: tl.tensor,
    token: tl.tensor,
    head: tl.tensor,
    in_use: tl.tensor,
    values: tl.tensor,
    logs: tl.tensor,
    SPLITS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Into output [T, H, S, V] and log-sum-exps [T, H, S]; parts stay in base 2 until they are put together."""
    entry = tl.arange(0, PAD)
    split = tl.program_id(2)
    place = token.to(tl.int64) * output[1] + head.to(tl.int64) * output[2] + split * output[3]
    mask = in_use[:, None] & (entry < SIZE)[None, :]
    values = values.to(output[0].dtype.element_ty)
    tl.store(output[0] + place[:, None] + (entry * output[4])[None, :], values, mask=mask)
    if lse is not None:
        tl.store(lse[0] + token.to(tl.int64) * lse[1] + head * lse[2] + split * lse[3], logs * lse[4], mask=in_use)


@triton.jit(do_not_specialize=["num_rows", "key_begin"])
def attend(
    query: tl.tensor,  # pointer and strides [T, H, D]
    states: tl.tensor,  # keys, values and scales by token or None: pointers and strides [blocks, K, B, D]
    output: tl.tensor,  # pointer and strides [T, H, S, V]
    lse: tl.tensor,  # None, or pointer, strides [T, H, S] and the factor of base-2 logarithms
    rows: tl.tensor,  # starts [R + 1], lengths [R], table [R, blocks], its row stride, starts of given keys; int32
    masks: tl.tensor,  # see ``key_bounds``
    shaping: tl.tensor,  # see ``shape_scores``
    head_scales: tl.tensor,  # of keys and of values: None, or pointer and stride
    num_rows: tl.tensor,
    key_begin: tl.tensor,  # keys before it are another call's
    GROUP: tl.constexpr,
    HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    VALUES: tl.constexpr,
    PAD: tl.constexpr,  # VALUES, or SIZE, to the next power of two
    REST: tl.constexpr,  # of latents: what keys have beyond their values, padded; 0 of others
    BLOCK_SIZE: tl.constexpr,  # 0: keys are the step's own
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEPS_PROMPT: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    COMPUTE: tl.constexpr,
) -> None:
    BLOCK_Q: tl.constexpr = BLOCK_M // HEADS
    row, start, count, begin_q = _block(rows, num_rows, BLOCK_Q)
    if begin_q >= count:
        return
    kv_head, index, head, is_head, in_use = _lanes(begin_q, count, GROUP, HEADS, BLOCK_M)
    seq_len = tl.load(rows[1] + row)
    position = seq_len - count + index
    first = seq_len - count + begin_q
    low, high = _bounds(first, key_begin, seq_len, row, masks, CAUSAL, WINDOW, CHUNK, HAS_RANGES, BLOCK_Q)
    prompt_len = tl.load(masks[1] + row) if KEEPS_PROMPT else low * 0
    part, part_end, prompt_tiles, first_tile = _part(low, high, prompt_len, SPLITS, TILE, KEEPS_PROMPT)
    largest, total = start_softmax(head, is_head, tl.program_id(2) == 0, shaping, BLOCK_M)
    acc = tl.zeros([BLOCK_M, PAD], tl.float32)
    main = _queries(query, start + index, head, in_use, 0, VALUES, PAD)
    rest = _queries(query, start + index, head, in_use, VALUES, SIZE, REST) if REST > 0 else main
    for number in range(part, part_end):
        key = _tile_keys(number, prompt_tiles, first_tile, KEEPS_PROMPT, TILE)
        is_read = (key < high) & ((key >= low) | (key < prompt_len))
        place = _places(states[0], key, is_read, kv_head, row, rows, BLOCK_SIZE)
        keys = _states(states[0], place, is_read, 0, VALUES, PAD)
        scores = _products(main, rest, keys, states[0], place, is_read, VALUES, SIZE, REST, COMPUTE)
        if states[2] is not None:
            scores *= _token_scales(states[2], 0, key, is_read, kv_head, row, rows, BLOCK_SIZE)[None, :]
        scores = shape_scores(_by_head(scores, head_scales[0], kv_head), position, key, head, is_head, shaping)
        shown = is_visible(position, key, prompt_len, row, masks, CAUSAL, WINDOW, CHUNK, KEEPS_PROMPT, HAS_RANGES)
        scores = tl.where(shown & is_read[None, :] & in_use[:, None], scores, float("-inf"))
        weights, factor, largest, total = update_softmax(scores, largest, total)
        values = _values(keys, states[1], key, is_read, kv_head, row, rows, VALUES, PAD, BLOCK_SIZE)
        if states[2] is not None:
            # Not the weights: small ones times small scales would fall below float16's range, values are within it.
            values *= _token_scales(states[2], 1, key, is_read, kv_head, row, rows, BLOCK_SIZE)[:, None]
        acc = acc * factor[:, None] + _multiply(weights, values, COMPUTE)
    result, logs = finish(_by_head(acc, head_scales[1], kv_head), largest, total)
    _store(output, lse, start + index, head, in_use, result, logs, SPLITS, VALUES, PAD)

"""What block operations cost, and whether the size of the pool matters: ``python blocks.py [--json] [--pools N N]``.

Prints microseconds per block for pools of each size, the ratio of the largest pool's to the smallest's (flat is 1), and
what a step costs in which every one of ``--rows`` requests fills a block: hashing, and entering the prefix index.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from array import array
from collections.abc import Callable, Sequence

import numpy as np

from hardpoint.interfaces import BlockHash, BlockHashWithGroup, EngineRequest, SamplingParams, group_key
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher, Sha256
from hardpoint_scheduling.kv_cache.xxhash128 import Xxh3

Figures = dict[str, float]
REPEATS = 200


def median_us(prepare: Callable[[], object], run: Callable[[], object], repeats: int) -> float:
    """Of ``run`` alone; ``prepare`` goes before each."""
    times = []
    for _ in range(repeats):
        prepare()
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return float(np.median(times)) * 1e6


def nothing() -> None:
    pass


def fill(pool: BlockPool, count: int) -> list[int]:
    """Use ``count`` blocks and leave them free but cached, in random order: the worst case for caches of the CPU."""
    blocks = pool.allocate(count)
    pool.remember_many(blocks, (new_key() for _ in blocks))
    order = np.random.default_rng(0).permutation(np.asarray(blocks)).tolist()
    pool.free(order)
    return blocks


def new_key() -> BlockHashWithGroup:
    return group_key(BlockHash(os.urandom(32)), 0)


def pool_figures(num_blocks: int, batch: int, repeats: int) -> Figures:
    """Microseconds per block of each operation, on a pool whose blocks were all used and cached before."""
    start = time.perf_counter()
    pool = BlockPool(num_blocks)
    build_ms = (time.perf_counter() - start) * 1e3
    fill(pool, pool.num_usable)
    held: list[int] = []
    keys: list[BlockHashWithGroup] = []

    def allocate() -> None:
        held[:] = pool.allocate(batch)

    def give_back() -> None:
        if held:
            pool.free(reversed(held))
            held.clear()

    def take() -> None:
        if not held:
            allocate()
        for block in held:
            pool.forget(block)
        keys[:] = [new_key() for _ in held]

    figures = {"build_ms": build_ms}
    # Each allocation evicts: the blocks are cached.
    figures["evict"] = median_us(nothing, allocate, min(repeats, max(1, pool.num_free // batch - 1))) / batch
    figures["remember"] = median_us(take, lambda: pool.remember_many(held, keys), repeats) / batch
    figures["find"] = median_us(nothing, lambda: [pool.find(key) for key in keys], repeats) / batch
    give_back()
    figures["allocate"] = median_us(give_back, allocate, repeats) / batch
    give_back()
    figures["free"] = median_us(allocate, give_back, repeats) / batch
    allocate()
    take()
    pool.remember_many(held, keys)
    cached = list(held)
    give_back()

    def touch() -> None:
        pool.touch(cached)
        held.extend(cached)

    figures["touch"] = median_us(give_back, touch, repeats) / batch
    return figures


def step_figures(rows: int, block_size: int, repeats: int) -> Figures:
    """Microseconds of the parts of one step in which ``rows`` requests reach a block boundary together."""
    sampling = SamplingParams()
    ids = np.zeros(1, dtype=np.int32)
    records = [EngineRequest(request_id=str(i), prompt_token_ids=ids, sampling=sampling) for i in range(rows)]
    tokens = [array("i", range(i, i + 32 * block_size)) for i in range(rows)]
    pool = BlockPool(4 * rows + 1)
    blocks = pool.allocate(rows)
    figures = {}
    for function in (Sha256(), Xxh3()):
        hasher = ChainedHasher(function, block_size, BlockHash(bytes(32)))
        hashes: list[list[BlockHash]] = [[] for _ in range(rows)]
        hasher.extend_many(records, tokens, hashes)

        def shorten(known: Sequence[list[BlockHash]] = hashes) -> None:
            for one in known:
                one.pop()

        def extend(hasher: ChainedHasher = hasher, known: Sequence[list[BlockHash]] = hashes) -> None:
            hasher.extend_many(records, tokens, known)

        figures[f"hash_{function.name}_us"] = median_us(shorten, extend, repeats)

        def forget() -> None:
            for block in blocks:
                pool.forget(block)

        def enter(known: Sequence[list[BlockHash]] = hashes) -> None:
            pool.remember_many(blocks, [group_key(one[-1], 0) for one in known])

        figures[f"index_{function.name}_us"] = median_us(forget, enter, repeats)
    return figures


def prompt_figures(num_tokens: int, block_size: int, repeats: int) -> Figures:
    """Milliseconds to hash a long prompt and to find all of it."""
    tokens = array("i", range(num_tokens))
    record = EngineRequest(request_id="r", prompt_token_ids=np.zeros(1, dtype=np.int32), sampling=SamplingParams())
    hasher = ChainedHasher(Sha256(), block_size, BlockHash(bytes(32)))
    hashes: list[BlockHash] = []
    hash_us = median_us(hashes.clear, lambda: hasher.extend(record, tokens, hashes), repeats)
    pool = BlockPool(len(hashes) + 1)
    pool.remember_many(pool.allocate(len(hashes)), [group_key(one, 0) for one in hashes])
    find_us = median_us(nothing, lambda: pool.find_chain(hashes, 0), repeats)
    return {"prompt_tokens": num_tokens, "hash_ms": hash_us / 1e3, "find_ms": find_us / 1e3}


def measure(pools: Sequence[int], rows: int, prompt: int, repeats: int) -> dict[str, Figures]:
    """Every figure by name. The collector is off while times are taken, as in an engine that has frozen its objects."""
    gc.collect()
    gc.disable()
    try:
        figures = {f"pool {size}": pool_figures(size, min(rows, (size - 1) // 4), repeats) for size in pools}
        smallest, largest = figures[f"pool {min(pools)}"], figures[f"pool {max(pools)}"]
        figures["ratio"] = {name: largest[name] / smallest[name] for name in largest if name != "build_ms"}
        figures["step"] = {"rows": rows, **step_figures(rows, 16, repeats)}
        figures["prompt"] = prompt_figures(prompt, 16, max(1, repeats // 10))
    finally:
        gc.enable()
    return figures


def main(arguments: Sequence[str] | None = None) -> dict[str, Figures]:
    """Parse, measure, print; the figures are returned as well."""
    parser = argparse.ArgumentParser(description="What block operations cost.")
    parser.add_argument("--pools", type=int, nargs="+", default=[1_000, 1_000_000], help="sizes, smallest and largest")
    parser.add_argument("--rows", type=int, default=256, help="requests that fill a block in one step")
    parser.add_argument("--prompt", type=int, default=100_000, help="tokens of the long prompt")
    parser.add_argument("--repeats", type=int, default=REPEATS, help="measurements of each figure")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)
    figures = measure(options.pools, options.rows, options.prompt, options.repeats)
    if options.json:
        print(json.dumps(figures))
    else:
        for name, values in figures.items():
            print(f"{name:14s}", "  ".join(f"{what} {value:.3f}" for what, value in values.items()))
    return figures


if __name__ == "__main__":
    main()

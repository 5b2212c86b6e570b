"""The hash plugin ``xxhash``: XXH3 with 128 bits. Several times faster than SHA-256 on long blocks, not cryptographic.

Whoever knows the seed can construct blocks that collide and so read or poison another prompt's cached KV. The seed is
therefore drawn per process unless the operator gives one (R11.9), and it enters as the chain's first parent.
"""

from __future__ import annotations

from typing import Any

import xxhash

from hardpoint.interfaces import BlockHash, HashContext, HashFunction, NoOptions, plugin

_digest: Any = xxhash.xxh3_128_digest


class Xxh3:
    """Sixteen bytes, canonical (big-endian) on every machine."""

    name = "xxhash"
    cryptographic = False

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        """``parent`` has a fixed length but for the root; the lengths keep parent, tokens and extra keys apart."""
        head = len(parent).to_bytes(4, "big") + len(token_bytes).to_bytes(4, "big")
        digest: BlockHash = _digest(head + parent + token_bytes + extra_keys)
        return digest


@plugin("hash")
def create_xxhash(ctx: HashContext, options: NoOptions) -> HashFunction:
    """Entry point ``xxhash``."""
    del ctx, options
    return Xxh3()

"""Chained block hashes: hash i identifies every token from the start of the sequence to the end of block i."""

from __future__ import annotations

import hashlib
import sys
from array import array
from collections.abc import Iterable
from typing import Any

import numpy as np

from hardpoint.interfaces import BlockHash, EngineRequest, HashContext, HashFunction, NoOptions, plugin
from hardpoint_scheduling.kv_cache.extra_keys import extra_keys, has_extra_keys

_sha256: Any = hashlib.sha256


class Sha256:
    """The default algorithm: equal on every machine, and nobody can construct colliding blocks."""

    name = "sha256"
    cryptographic = True

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        """``parent`` is 32 bytes; the token bytes' length keeps them apart from the extra keys."""
        digest: BlockHash = _sha256(parent + len(token_bytes).to_bytes(4, "big") + token_bytes + extra_keys).digest()
        return digest


@plugin("hash")
def create_sha256(ctx: HashContext, options: NoOptions) -> HashFunction:
    """Entry point ``sha256``."""
    del ctx, options
    return Sha256()


class ChainedHasher:
    """Extends requests' block hashes as they grow. Holds no request, so it forms no reference cycle (R1.10).

    ``root`` is the resolved parent of every first block: whoever must agree with these hashes reads it here and derives
    nothing anew (R11.4, R11.11).
    """

    def __init__(self, function: HashFunction, block_size: int, root: BlockHash) -> None:
        self.block_size = block_size
        self.root = root
        self._function = function

    def extend(self, request: EngineRequest, token_ids: Any, hashes: list[BlockHash]) -> None:
        """Append the hashes of complete blocks that ``hashes`` lacks (R11.13).

        ``token_ids``: all known tokens, as a sequence of ints or an integer array.
        """
        size = self.block_size
        first = len(hashes)
        last = len(token_ids) // size
        if first >= last:
            return
        function, append = self._function, hashes.append
        parent = hashes[-1] if hashes else self.root
        data = canonical_token_bytes(token_ids, first * size, last * size)
        width = 4 * size
        if not has_extra_keys(request):
            for at in range(0, len(data), width):
                parent = function(parent, data[at : at + width], b"")
                append(parent)
            return
        for block in range(first, last):
            at = (block - first) * width
            parent = function(parent, data[at : at + width], extra_keys(request, block * size, (block + 1) * size))
            append(parent)

    def extend_many(
        self, requests: Iterable[EngineRequest], token_ids: Iterable[Any], hashes: Iterable[list[BlockHash]]
    ) -> None:
        """:meth:`extend` for many requests: what a step does in which hundreds of them fill a block at once.

        The three run in parallel: a request's record, its tokens, its hashes. Raises ``ValueError`` when one is longer.
        """
        size, function, root = self.block_size, self._function, self.root
        for request, tokens, known in zip(requests, token_ids, hashes, strict=True):
            first = len(known)
            missing = len(tokens) // size - first
            if missing == 1 and not has_extra_keys(request):
                data = canonical_token_bytes(tokens, first * size, (first + 1) * size)
                known.append(function(known[-1] if first else root, data, b""))
            elif missing > 0:
                self.extend(request, tokens, known)


def canonical_token_bytes(token_ids: Any, start: int, stop: int) -> bytes:
    """Token ids ``start .. stop - 1`` as little-endian 32-bit integers, whatever the container (R11.6)."""
    part = token_ids[start:stop]
    if isinstance(part, array) and part.typecode == "i" and sys.byteorder == "little":
        return part.tobytes()
    return np.asarray(part, dtype="<i4").tobytes()

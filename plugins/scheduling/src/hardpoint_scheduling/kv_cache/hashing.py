"""Chained block hashes: hash i identifies every token from the start of the sequence to the end of block i."""

from __future__ import annotations

import hashlib
import logging
import os
import sys
from array import array
from typing import Any

import numpy as np

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces import BlockHash, EngineRequest, HashContext, HashFunction, NoOptions, PluginAccess, plugin
from hardpoint_scheduling.kv_cache.extra_keys import extra_keys, has_extra_keys

SEED_VARIABLE = "PYTHONHASHSEED"
_SEED_LABEL = b"hardpoint block hash seed v1:"

_logger = logging.getLogger(__name__)


class Sha256:
    """The default algorithm: equal on every machine, and nobody can construct colliding blocks."""

    name = "sha256"
    cryptographic = True

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        """``parent`` is 32 bytes; the token bytes' length keeps them apart from the extra keys."""
        head = parent + len(token_bytes).to_bytes(4, "big")
        return BlockHash(hashlib.sha256(head + token_bytes + extra_keys).digest())


@plugin("hash")
def create_sha256(ctx: HashContext, options: NoOptions) -> HashFunction:
    """Entry point ``sha256``."""
    del ctx, options
    return Sha256()


def environment_seed() -> str | None:
    """The operator's hash seed. Python's own word for "choose one at random" counts as not set."""
    text = os.environ.get(SEED_VARIABLE, "")
    return None if text in ("", "random") else text


def root_hash(
    function: HashFunction, seed: str | None, logger: logging.Logger = _logger, *, fingerprint: str = ""
) -> BlockHash:
    """The parent of every first block (R11.7-R11.10). Resolve it once and pass the value on: a random one differs
    between calls.

    ``fingerprint`` is that of the active plugins: engines whose kernels or other computing plugins differ fill equal
    blocks with different numbers, so their hashes differ from the first block on and no store confuses them.
    """
    plugins = b" plugins " + fingerprint.encode() if fingerprint else b""
    if seed is not None:
        return BlockHash(hashlib.sha256(_SEED_LABEL + b"given " + seed.encode() + plugins).digest())
    if getattr(function, "cryptographic", False):
        return BlockHash(hashlib.sha256(_SEED_LABEL + b"fixed" + plugins).digest())
    logger.warning(
        "block hash %r is not cryptographic and %s is not set: cached prefixes cannot be shared between instances; "
        "set the variable to the same value everywhere, or choose --hash-algorithm sha256",
        getattr(function, "name", function),
        SEED_VARIABLE,
    )
    return BlockHash(os.urandom(32))


def load_hash_function(plugins: PluginAccess | None, name: str) -> HashFunction:
    """The ``hash`` plugin ``name``; without plugin access (use as a library) only ``sha256`` exists."""
    if plugins is not None:
        base = plugins.context("hash", name)
        context = HashContext(
            name=base.name,
            api_version=base.api_version,
            roles=base.roles,
            rank=base.rank,
            platform=base.platform,
            logger=base.logger,
            plugins=base.plugins,
            seed=environment_seed(),
        )
        function: HashFunction = plugins.create("hash", name, context)
        return function
    if name != Sha256.name:
        raise PluginNotFoundError(f"hash algorithm {name!r} needs plugin access; without it only 'sha256' is available")
    return Sha256()


class ChainedHasher:
    """Extends a request's block hashes as it grows. Holds no request, so it forms no reference cycle (R1.10)."""

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
        function = self._function
        parent = hashes[-1] if hashes else self.root
        data = canonical_token_bytes(token_ids, first * size, last * size)
        width = 4 * size
        plain = not has_extra_keys(request)
        for block in range(first, last):
            at = (block - first) * width
            keys = b"" if plain else extra_keys(request, block * size, (block + 1) * size)
            parent = function(parent, data[at : at + width], keys)
            hashes.append(parent)


def canonical_token_bytes(token_ids: Any, start: int, stop: int) -> bytes:
    """Token ids ``start .. stop - 1`` as little-endian 32-bit integers, whatever the container (R11.6)."""
    part = token_ids[start:stop]
    if isinstance(part, array) and part.typecode == "i" and sys.byteorder == "little":
        return part.tobytes()
    return np.asarray(part, dtype="<i4").tobytes()

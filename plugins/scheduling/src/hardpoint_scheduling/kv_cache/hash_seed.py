"""The parent of every first block, resolved once per process from the operator's seed and the algorithm's strength."""

from __future__ import annotations

import hashlib
import logging
import os
from dataclasses import dataclass

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces import BlockHash, HashContext, HashFunction, PluginAccess
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher, Sha256

SEED_VARIABLE = "PYTHONHASHSEED"
_SEED_LABEL = b"hardpoint block hash seed v1:"

_logger = logging.getLogger(__name__)


class ProcessSeed:
    """What one process draws for algorithms that need a secret: the same for all who ask within it (R11.9)."""

    def __init__(self) -> None:
        self.secret = os.urandom(32)
        self._warned: set[str] = set()

    def warns_first(self, algorithm: str) -> bool:
        """True the first time it is asked about ``algorithm``, so that a warning is given once (R11.10)."""
        first = algorithm not in self._warned
        self._warned.add(algorithm)
        return first


_PROCESS_SEED = ProcessSeed()


@dataclass(frozen=True, slots=True)
class ResolvedHash:
    """A hash function with the seed it goes with. Hand this on; a second resolution may see another environment."""

    function: HashFunction
    seed: str | None
    root: BlockHash

    def hasher(self, block_size: int) -> ChainedHasher:
        """``block_size`` is in tokens."""
        return ChainedHasher(self.function, block_size, self.root)


def environment_seed() -> str | None:
    """The operator's hash seed. Python's own word for "choose one at random" counts as not set."""
    text = os.environ.get(SEED_VARIABLE, "")
    return None if text in ("", "random") else text


def is_cryptographic(function: HashFunction) -> bool:
    """Only a function that says so with ``True`` itself: an undeclared one is not (R11.12)."""
    return getattr(function, "cryptographic", False) is True


def root_hash(
    function: HashFunction,
    seed: str | None,
    logger: logging.Logger = _logger,
    *,
    fingerprint: str = "",
    process: ProcessSeed = _PROCESS_SEED,
) -> BlockHash:
    """The parent of every first block, 32 bytes (R11.4, R11.7-R11.10).

    ``fingerprint`` is that of the active plugins: engines whose kernels or other computing plugins differ fill equal
    blocks with different numbers, so their hashes differ from the first block on and no store confuses them.
    """
    plugins = b" plugins " + fingerprint.encode() if fingerprint else b""
    if seed is not None:
        return BlockHash(hashlib.sha256(_SEED_LABEL + b"given " + seed.encode() + plugins).digest())
    if is_cryptographic(function):
        return BlockHash(hashlib.sha256(_SEED_LABEL + b"fixed" + plugins).digest())
    name = getattr(function, "name", type(function).__name__)
    if process.warns_first(name):
        logger.warning(
            "block hash %r is not cryptographic and %s is not set: cached prefixes cannot be shared between instances; "
            "set the variable to the same secret value everywhere, or choose --hash-algorithm sha256",
            name,
            SEED_VARIABLE,
        )
    return BlockHash(hashlib.sha256(_SEED_LABEL + b"drawn " + process.secret + plugins).digest())


def load_hash_function(plugins: PluginAccess | None, name: str, seed: str | None) -> HashFunction:
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
            seed=seed,
        )
        function: HashFunction = plugins.create("hash", name, context)
        return function
    if name != Sha256.name:
        raise PluginNotFoundError(f"hash algorithm {name!r} needs plugin access; without it only 'sha256' is available")
    return Sha256()


def resolve_hash(plugins: PluginAccess | None, name: str, logger: logging.Logger = _logger) -> ResolvedHash:
    """Function, seed and root in one go: the environment is read here and nowhere else (R11.11)."""
    seed = environment_seed()
    function = load_hash_function(plugins, name, seed)
    fingerprint = plugins.fingerprint() if plugins is not None else ""
    return ResolvedHash(function, seed, root_hash(function, seed, logger, fingerprint=fingerprint))

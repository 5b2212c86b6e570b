"""The hashes of a group whose blocks are larger than a hash block."""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd
from typing import overload

from hardpoint.errors import ConfigError
from hardpoint.interfaces import BlockHash


class ScaledHashes(Sequence[BlockHash]):
    """Every ``scale``-th hash of ``hashes``: hash i covers the end of group block i, nothing is hashed again (R11.21).

    Lazy: hashes appended later show.
    """

    __slots__ = ("_hashes", "_scale")

    def __init__(self, hashes: Sequence[BlockHash], scale: int) -> None:
        self._hashes = hashes
        self._scale = scale

    def __len__(self) -> int:
        return len(self._hashes) // self._scale

    @overload
    def __getitem__(self, index: int) -> BlockHash: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[BlockHash]: ...
    def __getitem__(self, index: int | slice) -> BlockHash | Sequence[BlockHash]:
        length = len(self)
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(length))]
        if not -length <= index < length:
            raise IndexError(f"hash {index} is outside a view of {length}")
        return self._hashes[(index % length + 1) * self._scale - 1]


def hash_block_size(block_sizes: Sequence[int], match_unit: int | None = None) -> int:
    """Tokens per hash (R11.24): the block size of one group; of several ``match_unit`` if given, else the greatest
    common divisor.

    ``block_sizes`` are those of groups that cache prefixes. Raises ``ConfigError`` for a unit that does not divide all
    of them, since the others could not use its hashes (R11.23).
    """
    if len(block_sizes) > 1 and match_unit is not None:
        for size in block_sizes:
            if match_unit < 1 or size % match_unit:
                raise ConfigError(
                    f"a match unit of {match_unit} tokens does not divide KV blocks of {size}; choose a divisor of "
                    f"{gcd(*block_sizes)}, or leave it out"
                )
        return match_unit
    size = gcd(*block_sizes)
    return size if size > 0 else 1


def group_scale(block_size: int, hash_size: int) -> int:
    """Hash blocks per group block. Raises ``ConfigError`` when that is not a whole number (R11.23)."""
    if hash_size < 1 or block_size % hash_size:
        raise ConfigError(
            f"a KV group with blocks of {block_size} tokens cannot use hashes of {hash_size} tokens; "
            "choose --block-size as a multiple"
        )
    return block_size // hash_size

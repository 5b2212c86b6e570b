"""What happens to cached KV blocks, told in order: routers learn from it which engine holds which prefix.

Starting from nothing, whoever applies every event in order knows the engine's whole prefix index: the pairs of block
hash and group that some block holds.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from hardpoint.interfaces.kv_cache import BlockHash

DEVICE_MEDIUM = "device"
"""Medium of blocks in the workers' own KV cache; connectors name theirs."""


class BlocksStored(msgspec.Struct, frozen=True, kw_only=True, tag="stored"):
    """Blocks that follow each other in one sequence can be found from now on.

    Attributes:
        parent_hash: hash of the block before the first one, None at the start of a sequence.
        token_ids: int32, those of all the blocks, ``block_size`` each; the last block may be partial. Empty where
            they are not known.
        adapter: name of the weight adapter the KV was computed with.
        has_extra_keys: more than tokens and adapter decides about these blocks (a cache salt, media, embeddings), so
            equal tokens alone do not find them.
    """

    block_hashes: list[BlockHash]
    parent_hash: BlockHash | None
    token_ids: npt.NDArray[np.int32]
    block_size: int
    group: int = 0
    adapter: str | None = None
    has_extra_keys: bool = False
    medium: str = DEVICE_MEDIUM


class BlocksRemoved(msgspec.Struct, frozen=True, kw_only=True, tag="removed"):
    """No block of the group holds these prefixes any more. They come in the order in which they went."""

    block_hashes: list[BlockHash]
    group: int = 0
    medium: str = DEVICE_MEDIUM


class AllBlocksCleared(msgspec.Struct, frozen=True, tag="cleared"):
    """Nothing is cached any more, on any medium."""


KVEvent = BlocksStored | BlocksRemoved | AllBlocksCleared


class KVEventBatch(msgspec.Struct, frozen=True):
    """The events of one step. ``sequence`` counts from 1 without gaps; ``timestamp`` is in Unix seconds."""

    sequence: int
    timestamp: float
    events: list[KVEvent]

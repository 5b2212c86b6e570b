"""KV cache records: how layers share memory, and what a manager must do. ``kv_cache_specs`` has what a layer stores."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NewType, Protocol

import msgspec

from hardpoint.interfaces.block_size import BlockSizeRule
from hardpoint.interfaces.kv_cache_specs import AttentionSpec as AttentionSpec
from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec as FullAttentionSpec
from hardpoint.interfaces.kv_cache_specs import KVCacheSpec as KVCacheSpec
from hardpoint.interfaces.kv_cache_specs import WireSpec as WireSpec
from hardpoint.interfaces.kv_cache_specs import spec_from_wire as spec_from_wire
from hardpoint.interfaces.kv_cache_specs import spec_to_wire as spec_to_wire
from hardpoint.interfaces.plugin import PluginContext

BlockHash = NewType("BlockHash", bytes)
BlockHashWithGroup = NewType("BlockHashWithGroup", bytes)

NULL_BLOCK_ID = 0
"""Block 0 is never owned: padding rows and positions without KV point at it."""


def group_key(block_hash: BlockHash, group: int) -> BlockHashWithGroup:
    """Index key of a block: the hash followed by the group id as four big-endian bytes (R11.2)."""
    return BlockHashWithGroup(block_hash + group.to_bytes(4, "big"))


class LayerSpec(msgspec.Struct, frozen=True):
    """One layer's wish, as a worker reports it. ``role`` marks layers that are not the target decoder's (``draft``)."""

    layer_name: str
    spec: WireSpec
    role: str = ""


class KVCacheTensor(msgspec.Struct, frozen=True, kw_only=True):
    """One flat buffer shared by same-shaped layers: page (layer l, block b) starts at
    ``offset + l * layer_stride + b * block_stride`` bytes (R1.40).

    Tensors with an equal ``buffer`` number share one allocation; None means one of its own. ``order`` names the
    dimensions from the outermost to the innermost; strides that are not given follow from it (R1.43).
    """

    size: int
    layer_names: tuple[str, ...]
    layer_stride: int
    block_stride: int
    offset: int = 0
    buffer: int | None = None
    order: tuple[str, ...] = ("layer", "block", "head", "state", "content")


class KVCacheGroup(msgspec.Struct, frozen=True):
    """Layers that always need the same token slots and therefore share one block table."""

    layer_names: tuple[str, ...]
    spec: WireSpec
    role: str = ""


class KVCacheConfig(msgspec.Struct, frozen=True, kw_only=True):
    """The agreed memory plan, equal in scheduler and workers. ``num_blocks`` includes the null block.

    ``tensors`` serve every rank unless ``tensors_by_rank`` gives each its own (pipeline stages). ``layout`` is the
    plugin's name, for messages.
    """

    num_blocks: int
    groups: tuple[KVCacheGroup, ...]
    tensors: tuple[KVCacheTensor, ...]
    tensors_by_rank: tuple[tuple[KVCacheTensor, ...], ...] = ()
    layout: str = ""

    def layer_specs(self, wished: Mapping[str, KVCacheSpec]) -> dict[str, KVCacheSpec]:
        """What the layers of a worker got for what they wished: other block sizes and padding, where the plan says so.

        A wish of a layer outside the plan is left out, and so is a planned layer that this worker does not have.
        """
        places = [(name, group.spec, i) for group in self.groups for i, name in enumerate(group.layer_names)]
        return {name: spec.granted(wished[name], i) for name, spec, i in places if name in wished}

    def tensors_of(self, rank: int) -> tuple[KVCacheTensor, ...]:
        """The buffers ``rank`` allocates."""
        return self.tensors_by_rank[rank] if self.tensors_by_rank else self.tensors


class KVLayout(ABC):
    """Plugin kind ``kv_layout``: turns specs and a byte budget into a :class:`KVCacheConfig`."""

    @abstractmethod
    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        """Raise ``ConfigError`` with the number to set when one sequence of ``max_model_len`` does not fit."""


@dataclass(frozen=True, slots=True)
class KVPlanRequest:
    """``budget_bytes`` per worker; ``num_blocks`` overrides the division when set; ``specs`` by layer in model order.

    ``max_num_batched_tokens``: most tokens of one sequence that steps under way compute, a batch for each step.
    ``roles`` are those of layers that have one. ``hybrid`` False: all layers share one block table, so that those with
    a window hold the blocks of all tokens (R1.28). ``block_size_rules``: sizes that attention backends accept, by
    backend, for layouts that enlarge blocks.
    """

    specs: Mapping[str, KVCacheSpec]
    budget_bytes: int
    max_model_len: int
    max_num_batched_tokens: int
    num_blocks: int | None = None
    layers_by_rank: tuple[tuple[str, ...], ...] = ()
    roles: Mapping[str, str] = field(default_factory=dict)
    hybrid: bool = True
    block_size_rules: Mapping[str, BlockSizeRule] = field(default_factory=dict)


class KVBlockPool(Protocol):
    """The blocks of all groups, as managers see them: reference counts, the free ones, and the index of prefixes.

    A free block keeps its key until it is handed out for new content. Any method but ``allocate`` ignores the null
    block.
    """

    @property
    def num_free(self) -> int: ...

    def allocate(self, count: int) -> Sequence[int]:
        """``count`` blocks for new content, each referenced once. Raises ``OutOfBlocksError``, having taken none."""

    def touch(self, blocks: Iterable[int]) -> None:
        """One more reference to each; free ones leave the free blocks."""

    def free(self, blocks: Iterable[int]) -> None:
        """One reference less to each, in this order: of those that become free, the last is evicted last.

        Raises ``ValueError`` for a block that nobody refers to.
        """

    def remember(self, block: int, key: BlockHashWithGroup) -> None:
        """Enter a block whose content is complete into the index, instead of the key it had."""

    def remember_many(self, blocks: Iterable[int], keys: Iterable[BlockHashWithGroup]) -> None:
        """:meth:`remember` for blocks and keys of equal position."""

    def forget(self, block: int) -> None:
        """Take a block out of the index; it stays whose it is."""

    def find(self, key: BlockHashWithGroup) -> int | None:
        """A block that holds what ``key`` stands for, referenced or free; it is not touched."""

    def find_chain(self, hashes: Iterable[BlockHash], group: int) -> Sequence[int]:
        """Blocks of the longest cached prefix of ``hashes``, none of which is touched."""


class KVCacheManager(ABC):
    """Blocks of one group. An id in a table never changes once handed out, except to the null block; tables only grow.

    ``num_tokens`` arguments count from the start of the sequence. No method blocks or does I/O.

    ``keeps_all``: no block is given up before the end, so any shorter prefix of a hit is a hit too. ``grows``: tables
    follow the tokens of the sequence (False: they are complete after the first ``allocate``). ``caches_prefixes``:
    False rules out prefix hits for the whole model. ``shares_within_step``: rows of one step may read what another of
    them fills. ``counts_guesses``: ``num_tokens`` to allocate include drafts and lookahead. ``needs_whole_prompts``:
    tokens see those behind them, so a prompt has to be computed in one step.
    """

    keeps_all: ClassVar[bool] = False
    grows: bool = True
    caches_prefixes: bool = True
    shares_within_step: bool = True
    counts_guesses: bool = True
    needs_whole_prompts: bool = False

    @abstractmethod
    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        """Blocks that must leave the free queue so that ``num_tokens`` fit, given ``num_hit_blocks`` adopted hits."""

    @abstractmethod
    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        """Longest cached prefix as block ids; nothing is touched yet."""

    @abstractmethod
    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Take part in ``block_ids`` (reference counts grow); only for a request that holds no blocks."""

    @abstractmethod
    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        """Grow the table to cover ``num_tokens`` and return the new ids. Raises ``OutOfBlocksError`` if short."""

    def allocate_many(self, request_ids: Sequence[str], ends: Sequence[int], num_free: int) -> list[Sequence[int]]:
        """:meth:`allocate` row by row, up to the first that needs more than is left of ``num_free`` blocks."""
        grown: list[Sequence[int]] = []
        for request_id, end in zip(request_ids, ends, strict=True):
            needed = self.blocks_needed(request_id, end, 0)
            if needed > num_free:
                break
            num_free -= needed
            grown.append(self.allocate(request_id, end))
        return grown

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token behind the first ``num_computed_tokens`` reads; they need not be held."""
        return 0

    def release_unneeded(self, request_id: str, num_processed_tokens: int) -> None:
        """Give up the skipped blocks of a request whose first ``num_processed_tokens`` cannot be taken back."""

    def release_unneeded_many(self, request_ids: Sequence[str], num_processed_tokens: Sequence[int]) -> None:
        """:meth:`release_unneeded` row by row."""
        for request_id, processed in zip(request_ids, num_processed_tokens, strict=True):
            self.release_unneeded(request_id, processed)

    @abstractmethod
    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Enter the complete blocks among the first ``num_tokens`` into the prefix index."""

    def cache_full_blocks_many(
        self, request_ids: Sequence[str], block_hashes: Sequence[Sequence[BlockHash]], ends: Sequence[int]
    ) -> None:
        """:meth:`cache_full_blocks` row by row."""
        for request_id, hashes, end in zip(request_ids, block_hashes, ends, strict=True):
            self.cache_full_blocks(request_id, hashes, end)

    @abstractmethod
    def free(self, request_id: str) -> None:
        """Give up all blocks, last block first. A request without blocks is not an error."""

    @abstractmethod
    def block_ids(self, request_id: str) -> Sequence[int]:
        """The current table; a read-only view."""


@dataclass(frozen=True, slots=True)
class KVSpecRegistration:
    """What a ``kv_cache_spec`` plugin's factory returns.

    ``manager`` builds the manager of a group from ``(block_pool, group_id, spec)``. ``grouping_base`` must be an
    ancestor of ``spec_class`` (default: itself). ``roles``: groups of these are the manager's whatever their spec.
    """

    spec_class: type[KVCacheSpec]
    manager: Callable[[Any, int, Any], KVCacheManager]
    """Its pool is a :class:`KVBlockPool`, its spec one of ``spec_class``."""
    grouping_base: type[KVCacheSpec] | None = None
    roles: tuple[str, ...] = ()


class HashFunction(Protocol):
    """Plugin kind ``hash``. ``cryptographic`` undeclared counts as False (R11.12)."""

    name: str
    cryptographic: bool

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash: ...


@dataclass(frozen=True, slots=True)
class HashContext(PluginContext):
    """``seed`` is the operator's hash seed text, or None."""

    seed: str | None = None

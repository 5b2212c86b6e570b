"""A block pool without speed that notices every misuse: what managers of KV blocks are tested over."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence

from hardpoint.errors import OutOfBlocksError
from hardpoint.interfaces.kv_cache import NULL_BLOCK_ID, BlockHash, BlockHashWithGroup, group_key

__all__ = ["CheckedBlockPool"]


class CheckedBlockPool:
    """Implements ``KVBlockPool`` over ``num_blocks`` blocks, the null block included.

    ``freed`` and ``evicted`` list blocks in the order in which they were given up and lost their key.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.references: dict[int, int] = dict.fromkeys(range(num_blocks), 0)
        self.freed: list[int] = []
        self.evicted: list[int] = []
        # In the order in which they will be handed out.
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._keys: dict[int, BlockHashWithGroup] = {}

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self, count: int) -> Sequence[int]:
        if count < 0:
            raise ValueError(f"{count} blocks were asked for")
        if count > len(self._free):
            raise OutOfBlocksError(f"{count} blocks were asked for, {len(self._free)} are free")
        blocks = list(self._free)[:count]
        for block in blocks:
            del self._free[block]
            self.references[block] = 1
            if block in self._keys:
                self.evicted.append(block)
                del self._keys[block]
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        for block in self._known(blocks):
            self._free.pop(block, None)
            self.references[block] += 1

    def free(self, blocks: Iterable[int]) -> None:
        for block in self._known(blocks):
            if self.references[block] == 0:
                raise ValueError(f"block {block} is freed although nobody refers to it")
            self.references[block] -= 1
            self.freed.append(block)
            if self.references[block] == 0:
                # One without a key is worth nothing to anybody, so it goes first.
                self._free[block] = None
                self._free.move_to_end(block, last=block in self._keys)

    def remember(self, block: int, key: BlockHashWithGroup) -> None:
        for known in self._known([block]):
            if self.references[known] == 0:
                raise ValueError(f"block {known} enters the index although nobody holds it")
            self._keys[known] = key

    def remember_many(self, blocks: Iterable[int], keys: Iterable[BlockHashWithGroup]) -> None:
        for block, key in zip(blocks, keys, strict=True):
            self.remember(block, key)

    def forget(self, block: int) -> None:
        self._keys.pop(block, None)

    def find(self, key: BlockHashWithGroup) -> int | None:
        return next((block for block, known in self._keys.items() if known == key), None)

    def find_chain(self, hashes: Iterable[BlockHash], group: int) -> Sequence[int]:
        chain: list[int] = []
        for block_hash in hashes:
            block = self.find(group_key(block_hash, group))
            if block is None:
                break
            chain.append(block)
        return chain

    def check(self, tables: Mapping[str, Sequence[int]]) -> None:
        """Every reference is a table's; raises ``AssertionError`` naming the first block for which that is not so."""
        held = dict.fromkeys(range(self.num_blocks), 0)
        for name, table in tables.items():
            for block in table:
                assert block in held, f"the table of {name} holds block {block}, which does not exist"
                held[block] += block != NULL_BLOCK_ID
        for block, count in held.items():
            found = self.references[block]
            assert found == count, f"block {block} has {found} references, but {count} tables hold it"
            assert (block in self._free) == (count == 0 and block != NULL_BLOCK_ID)

    def _known(self, blocks: Iterable[int]) -> Iterable[int]:
        for block in blocks:
            if block not in self.references:
                raise ValueError(f"there is no block {block}")
            if block != NULL_BLOCK_ID:
                yield block

"""Outputs of media encoders that the workers keep: which are there, who needs them, which go when room is short.

The scheduler decides and the workers follow: an output enters when the item's encoding is scheduled and leaves when
:meth:`EncoderCache.take_freed` names it. Sizes are numbers of embeddings (rows), the unit of the capacity.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from hardpoint.errors import ConfigError
from hardpoint.interfaces import Feature


@dataclass(frozen=True, slots=True)
class EncoderItem:
    """One encoder output: ``content_hash`` says what it shows, so requests with equal content share it."""

    content_hash: str
    num_embeddings: int

    @classmethod
    def of(cls, feature: Feature) -> EncoderItem:
        """What ``feature`` needs: its own number of embeddings where it names one, else one per placeholder."""
        size = feature.length if feature.num_encoder_tokens is None else feature.num_encoder_tokens
        return cls(feature.content_hash, size)


class EncoderCache:
    """Reference-counted encoder outputs within a fixed number of embeddings.

    An output nobody refers to stays until its room is needed; the one that has been idle longest goes first. Nothing a
    request refers to is ever evicted. One request may refer to equal content more than once, as often as it shows it.
    """

    def __init__(self, capacity: int) -> None:
        """``capacity``: embeddings the workers have room for. Raises ``ConfigError`` below 0."""
        if capacity < 0:
            raise ConfigError(f"an encoder cache of {capacity} embeddings is impossible; allowed: 0 or more")
        self.capacity = capacity
        self._sizes: dict[str, int] = {}
        self._references: dict[str, int] = {}
        # Unreferenced outputs, the longest idle first: the keys' order is the order of eviction.
        self._idle: dict[str, None] = {}
        self._held: dict[str, dict[str, int]] = {}
        self._freed: dict[str, None] = {}
        self._num_stored = 0
        self._num_idle = 0

    @property
    def num_used(self) -> int:
        """Embeddings of outputs that requests refer to."""
        return self._num_stored - self._num_idle

    @property
    def num_available(self) -> int:
        """Embeddings that new outputs can take: what was never filled and what eviction can win."""
        return self.capacity - self.num_used

    def __len__(self) -> int:
        return len(self._sizes)

    def __contains__(self, content_hash: object) -> bool:
        """Whether the output is there (or scheduled to be), referenced or idle."""
        return content_hash in self._sizes

    def is_idle(self, content_hash: object) -> bool:
        """Whether the output is there and nobody refers to it."""
        return content_hash in self._idle

    def holds(self, request_id: str, content_hash: str) -> bool:
        return content_hash in self._held.get(request_id, ())

    def can_allocate(self, items: Iterable[EncoderItem]) -> bool:
        """Whether one step can take all of ``items`` at once; nothing changes.

        Items already cached take no new room, but idle ones among them can then no longer be evicted. Pass everything
        that the same decision has chosen so far, so that the parts cannot each claim the same room.
        """
        needed = 0
        for content_hash, size in {item.content_hash: item.num_embeddings for item in items}.items():
            if content_hash not in self._sizes:
                needed += size
            elif content_hash in self._idle:
                needed += self._sizes[content_hash]
        return needed <= self.num_available

    def allocate(self, request_id: str, item: EncoderItem) -> bool:
        """Let ``request_id`` refer to ``item`` once more. True when the workers have to encode it, False when cached.

        Idle outputs are evicted as far as needed. Raises ``ValueError``, and changes nothing, when it does not fit; ask
        :meth:`can_allocate` first.
        """
        name = item.content_hash
        is_new = name not in self._sizes
        if not self.can_allocate((item,)):
            raise ValueError(
                f"encoder output {name!r} needs {item.num_embeddings} embeddings, but {self.num_available} of "
                f"{self.capacity} are available"
            )
        if is_new:
            self._make_room(item.num_embeddings)
            self._sizes[name] = item.num_embeddings
            self._references[name] = 0
            self._num_stored += item.num_embeddings
        elif name in self._idle:
            del self._idle[name]
            self._num_idle -= self._sizes[name]
        self._references[name] += 1
        held = self._held.setdefault(request_id, {})
        held[name] = held.get(name, 0) + 1
        return is_new

    def free_item(self, request_id: str, content_hash: str) -> None:
        """``request_id`` has used one reference up (its placeholders are computed). Unknown ones are ignored."""
        held = self._held.get(request_id)
        if held is None or content_hash not in held:
            return
        held[content_hash] -= 1
        if held[content_hash] == 0:
            del held[content_hash]
            if not held:
                del self._held[request_id]
        self._release(content_hash, 1)

    def free(self, request_id: str) -> None:
        """Give up every reference of ``request_id``: it ended or was preempted (R3.78). Unknown ids are ignored.

        What it shows last is evicted first: beginnings are more often shared.
        """
        for content_hash, count in reversed(self._held.pop(request_id, {}).items()):
            self._release(content_hash, count)

    def discard(self, content_hash: str) -> None:
        """Forget an output that was not computed after all, or whose content cannot be trusted.

        Whoever refers to it loses the reference and allocates anew.
        """
        if content_hash not in self._sizes:
            return
        if content_hash not in self._idle:
            for request_id in [name for name, held in self._held.items() if content_hash in held]:
                held = self._held[request_id]
                self._release(content_hash, held.pop(content_hash))
                if not held:
                    del self._held[request_id]
        self._evict(content_hash)

    def reset(self) -> bool:
        """Forget all outputs, for example after new weights; False, and nothing changed, while any is referenced."""
        if self.num_used or self._held:
            return False
        for content_hash in list(self._idle):
            self._evict(content_hash)
        return True

    def take_freed(self) -> list[str]:
        """Content hashes whose outputs the workers drop with the next step, before they encode; each told once.

        An output that was evicted and allocated again in between is among them: the workers encode it afresh.
        """
        freed, self._freed = list(self._freed), {}
        return freed

    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` naming the first violated invariant."""
        counted = dict.fromkeys(self._sizes, 0)
        for request_id, held in self._held.items():
            for content_hash, count in held.items():
                if content_hash not in counted or count < 1:
                    raise RuntimeError(f"request {request_id} refers {count} times to output {content_hash!r}")
                counted[content_hash] += count
        if counted != self._references:
            raise RuntimeError("encoder cache: the reference counts are not the sum of what requests hold")
        if {name for name, count in counted.items() if count == 0} != set(self._idle):
            raise RuntimeError("encoder cache: its idle outputs are not exactly the unreferenced ones")
        stored, idle = _total(self._sizes, self._sizes), _total(self._sizes, self._idle)
        if (stored, idle) != (self._num_stored, self._num_idle):
            raise RuntimeError(f"encoder cache: {self._num_stored} embeddings counted, {stored} stored")
        if not 0 <= idle <= stored <= self.capacity:
            raise RuntimeError(f"encoder cache: {stored} embeddings in room for {self.capacity}")

    def _make_room(self, size: int) -> None:
        while self.capacity - self._num_stored < size and self._idle:
            self._evict(next(iter(self._idle)))

    def _evict(self, content_hash: str) -> None:
        """Of an idle output."""
        size = self._sizes.pop(content_hash)
        del self._idle[content_hash], self._references[content_hash]
        self._num_idle -= size
        self._num_stored -= size
        self._freed[content_hash] = None

    def _release(self, content_hash: str, count: int) -> None:
        left = self._references[content_hash] - count
        self._references[content_hash] = left
        if left == 0:
            self._idle[content_hash] = None
            self._num_idle += self._sizes[content_hash]


def _total(sizes: Mapping[str, int], names: Iterable[str]) -> int:
    return sum(sizes[name] for name in names)

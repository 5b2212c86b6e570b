"""Media items of a step: what encoders run, within a budget per step and the room that workers have for outputs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hardpoint.interfaces import BoolArray, EncoderInputs, EngineRequest, Int32Array
from hardpoint_scheduling.kv_cache.encoder_cache import EncoderCache, EncoderItem
from hardpoint_scheduling.schedulers.request import LiveRequest


@dataclass(slots=True)
class _Held:
    """Items whose outputs a request refers to, by their place in ``record.features``; ``slot`` once it has one."""

    request: LiveRequest
    features: set[int] = field(default_factory=set)
    slot: int | None = None


@dataclass(frozen=True, slots=True)
class _Choice:
    """An item that this step adds to a request's; ``encodes``: its output is not there yet."""

    feature: int
    encodes: bool


class EncoderPlanner:
    """Lowers the tokens of a row to what its media items allow, and tells the workers what to encode (R3.46).

    An item is encoded as a whole before the first of its positions is computed, and its output kept until the last one
    is. Its positions come in one step as well, if any step has so many tokens: some models see all of an item from each
    of them. Only rows that have items ahead are looked at; ``watched``, bool over slots, says which.
    """

    def __init__(self, budget: int, cache_size: int, num_slots: int, step_tokens: int = 0) -> None:
        """``step_tokens``: most that a step computes of one request."""
        self.cache = EncoderCache(cache_size)
        self.watched: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self._budget = budget
        self._left = budget
        self._step_tokens = step_tokens
        self._held: dict[str, _Held] = {}
        self._chosen: dict[str, list[_Choice]] = {}

    @property
    def budget_left(self) -> int:
        """Embeddings that this step's encoders can still compute."""
        return self._left

    def refusal(self, record: EngineRequest, *, at_once: bool) -> str | None:
        """Why a request can never run: more than one step could encode, or the workers keep.

        ``at_once``: its whole prompt is computed in one step, so all its items count together.
        """
        sizes = {item.content_hash: item.num_embeddings for item in map(EncoderItem.of, record.features)}
        largest = sum(sizes.values()) if at_once else max(sizes.values(), default=0)
        if largest <= min(self._budget, self.cache.capacity):
            return None
        return (
            f"{largest} embeddings of media at once are more than encoder_budget ({self._budget}) or "
            f"encoder_cache_size ({self.cache.capacity}) allow"
        )

    def begin_step(self) -> None:
        """A whole budget again; outputs that no later step reads are given up."""
        self._left = self._budget
        self._chosen.clear()
        for request_id, held in list(self._held.items()):
            if held.slot is not None:
                self._release_read(request_id, held)

    def reserve(self, request: LiveRequest, computed: int, wanted: int, room: int = 0) -> int:
        """Take the items among the next ``wanted`` tokens; the number of tokens for which they were to be had.

        An item that does not fit ends the tokens before it. One that a cached prefix ends inside ends them at 0: the
        rest of it cannot be computed without its output. Where an item comes next that would be cut, all of it is
        wanted, if ``room`` has so many tokens.
        """
        features = request.record.features
        for index, feature in enumerate(features):
            if feature.offset >= computed + wanted:
                break
            end = feature.offset + feature.length
            if end <= computed or not feature.length:
                continue
            if end > computed + wanted and feature.length <= self._step_tokens:
                if feature.offset > computed or end > computed + room:
                    return max(feature.offset - computed, 0)
                wanted = end - computed
            if not self._take(request, index):
                return max(feature.offset - computed, 0)
        return wanted

    def settle(self, request: LiveRequest, end: int) -> None:
        """The step computes the request up to ``end`` only: give back the items it does not reach."""
        chosen = self._chosen.get(request.request_id)
        if chosen is None:
            return
        beyond = [choice for choice in chosen if request.record.features[choice.feature].offset >= end]
        self._chosen[request.request_id] = [choice for choice in chosen if choice not in beyond]
        self._return_items(self._held[request.request_id], beyond)

    def watch(self, request: LiveRequest, slot: int, computed: int) -> None:
        """The request runs in ``slot`` from now on."""
        features = request.record.features
        if features and features[-1].offset + features[-1].length > computed:
            self._held.setdefault(request.request_id, _Held(request)).slot = slot
            self.watched[slot] = True

    def lower(
        self, requests: Sequence[LiveRequest], slots: Int32Array, computed: Int32Array, wanted: Int32Array, most: int
    ) -> None:
        """Reserve for running rows, in their order; ``wanted`` int32 is lowered in place, to ``most`` at first."""
        for row in np.flatnonzero(self.watched[slots] & (wanted > 0)).tolist():
            wanted[row] = self.reserve(requests[row], int(computed[row]), min(int(wanted[row]), most), most)

    def keep_whole(
        self, requests: Sequence[LiveRequest], slots: Int32Array, computed: Int32Array, counts: Int32Array
    ) -> None:
        """Lower ``counts`` int32 in place where what is left for a running row ends inside an item, to before it."""
        for row in np.flatnonzero(self.watched[slots] & (counts > 0)).tolist():
            first, last = int(computed[row]), int(computed[row] + counts[row])
            for feature in requests[row].record.features:
                if feature.offset < last < feature.offset + feature.length <= feature.offset + self._step_tokens:
                    counts[row] = max(feature.offset - first, 0)

    def settle_rows(self, rows: Sequence[LiveRequest], ends: Int32Array) -> None:
        """What running rows get is decided: ``ends`` int32, where each of ``rows`` will be; all others stay."""
        if not self._chosen:
            return
        reached = {request.request_id: row for row, request in enumerate(rows)}
        for request_id in list(self._chosen):
            row = reached.get(request_id)
            self.settle(self._held[request_id].request, 0 if row is None else int(ends[row]))

    def give_up(self, request: LiveRequest, *, distrust: bool = False) -> None:
        """The request ended, lost its slot or was not admitted: it needs nothing, and this step nothing for it (R3.51).

        ``distrust``: outputs that only it refers to may be wrong.
        """
        held = self._held.pop(request.request_id, None)
        if held is None:
            return
        self._return_items(held, self._chosen.pop(request.request_id, []))
        self.cache.free(request.request_id)
        if held.slot is not None:
            self.watched[held.slot] = False
        if distrust:
            for index in held.features:
                self._discard_idle(request.record.features[index].content_hash)

    def build(self, rows: Sequence[LiveRequest]) -> EncoderInputs | None:
        """The workers' part of the step with these rows, None when there is nothing to do.

        The step is decided with it: what is given up from now on was encoded all the same.
        """
        where = {request.request_id: row for row, request in enumerate(rows)} if self._chosen else {}
        pairs = [
            (where[request_id], choice.feature)
            for request_id, chosen in self._chosen.items()
            for choice in chosen
            if choice.encodes
        ]
        self._chosen.clear()
        freed = tuple(self.cache.take_freed())
        if not pairs and not freed:
            return None
        columns = np.asarray(sorted(pairs), dtype=np.int32).reshape(-1, 2)
        return EncoderInputs(columns[:, 0].copy(), columns[:, 1].copy(), freed)

    def _take(self, request: LiveRequest, index: int) -> bool:
        """Whether the request has, or now gets, the output of its item."""
        held = self._held.setdefault(request.request_id, _Held(request))
        if index in held.features:
            return True
        item = EncoderItem.of(request.record.features[index])
        encodes = item.content_hash not in self.cache
        if (encodes and item.num_embeddings > self._left) or not self.cache.can_allocate((item,)):
            return False
        self.cache.allocate(request.request_id, item)
        held.features.add(index)
        if encodes:
            self._left -= item.num_embeddings
        self._chosen.setdefault(request.request_id, []).append(_Choice(index, encodes))
        return True

    def _return_items(self, held: _Held, choices: Sequence[_Choice]) -> None:
        """Items chosen in this step are not needed in it; other rows that count on an output encode it instead."""
        features = held.request.record.features
        for choice in choices:
            held.features.discard(choice.feature)
            self.cache.free_item(held.request.request_id, features[choice.feature].content_hash)
        for choice in choices:
            feature = features[choice.feature]
            if choice.encodes and not self._pass_on(feature.content_hash):
                self._left += EncoderItem.of(feature).num_embeddings
                self._discard_idle(feature.content_hash)

    def _pass_on(self, content_hash: str) -> bool:
        for request_id, chosen in self._chosen.items():
            features = self._held[request_id].request.record.features
            for place, choice in enumerate(chosen):
                if not choice.encodes and features[choice.feature].content_hash == content_hash:
                    chosen[place] = _Choice(choice.feature, encodes=True)
                    return True
        return False

    def _discard_idle(self, content_hash: str) -> None:
        if self.cache.is_idle(content_hash):
            self.cache.discard(content_hash)

    def _release_read(self, request_id: str, held: _Held) -> None:
        """Positions of steps under way still count as unread: they may come to nothing."""
        features, processed = held.request.record.features, held.request.num_processed_tokens
        for index in [i for i in held.features if features[i].offset + features[i].length <= processed]:
            held.features.remove(index)
            self.cache.free_item(request_id, features[index].content_hash)
        last = features[-1]
        if not held.features and last.offset + last.length <= processed and held.slot is not None:
            self.watched[held.slot] = False
            del self._held[request_id]

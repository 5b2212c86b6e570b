"""Media in decoders: what an encoder makes of an image takes the places of its placeholders among the tokens.

Each item of a prompt is a :class:`~hardpoint.interfaces.Feature` whose ``length`` positions all hold the placeholder id
of its kind. It is encoded as a whole in the step that computes the first of them, and found by content in later ones:
a chunk may end inside an item, a cached prefix may hold its beginning, and other requests may show the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Iterator
from dataclasses import replace
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from hardpoint.interfaces.request import Feature
from hardpoint.interfaces.scheduler import ENCODER_INPUTS
from hardpoint.interfaces.step import NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.encoder_outputs import Content, EncoderModel, EncoderOutputs
from hardpoint_torch_runtime.runner.input_batch import InputBatch, PlacedRows
from hardpoint_torch_runtime.runner.prompt_items import PromptItems

__all__ = ["MediaModel", "MediaStage", "refuse_media", "sound_media"]

MAX_ITEMS = 4096
"""Of one request: each of them is looked at in every step that computes its prompt."""


@runtime_checkable
class MediaModel(EncoderModel, Protocol):
    """A decoder that sees outputs of an encoder in the place of tokens' embeddings; C is its hidden size."""

    def placeholder_id(self, feature: Feature) -> int | None:
        """The token id at each of the feature's positions, or None for kinds of media that the model does not take."""

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Those of all kinds."""


def refuse_media(model: MediaModel, row: NewRow) -> str | None:
    """Why a request with these features cannot be computed by ``model``. Prompts without features are text, whatever
    ids they hold."""
    if not row.features:
        return None
    if len(row.features) > MAX_ITEMS:
        return f"the prompt brings {len(row.features)} items; at most {MAX_ITEMS} are taken"
    ids = row.token_ids[: row.num_prompt_tokens]
    is_left = np.isin(ids, list(model.placeholder_ids))
    for number, feature in enumerate(row.features):
        reason = _refuse_place(model, feature, ids) or model.refuse_input(feature)
        if reason is not None:
            return f"item {number} of the prompt ({feature.modality[:20]} at position {feature.offset}): {reason}"
        is_left[feature.offset : feature.offset + feature.length] = False
    if bool(is_left.any()):
        place = int(is_left.argmax())
        return (
            f"the prompt has a placeholder ({int(ids[place])}) at position {place} that belongs to no feature; give "
            f"one feature per item, as long as its placeholders are many ({int(is_left.sum())} are left over)"
        )
    return None


def sound_media(model: MediaModel, row: NewRow) -> tuple[Feature, ...]:
    """The items of a refused row before the first one that is at fault.

    They are computed all the same: another request that begins alike may share the blocks that they are in.
    """
    ids = row.token_ids[: row.num_prompt_tokens]
    sound = itertools.takewhile(
        lambda item: _refuse_place(model, item, ids) is None and model.refuse_input(item) is None,
        row.features[:MAX_ITEMS],
    )
    return tuple(sound)


def _refuse_place(model: MediaModel, feature: Feature, ids: np.ndarray) -> str | None:
    placeholder = model.placeholder_id(feature)
    if placeholder is None:
        return "this model does not take such input"
    if feature.length < 1:
        return "it has no positions; an item needs one per embedding"
    if feature.num_encoder_tokens not in (None, feature.length):
        return (
            f"num_encoder_tokens is {feature.num_encoder_tokens}, but each of its {feature.length} positions takes one "
            "embedding; leave it out"
        )
    place = slice(feature.offset, feature.offset + feature.length)
    if len(ids[place]) != feature.length or bool((ids[place] != placeholder).any()):
        return (
            f"its positions {place.start} to {place.stop - 1} must all hold the placeholder id {placeholder}; check "
            "offset and length, or let the model's processor expand the prompt"
        )
    return None


class _Piece(NamedTuple):
    """The rows [first, last) of a feature's output that a step computes, from its token ``start`` on."""

    feature: Feature
    first: int
    last: int
    start: int


class MediaStage:
    """Embeddings for the ``items`` of prompts, which ``model`` makes."""

    def __init__(self, model: MediaModel, items: PromptItems) -> None:
        self._outputs = EncoderOutputs(model)
        self._items = items

    @property
    def num_kept(self) -> int:
        """Outputs that the scheduler counts on."""
        return len(self._outputs)

    def join(self, step: SchedulerOutput, batch: InputBatch, refused: Container[int]) -> InputBatch:
        """``batch`` with what encoders made for its tokens; items of which nothing is kept are encoded now.

        Rows in ``refused`` slots are computed like others, see :func:`sound_media`.
        """
        del refused
        plan = step.extensions.get(ENCODER_INPUTS)
        self._outputs.drop_freed(plan)
        pieces = list(self._pieces(batch))
        if not pieces:
            return batch
        outputs = self._outputs.encode([piece.feature for piece in pieces], keeps=plan is not None)
        placed = (
            PlacedRows(piece.start, outputs[Content.of(piece.feature)][piece.first : piece.last]) for piece in pieces
        )
        return replace(batch, media=tuple(placed))

    def _pieces(self, batch: InputBatch) -> Iterator[_Piece]:
        for row in self._items.rows_ahead(batch):
            slot, computed = int(batch.slots[row]), int(batch.num_computed[row])
            end, start = computed + int(batch.num_scheduled[row]), int(batch.query_start_loc_cpu[row])
            for feature in self._items.of(slot):
                first, last = max(feature.offset, computed), min(feature.offset + feature.length, end)
                if first < last:
                    yield _Piece(feature, first - feature.offset, last - feature.offset, start + first - computed)

"""What besides token ids decides whether two blocks hold the same KV."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator

import numpy as np

from hardpoint.interfaces import EngineRequest, Feature


def has_extra_keys(request: EngineRequest) -> bool:
    """Whether any block of the request has extra keys."""
    return request.adapter is not None or has_content_keys(request)


def has_content_keys(request: EngineRequest) -> bool:
    """Whether more than tokens and adapter decides about the request's blocks."""
    return bool(request.features or request.cache_salt or request.prompt_embeds is not None)


def extra_keys(request: EngineRequest, start: int, end: int) -> bytes:
    """Canonical bytes of the extra keys of the block of tokens ``start .. end - 1``; empty when there are none.

    Fixed order: adapter, media, cache salt, embeddings (R11.16). Every field is a tag, a length and a payload, so
    different combinations never serialize alike.
    """
    parts: list[bytes] = []
    if request.adapter is not None:
        parts.append(_field(b"A", request.adapter.name.encode()))
    for feature in _overlapping(request.features, start, end):
        # R11.17: placeholder ids say nothing about content, and the item's place within the block matters. The
        # offset is negative for an item that began in an earlier block. One that is called something else, or said to
        # be of another length, is refused by the model where this one is not, and must not be taken for it.
        place = (feature.offset - start).to_bytes(8, "big", signed=True) + feature.length.to_bytes(8, "big")
        parts.append(_field(b"M", feature.content_hash.encode()) + _field(b"K", feature.modality.encode()) + place)
    if request.cache_salt and start == 0:
        parts.append(_field(b"S", request.cache_salt.encode()))
    if request.prompt_embeds is not None and start < len(request.prompt_embeds):
        parts.append(_field(b"E", _embedding_digest(request.prompt_embeds[start:end])))
    return b"".join(parts)


def _field(tag: bytes, payload: bytes) -> bytes:
    return tag + len(payload).to_bytes(4, "big") + payload


def _overlapping(features: tuple[Feature, ...], start: int, end: int) -> Iterator[Feature]:
    """Items that share a position with ``[start, end)``; ``features`` are in prompt order and do not overlap."""
    first = bisect_right(features, start, key=lambda feature: feature.offset + feature.length)
    for feature in features[first:]:
        if feature.offset >= end:
            return
        yield feature


def _embedding_digest(rows: np.ndarray) -> bytes:
    canonical = np.ascontiguousarray(rows, dtype=rows.dtype.newbyteorder("<"))
    header = f"{canonical.dtype.str}{canonical.shape}".encode()
    return hashlib.sha256(header + canonical.tobytes()).digest()

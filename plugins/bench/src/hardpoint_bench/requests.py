"""Requests of scripted runs. Ids are made of ranges that cannot meet, so equal tokens always mean a shared prefix."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from hardpoint.interfaces import EngineRequest, Int32Array, SamplingParams
from hardpoint_bench.scripted_worker import END_TOKEN, FIRST_SAMPLED

__all__ = ["HASH_IDS", "PREFIX_IDS", "hash_tokens", "make_request", "own_tokens", "prefix_tokens"]

_FIRST_OWN = 100_000
_OWN_IDS = 2**29 - _FIRST_OWN
_FIRST_PREFIX = 2**29
_FIRST_HASH = 2**30
PREFIX_IDS = 2**29
HASH_IDS = 2**30
"""Ids of shared prefixes and of hashed blocks are below these."""

_STOP_TOKENS = (FIRST_SAMPLED - 2, FIRST_SAMPLED - 1)
"""Never sampled, but looked for in every step, as real requests have such ids."""


def own_tokens(number: int, length: int) -> Int32Array:
    """Tokens that no other request has, int32 [length]."""
    return np.full(length, _FIRST_OWN + number % _OWN_IDS, dtype=np.int32)


def prefix_tokens(prefix_id: int, length: int) -> Int32Array:
    """The first ``length`` tokens of shared prefix ``prefix_id``, int32 [length]."""
    return np.full(length, _FIRST_PREFIX + prefix_id, dtype=np.int32)


def hash_tokens(hash_ids: list[int], block: int, length: int) -> Int32Array:
    """Tokens that are equal exactly where the ids of their blocks are, int32 [length]. ``block``: tokens per id."""
    return np.repeat(np.asarray(hash_ids, dtype=np.int32) + np.int32(_FIRST_HASH), block)[:length]


@lru_cache(maxsize=4096)
def _sampling(max_tokens: int) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, stop_token_ids=_STOP_TOKENS)


def make_request(
    request_id: str, prompt: Int32Array, max_tokens: int, *, arrival: float = 0.0, priority: int = 0, tenant: str = ""
) -> EngineRequest:
    """With stop ids and an end of sequence, as requests of clients have them. ``arrival`` in seconds."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=prompt,
        sampling=_sampling(max_tokens),
        eos_token_ids=(END_TOKEN,),
        arrival_time=arrival,
        priority=priority,
        tenant=tenant,
    )

"""Whether a prefix that all requests share is attended to once for all of them, and how the step is then split.

Cascade attention computes two partial results: all queries of the step as one sequence over the shared prefix, not
causal, since every query comes after it; and each request's queries over its own remaining keys, causal. Their merge by
log-sum-exp equals plain attention. It saves reading the prefix once per request, and costs a second launch and a merge.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from hardpoint.errors import ConfigError

__all__ = [
    "MIN_PREFIX_TOKENS",
    "MIN_ROWS",
    "CascadePlan",
    "CascadePolicy",
    "CascadeQuestion",
    "CascadeVerdict",
    "cascade_policy",
    "cascade_policy_names",
    "decide_cascade",
    "estimate_cascade",
    "obstacle",
    "plan_cascade",
    "register_cascade_policy",
]

MIN_PREFIX_TOKENS = 256
MIN_ROWS = 8
TILE = 128
"""Query rows, and keys, that one processor is taken to work on at once."""


@dataclass(frozen=True, slots=True)
class CascadeQuestion:
    """One layer in one step. ``num_processors``: independent workers of the device, such as multiprocessors or cores.

    ``is_local``: attention in chunks, or any other rule by which a query may not see all of the prefix.
    """

    prefix_tokens: int
    num_rows: int
    max_query_len: int
    num_heads: int
    num_kv_heads: int
    num_processors: int
    uses_alibi: bool = False
    uses_window: bool = False
    is_local: bool = False
    dcp_size: int = 1


@dataclass(frozen=True, slots=True)
class CascadeVerdict:
    """``reason`` says why, either way."""

    is_accepted: bool
    reason: str


CascadePolicy = Callable[[CascadeQuestion], CascadeVerdict]
"""A replaceable answer. It is asked where cascade would be correct at all; see :func:`decide_cascade`."""


def obstacle(question: CascadeQuestion) -> str | None:
    """Why the two partial results would not be plain attention, or None. No policy can overrule this."""
    if question.prefix_tokens < 1:
        return "the rows share no prefix"
    return _partial_view(question) or _spread(question)


def _partial_view(question: CascadeQuestion) -> str | None:
    if question.uses_alibi:
        return "ALiBi biases depend on where in its request a query is"
    if question.uses_window:
        return "a sliding window hides part of the prefix"
    if question.is_local:
        return "local attention hides part of the prefix"
    return None


def _spread(question: CascadeQuestion) -> str | None:
    if question.dcp_size == 1:
        return None
    return f"the prefix is spread over {question.dcp_size} ranks (decode context parallelism)"


def estimate_cascade(question: CascadeQuestion) -> CascadeVerdict:
    """The usual policy (R5.80 to R5.82): thresholds first, then a very rough model of tiles and waves."""
    refusal = _refusal(question)
    if refusal is not None:
        return CascadeVerdict(False, refusal)
    group = question.num_heads // question.num_kv_heads
    if group == 1 or question.max_query_len > 1:
        return CascadeVerdict(True, "plain attention would not split the keys")
    prefix_tiles = _ceil_div(question.prefix_tokens, TILE)
    # Only decodes get here, so the number of query tokens is that of rows.
    tiles = question.num_heads * _ceil_div(question.num_rows, TILE)
    cascade = _ceil_div(tiles, question.num_processors) * prefix_tiles
    pieces = question.num_rows * question.num_kv_heads * _ceil_div(group, TILE) * prefix_tiles
    split = _ceil_div(pieces, question.num_processors)
    verb = "below" if cascade < split else "not below"
    return CascadeVerdict(cascade < split, f"estimated at {cascade} waves, {verb} the {split} of split decoding")


def _refusal(question: CascadeQuestion) -> str | None:
    """R5.80, in its order."""
    if question.prefix_tokens < MIN_PREFIX_TOKENS:
        return f"the common prefix has {question.prefix_tokens} tokens, fewer than {MIN_PREFIX_TOKENS}"
    hidden = _partial_view(question)
    if hidden is not None:
        return hidden
    if question.num_rows < MIN_ROWS:
        return f"the step has {question.num_rows} requests, fewer than {MIN_ROWS}"
    return _spread(question)


def _always(question: CascadeQuestion) -> CascadeVerdict:
    return CascadeVerdict(True, f"always asked for, with {question.prefix_tokens} tokens in common")


def _never(question: CascadeQuestion) -> CascadeVerdict:
    return CascadeVerdict(False, f"never asked for, although {question.prefix_tokens} tokens are in common")


_POLICIES: dict[str, CascadePolicy] = {"estimate": estimate_cascade, "always": _always, "never": _never}


def register_cascade_policy(name: str, policy: CascadePolicy) -> None:
    """Let the backends' option ``cascade=name`` mean ``policy`` in this process; call it where workers load hooks.

    The same policy again changes nothing. Raises ``ConfigError`` where the name means another one.
    """
    if _POLICIES.setdefault(name, policy) is not policy:
        raise ConfigError(f"cascade policy {name!r} is {_POLICIES[name]} already; register {policy} by another name")


def cascade_policy(name: str) -> CascadePolicy:
    """Raises ``ConfigError`` for a name nobody registered."""
    if name not in _POLICIES:
        allowed = ", ".join(cascade_policy_names())
        raise ConfigError(f"cascade policy {name!r} is unknown; set the backend's option cascade to one of {allowed}")
    return _POLICIES[name]


def cascade_policy_names() -> tuple[str, ...]:
    return tuple(sorted(_POLICIES))


def decide_cascade(question: CascadeQuestion, policy: CascadePolicy = estimate_cascade) -> CascadeVerdict:
    """What ``policy`` says, unless it accepts what would be wrong."""
    verdict = policy(question)
    found = obstacle(question) if verdict.is_accepted else None
    return verdict if found is None else CascadeVerdict(False, found)


@dataclass(frozen=True, slots=True)
class CascadePlan:
    """The step in two parts (R5.21). Lengths are int32 on the host.

    Attributes:
        prefix_tokens: whole blocks, ``prefix_blocks`` of them; any row's table begins with these.
        prefix_query_starts: [2], all query tokens as one sequence, which is not causal.
        prefix_seq_lens: [1].
        suffix_seq_lens: [R], keys of each row behind the prefix; its blocks are those behind ``prefix_blocks``.
    """

    prefix_tokens: int
    prefix_blocks: int
    prefix_query_starts: np.ndarray
    prefix_seq_lens: np.ndarray
    suffix_seq_lens: np.ndarray


def plan_cascade(num_prefix_blocks: int, block_size: int, starts: np.ndarray, seq_lens: np.ndarray) -> CascadePlan:
    """Split a step with query offsets ``starts`` [R + 1] and key lengths ``seq_lens`` [R].

    Raises ``ValueError`` for an empty prefix, and for one that reaches into a row's new tokens: these may not see all
    of it.
    """
    prefix_tokens = num_prefix_blocks * block_size
    context = int((seq_lens - np.diff(starts)).min(initial=prefix_tokens))
    if not 0 < prefix_tokens <= context:
        raise ValueError(
            f"a common prefix of {num_prefix_blocks} blocks of {block_size} tokens must have a block or more and end "
            f"within the {context} tokens that the shortest row has cached before this step"
        )
    return CascadePlan(
        prefix_tokens=prefix_tokens,
        prefix_blocks=num_prefix_blocks,
        prefix_query_starts=np.array([starts[0], starts[-1]], dtype=np.int32),
        prefix_seq_lens=np.array([prefix_tokens], dtype=np.int32),
        suffix_seq_lens=(seq_lens - prefix_tokens).astype(np.int32),
    )


def _ceil_div(value: int, divisor: int) -> int:
    return -(-value // divisor)

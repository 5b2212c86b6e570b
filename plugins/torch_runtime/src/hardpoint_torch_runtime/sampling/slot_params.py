"""Sampling parameters by slot, and the metadata of the rows that sample in a step.

Plain numbers sit in arrays and are picked by one fancy index; a bit mask per slot says which features a request uses,
so that a step without, say, penalties never looks at them. Only rows with list-like parameters (whitelists, biases,
excluded sequences) are visited one by one.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.request import Int32Array, SamplingParams
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.slot_state import SlotState
from hardpoint_torch_runtime.sampling.metadata import (
    LogitEdits,
    LogprobRequest,
    Penalties,
    SamplingMetadata,
    TokenLists,
)
from hardpoint_torch_runtime.sampling.random import counter_uniforms

__all__ = ["Feature", "SlotSampling"]


class Feature(enum.IntFlag):
    """What a request's parameters make necessary."""

    NONE = 0
    RANDOM = enum.auto()
    SEEDED = enum.auto()
    TOP_K = enum.auto()
    TOP_P = enum.auto()
    MIN_P = enum.auto()
    PENALTIES = enum.auto()
    ALLOWED = enum.auto()
    BAD_WORDS = enum.auto()
    MIN_TOKENS = enum.auto()
    BIAS = enum.auto()
    LOGPROBS = enum.auto()
    PROMPT_LOGPROBS = enum.auto()


@dataclass(frozen=True, slots=True)
class _Lists:
    """List-like parameters of one request, as arrays ready for the device.

    ``bad_tokens`` are excluded always; ``bad_words`` holds longer sequences by the token before their last, so that a
    step looks only at those that the newest token may lead to.
    """

    allowed: np.ndarray
    bad_tokens: np.ndarray
    bad_words: dict[int, list[tuple[int, ...]]]
    stop_tokens: np.ndarray
    bias_tokens: np.ndarray
    bias_values: np.ndarray


class SlotSampling:
    """``eos_token_ids`` are the model's; ``seed`` feeds the draws of requests without a seed of their own."""

    def __init__(
        self,
        num_slots: int,
        vocab_size: int,
        device: torch.device,
        *,
        seed: int = 0,
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self._vocab_size = vocab_size
        self._device = device
        self._eos = eos_token_ids
        self._unseeded = np.random.Generator(np.random.PCG64(seed))
        self._features = np.zeros(num_slots, dtype=np.int32)
        self._temperature = np.zeros(num_slots, dtype=np.float32)
        self._top_p = np.ones(num_slots, dtype=np.float32)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._min_p = np.zeros(num_slots, dtype=np.float32)
        self._penalties = np.zeros((num_slots, 3), dtype=np.float32)
        self._seeds = np.zeros(num_slots, dtype=np.uint64)
        self._min_tokens = np.zeros(num_slots, dtype=np.int32)
        self._num_logprobs = np.zeros(num_slots, dtype=np.int64)
        self._num_prompt_logprobs = np.zeros(num_slots, dtype=np.int64)
        self._lists: dict[int, _Lists] = {}
        self._no_rows = torch.zeros(0, dtype=torch.int64, device=device)
        # Slots with any feature at all, and of them those that owe log-probabilities of their prompt: without them a
        # step has nothing to look up.
        self._special: set[int] = set()
        self._explaining: set[int] = set()

    def enter(self, row: NewRow) -> None:
        """Set every field of the slot, so that nothing of an earlier owner survives."""
        slot, params = row.slot, row.sampling
        features = _features_of(params)
        if len(row.token_ids) > row.num_prompt_tokens:
            # The prompt's log-probabilities left with the first output; a resumed row does not owe them again.
            features &= ~Feature.PROMPT_LOGPROBS
        self._features[slot] = features
        _keep_member(self._special, slot, bool(features))
        _keep_member(self._explaining, slot, bool(features & Feature.PROMPT_LOGPROBS))
        self._temperature[slot] = params.temperature
        self._top_p[slot] = params.top_p
        self._top_k[slot] = min(params.top_k, self._vocab_size)
        self._min_p[slot] = params.min_p
        self._penalties[slot] = (params.repetition_penalty, params.frequency_penalty, params.presence_penalty)
        self._seeds[slot] = 0 if params.seed is None else params.seed & 0xFFFF_FFFF_FFFF_FFFF
        self._min_tokens[slot] = params.min_tokens
        self._num_logprobs[slot] = 0 if params.logprobs is None else params.logprobs
        self._num_prompt_logprobs[slot] = 0 if params.prompt_logprobs is None else params.prompt_logprobs
        if features & _LISTS:
            self._lists[slot] = self._lists_of(params)
        else:
            self._lists.pop(slot, None)

    def release(self, slots: Int32Array) -> None:
        self._features[slots] = Feature.NONE
        if not self._special:
            return
        for slot in slots.tolist():
            self._special.discard(slot)
            self._explaining.discard(slot)
            self._lists.pop(slot, None)

    def features(self, slots: Int32Array) -> Feature:
        """Union over the given slots."""
        if not self._special:
            return Feature.NONE
        return Feature(int(np.bitwise_or.reduce(self._features[slots]))) if len(slots) else Feature.NONE

    def needs_tokens(self, slots: Int32Array) -> bool:
        """Whether parameters of any of these slots look at the generated tokens themselves, not just their number."""
        return bool(self.features(slots) & (Feature.PENALTIES | Feature.BAD_WORDS))

    @property
    def owes_prompt_logprobs(self) -> bool:
        """Whether any request waits for log-probabilities of its prompt."""
        return bool(self._explaining)

    @property
    def is_plain(self) -> bool:
        """Whether every request wants nothing but the most probable token."""
        return not self._special

    def prompt_logprob_counts(self, slots: Int32Array) -> tuple[np.ndarray, np.ndarray]:
        """Positions in ``slots`` that asked for prompt log-probabilities, and how many alternatives each wants."""
        if not self._explaining:
            return _NOBODY, _NOBODY
        rows = self._rows_with(slots, Feature.PROMPT_LOGPROBS)
        return rows, self._num_prompt_logprobs[slots[rows]]

    def gather(
        self,
        slots: Int32Array,
        state: SlotState,
        *,
        grammar: torch.Tensor | None = None,
        grammar_rows: torch.Tensor | None = None,
        num_ahead: Int32Array | None = None,
    ) -> SamplingMetadata:
        """Metadata for the sampling rows ``slots`` (int32 [S]), given the tokens known now.

        ``num_ahead`` int32 [S]: so many of the guesses behind a slot's tokens count as known. A slot may then occur
        several times.
        """
        used = self.features(slots)
        if used is Feature.NONE and grammar is None:
            return SamplingMetadata(slots, self._no_rows)
        lengths: Int32Array = state.num_tokens[slots] if num_ahead is None else state.num_tokens[slots] + num_ahead
        random_rows = self._rows_with(slots, Feature.RANDOM)
        random_slots = slots[random_rows]
        has_random = len(random_rows) > 0
        return SamplingMetadata(
            slots=slots,
            random_rows=self._tensor(random_rows),
            temperature=self._tensor(self._temperature[random_slots]) if has_random else None,
            uniforms=self._uniforms(random_slots, state, lengths[random_rows]) if has_random else None,
            min_p=self._tensor(self._min_p[random_slots]) if used & Feature.MIN_P else None,
            top_k=self._tensor(self._top_k[random_slots]) if used & Feature.TOP_K else None,
            top_p=self._tensor(self._top_p[random_slots]) if used & Feature.TOP_P else None,
            allowed=self._allowed(slots) if used & Feature.ALLOWED else None,
            grammar=grammar,
            grammar_rows=grammar_rows,
            bad_words=self._bad_words(slots, state, lengths) if used & Feature.BAD_WORDS else None,
            stop_tokens=self._stop_tokens(slots, state, lengths) if used & Feature.MIN_TOKENS else None,
            logit_bias=self._bias(slots) if used & Feature.BIAS else None,
            penalties=self._penalties_of(slots, state, lengths) if used & Feature.PENALTIES else None,
            logprobs=self._logprobs(slots) if used & Feature.LOGPROBS else None,
        )

    def _tensor(self, array: np.ndarray) -> torch.Tensor:
        # A copy from unpinned memory has read it when this returns, so the device need not be waited for.
        return torch.from_numpy(array).to(self._device, non_blocking=True)

    def _rows_with(self, slots: Int32Array, feature: Feature) -> np.ndarray:
        return np.flatnonzero(self._features[slots] & int(feature))

    def _lists_of(self, params: SamplingParams) -> _Lists:
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(self._eos))
        return _Lists(
            allowed=np.asarray(sorted(set(params.allowed_token_ids)), dtype=np.int64),
            bad_tokens=np.asarray(sorted({w[0] for w in params.bad_words_token_ids if len(w) == 1}), dtype=np.int64),
            bad_words=_by_token_before_last(params.bad_words_token_ids),
            stop_tokens=np.asarray(sorted(stops), dtype=np.int64),
            bias_tokens=np.fromiter(params.logit_bias.keys(), dtype=np.int64),
            bias_values=np.fromiter(params.logit_bias.values(), dtype=np.float32),
        )

    def _uniforms(self, slots: Int32Array, state: SlotState, lengths: Int32Array) -> torch.Tensor:
        """One draw per random row. Seeded rows: a pure function of seed and output position."""
        seeded = (self._features[slots] & int(Feature.SEEDED)) != 0
        draws = np.empty(len(slots), dtype=np.float64)
        num_unseeded = int(len(slots) - seeded.sum())
        if num_unseeded:
            draws[~seeded] = self._unseeded.random(num_unseeded)
        if num_unseeded < len(slots):
            own = slots[seeded]
            draws[seeded] = counter_uniforms(self._seeds[own], lengths[seeded] - state.num_prompt_tokens[own])
        return self._tensor(draws)

    def _pairs(self, rows: list[int], tokens: list[np.ndarray]) -> TokenLists | None:
        if not tokens:
            return None
        repeated = np.repeat(np.asarray(rows, dtype=np.int64), [len(ids) for ids in tokens])
        return TokenLists(self._tensor(repeated), self._tensor(np.concatenate(tokens)))

    def _allowed(self, slots: Int32Array) -> TokenLists | None:
        rows = self._rows_with(slots, Feature.ALLOWED).tolist()
        return self._pairs(rows, [self._lists[int(slots[row])].allowed for row in rows])

    def _stop_tokens(self, slots: Int32Array, state: SlotState, lengths: Int32Array) -> TokenLists | None:
        too_short = lengths - state.num_prompt_tokens[slots] < self._min_tokens[slots]
        rows = np.flatnonzero(((self._features[slots] & int(Feature.MIN_TOKENS)) != 0) & too_short).tolist()
        return self._pairs(rows, [self._lists[int(slots[row])].stop_tokens for row in rows])

    def _bias(self, slots: Int32Array) -> LogitEdits | None:
        rows = self._rows_with(slots, Feature.BIAS).tolist()
        lists = [self._lists[int(slots[row])] for row in rows]
        targets = self._pairs(rows, [entry.bias_tokens for entry in lists])
        if targets is None:
            return None
        return LogitEdits(targets, self._tensor(np.concatenate([entry.bias_values for entry in lists])))

    def _bad_words(self, slots: Int32Array, state: SlotState, lengths: Int32Array) -> TokenLists | None:
        rows: list[int] = []
        tokens: list[np.ndarray] = []
        for row in self._rows_with(slots, Feature.BAD_WORDS).tolist():
            slot = int(slots[row])
            output = state.token_ids[slot, state.num_prompt_tokens[slot] : lengths[row]]
            lists = self._lists[slot]
            candidates = lists.bad_words.get(int(output[-1]), ()) if len(output) else ()
            last = [word[-1] for word in candidates if _is_about_to_complete(word, output)]
            excluded = np.append(lists.bad_tokens, np.asarray(last, dtype=np.int64)) if last else lists.bad_tokens
            if len(excluded):
                rows.append(row)
                tokens.append(excluded)
        return self._pairs(rows, tokens)

    def _penalties_of(self, slots: Int32Array, state: SlotState, known: Int32Array) -> Penalties:
        rows = self._rows_with(slots, Feature.PENALTIES)
        own, lengths = slots[rows], known[rows]
        positions = np.arange(int(lengths.max()), dtype=np.int32)
        token_ids = state.token_ids[own, : len(positions)].astype(np.int64)
        token_ids[positions >= lengths[:, None]] = self._vocab_size
        values = self._penalties[own]
        return Penalties(
            rows=self._tensor(rows),
            repetition=self._tensor(values[:, 0].copy()),
            frequency=self._tensor(values[:, 1].copy()),
            presence=self._tensor(values[:, 2].copy()),
            token_ids=self._tensor(token_ids),
            is_output=self._tensor(positions >= state.num_prompt_tokens[own][:, None]),
        )

    def _logprobs(self, slots: Int32Array) -> LogprobRequest:
        rows = self._rows_with(slots, Feature.LOGPROBS)
        return LogprobRequest(rows, self._num_logprobs[slots[rows]])


_NOBODY = np.zeros(0, dtype=np.int64)
_LISTS = Feature.ALLOWED | Feature.BAD_WORDS | Feature.MIN_TOKENS | Feature.BIAS


def _keep_member(members: set[int], slot: int, belongs: bool) -> None:
    if belongs:
        members.add(slot)
    else:
        members.discard(slot)


def _features_of(params: SamplingParams) -> Feature:
    is_random = not params.is_greedy
    has_penalties = bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)
    present = {
        Feature.RANDOM: is_random,
        Feature.SEEDED: is_random and params.seed is not None,
        Feature.TOP_K: is_random and params.top_k > 0,
        Feature.TOP_P: is_random and params.top_p < 1.0,
        Feature.MIN_P: is_random and params.min_p > 0.0,
        Feature.PENALTIES: has_penalties,
        Feature.ALLOWED: bool(params.allowed_token_ids),
        Feature.BAD_WORDS: bool(params.bad_words_token_ids),
        Feature.MIN_TOKENS: params.min_tokens > 0,
        Feature.BIAS: bool(params.logit_bias),
        Feature.LOGPROBS: params.logprobs is not None,
        Feature.PROMPT_LOGPROBS: params.prompt_logprobs is not None,
    }
    features = Feature.NONE
    for feature, is_used in present.items():
        if is_used:
            features |= feature
    return features


def _by_token_before_last(words: tuple[tuple[int, ...], ...]) -> dict[int, list[tuple[int, ...]]]:
    found: dict[int, list[tuple[int, ...]]] = {}
    for word in words:
        if len(word) > 1:
            found.setdefault(word[-2], []).append(word)
    return found


def _is_about_to_complete(word: tuple[int, ...], output: Int32Array) -> bool:
    """The generated text ends in all but the last token of ``word``, which has at least two."""
    start = len(word) - 1
    return len(output) >= start and output[-start:].tolist() == list(word[:-1])

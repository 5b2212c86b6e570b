"""The sampling chain. Its order is semantics: a different order does not crash, it silently degrades text.

(1) snapshot of raw log-probabilities, (2) float32, (3) whitelist and grammar, (4) excluded sequences, (5) processors
that can change the argmax, (6) penalties, (7) sampling, (8) log-probabilities of the result (R6.10). Inside (7):
greedy candidate, temperature, argmax-invariant processors, top-k and top-p, draw, choice per row (R6.11).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.step import LogprobArrays
from hardpoint_torch_runtime.runner.buffers import is_host_memory
from hardpoint_torch_runtime.sampling.constraints import add_bias, apply_penalties, exclude, keep_legal, keep_only
from hardpoint_torch_runtime.sampling.logprobs import RankedLogprobs, gather_logprobs, index_tensor, rank_logprobs
from hardpoint_torch_runtime.sampling.metadata import SamplingMetadata
from hardpoint_torch_runtime.sampling.random import draw
from hardpoint_torch_runtime.sampling.truncation import apply_min_p, apply_top_k_top_p

__all__ = ["LaunchedSample", "Sampler", "SamplerOutput"]

_BROKEN_LOGITS = "the model produced values that are not numbers for this request"
_NOTHING_ALLOWED = "no token is allowed at this position by the request's constraints"


@dataclass(frozen=True, slots=True)
class SamplerOutput:
    """``token_ids`` int32 [S]; ``failures`` maps rows without a usable token to a client-safe reason.

    ``logprobs.rows`` index the S sampled rows; failed rows have no entry.
    """

    token_ids: np.ndarray
    failures: dict[int, str]
    logprobs: LogprobArrays | None


@dataclass(frozen=True, slots=True)
class LaunchedSample:
    """A draw whose result is still on the device.

    ``token_ids`` int64 [S], all within the vocabulary; ``is_broken`` and ``is_barred`` bool [S] mark rows without a
    usable token: the model's values are not numbers, or nothing is allowed. ``logprobs`` for rows ``logprob_rows``.
    """

    token_ids: torch.Tensor
    is_broken: torch.Tensor
    is_barred: torch.Tensor
    logprobs: RankedLogprobs | None
    logprob_rows: np.ndarray

    @property
    def tensors(self) -> dict[str, torch.Tensor]:
        """By name, what :meth:`finish` needs on the host."""
        own = {"token_ids": self.token_ids, "is_broken": self.is_broken, "is_barred": self.is_barred}
        return own if self.logprobs is None else own | self.logprobs.tensors

    def finish(self, host: Mapping[str, np.ndarray]) -> SamplerOutput:
        failures = dict.fromkeys(np.flatnonzero(host["is_barred"]).tolist(), _NOTHING_ALLOWED)
        failures |= dict.fromkeys(np.flatnonzero(host["is_broken"]).tolist(), _BROKEN_LOGITS)
        logprobs = None
        if self.logprobs is not None:
            logprobs = self.logprobs.to_arrays(host, self.logprob_rows)
            kept = ~np.isin(self.logprob_rows, list(failures))
            if not kept.all():
                logprobs = LogprobArrays(
                    logprobs.rows[kept], logprobs.token_ids[kept], logprobs.logprobs[kept], logprobs.ranks[kept]
                )
        return SamplerOutput(host["token_ids"].astype(np.int32), failures, logprobs)


class Sampler:
    """Holds no batch state: equal logits and metadata give an equal result whatever ran before (R6.2).

    ``processors`` are the ``logits_processor`` plugins, in configured order. ``checks_invariance`` compares the argmax
    around those that declare to keep it (R6.14), at the price of two more passes over the logits each. ``truncate`` is
    the kernel of the seam ``top_k_top_p``; it is not called for rows that use neither.
    """

    def __init__(
        self,
        processors: Sequence[LogitsProcessor] = (),
        *,
        checks_invariance: bool = False,
        truncate: Callable[[torch.Tensor, torch.Tensor | None, torch.Tensor | None], torch.Tensor] = apply_top_k_top_p,
    ) -> None:
        self._truncate = truncate
        self._checks_invariance = checks_invariance
        self._changing = tuple(entry for entry in processors if not entry.argmax_invariant)
        self._invariant = tuple(entry for entry in processors if entry.argmax_invariant)

    def __call__(self, logits: torch.Tensor, metadata: SamplingMetadata) -> SamplerOutput:
        """Draw one token per row of ``logits`` [S, V]; may overwrite them."""
        if metadata.num_rows == 0:
            return SamplerOutput(np.zeros(0, dtype=np.int32), {}, None)
        greedy = self.most_probable(logits)
        if _is_plain(metadata) and not self._changing:
            return greedy
        failures = greedy.failures
        snapshot = self._snapshot(logits, metadata)
        logits = self._constrain(logits.to(torch.float32), metadata)
        best = logits.max(dim=-1)
        for row in _not_finite(best.values.cpu().numpy()):
            failures.setdefault(row, _NOTHING_ALLOWED)
        tokens = best.indices
        if not metadata.all_greedy:
            _neutralize(logits, failures)
            tokens[metadata.random_rows] = self._draw(logits, best.values, metadata)
            _refuse_undrawn(tokens, logits.shape[-1], failures)
        logprobs = self._logprobs(snapshot, tokens, metadata, failures)
        return SamplerOutput(tokens.cpu().numpy().astype(np.int32), failures, logprobs)

    def most_probable(self, logits: torch.Tensor) -> SamplerOutput:
        """The first of the largest tokens of every row of ``logits`` [S, V], whatever processors there are."""
        tokens, peaks = _best_on_host(logits)
        return SamplerOutput(tokens, dict.fromkeys(_not_finite(peaks), _BROKEN_LOGITS), None)

    @property
    def changes_argmax(self) -> bool:
        """Whether processors may make another token the most probable one."""
        return bool(self._changing)

    @property
    def has_processors(self) -> bool:
        """Whether plugins with a state of their own take part."""
        return bool(self._changing or self._invariant)

    def launch(self, logits: torch.Tensor, metadata: SamplingMetadata) -> LaunchedSample:
        """:meth:`__call__` without waiting for the device: failed rows are found out afterwards."""
        best = logits.max(dim=-1)
        is_broken, is_barred = ~best.values.isfinite(), torch.zeros_like(best.values, dtype=torch.bool)
        snapshot = self._snapshot(logits, metadata)
        tokens = best.indices
        if not _is_plain(metadata) or self._changing:
            logits = self._constrain(logits.to(torch.float32), metadata)
            best = logits.max(dim=-1)
            tokens, is_barred = best.indices, ~best.values.isfinite()
            if not metadata.all_greedy:
                tokens[metadata.random_rows] = self._draw(logits, best.values, metadata)
                is_outside = tokens >= logits.shape[-1]
                is_broken, tokens = is_broken | (is_outside & ~is_barred), tokens.masked_fill(is_outside, 0)
        ranked, rows = None, np.zeros(0, dtype=np.int64)
        if snapshot is not None and metadata.logprobs is not None:
            rows = metadata.logprobs.rows
            ranked = rank_logprobs(snapshot, tokens[index_tensor(rows, tokens)], metadata.logprobs.counts)
        return LaunchedSample(tokens, is_broken, is_barred, ranked, rows)

    def _snapshot(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor | None:
        """Log-probabilities of the model itself, for the rows that asked (R6.12): float32 [N, V]."""
        if metadata.logprobs is None:
            return None
        return torch.log_softmax(logits[index_tensor(metadata.logprobs.rows, logits)].to(torch.float32), dim=-1)

    def _constrain(self, logits: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """Steps (3) to (6), in place."""
        if metadata.allowed is not None:
            keep_only(logits, metadata.allowed)
        if metadata.grammar is not None and metadata.grammar_rows is not None:
            keep_legal(logits, metadata.grammar_rows, metadata.grammar)
        if metadata.bad_words is not None:
            exclude(logits, metadata.bad_words)
        if metadata.stop_tokens is not None:
            exclude(logits, metadata.stop_tokens)
        if metadata.logit_bias is not None:
            add_bias(logits, metadata.logit_bias)
        for processor in self._changing:
            logits = processor.apply(logits, metadata.slots)
        if metadata.penalties is not None:
            apply_penalties(logits, metadata.penalties)
        return logits

    def _draw(self, logits: torch.Tensor, peaks: torch.Tensor, metadata: SamplingMetadata) -> torch.Tensor:
        """int64 [R'] for the random rows; greedy rows are not touched. ``peaks`` [S] are the rows' largest logits."""
        if metadata.temperature is None or metadata.uniforms is None:
            raise RuntimeError("random rows need a temperature and a draw each")
        rows = logits if metadata.all_random else logits[metadata.random_rows]
        # Relative to the peak, no temperature can make a logit overflow.
        rows = rows.sub_(peaks[metadata.random_rows].unsqueeze(1)).div_(metadata.temperature.unsqueeze(1))
        if metadata.min_p is not None:
            apply_min_p(rows, metadata.min_p)
        if self._invariant:
            slots = metadata.slots[metadata.random_rows.cpu().numpy()]
            for processor in self._invariant:
                rows = self._apply_invariant(processor, rows, slots)
        if metadata.top_k is not None or metadata.top_p is not None:
            rows = self._truncate(rows, metadata.top_k, metadata.top_p)
        return draw(rows, metadata.uniforms)

    def _apply_invariant(self, processor: LogitsProcessor, rows: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        if not self._checks_invariance:
            return processor.apply(rows, slots)
        # Values, not positions, are compared: among equal logits any may come first.
        best = rows.argmax(dim=-1, keepdim=True)
        rows = processor.apply(rows, slots)
        if bool((rows.gather(1, best) < rows.amax(dim=-1, keepdim=True)).any()):
            raise RuntimeError(
                f"logits processor {processor} declares argmax_invariant, but another token became the "
                "most probable one; declare argmax_invariant = False"
            )
        return rows

    def _logprobs(
        self, snapshot: torch.Tensor | None, tokens: torch.Tensor, metadata: SamplingMetadata, failures: dict[int, str]
    ) -> LogprobArrays | None:
        if snapshot is None or metadata.logprobs is None:
            return None
        rows, counts = metadata.logprobs.rows, metadata.logprobs.counts
        kept = np.asarray([row not in failures for row in rows.tolist()], dtype=np.bool_)
        if not kept.any():
            return None
        if not kept.all():
            snapshot, rows, counts = snapshot[torch.from_numpy(kept)], rows[kept], counts[kept]
        return gather_logprobs(snapshot, tokens[torch.from_numpy(rows)], counts, rows)


def _is_plain(metadata: SamplingMetadata) -> bool:
    """Nothing but an argmax is asked for. Asked in every step, hence spelled out."""
    return (
        metadata.all_greedy
        and metadata.allowed is None
        and metadata.grammar is None
        and metadata.bad_words is None
        and metadata.stop_tokens is None
        and metadata.logit_bias is None
        and metadata.penalties is None
        and metadata.logprobs is None
    )


def _best_on_host(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Of each row of ``logits`` [S, V] the first of its largest tokens, int32 [S], and its logit [S].

    What is in host memory is read where it is, by this thread alone: waking a pool takes longer than the search, and
    whoever computes at the same time keeps the other cores. A row with NaN has NaN as its largest.
    """
    if logits.dtype is not torch.float32 or not is_host_memory(logits.device):
        best = logits.max(dim=-1)
        return best.indices.cpu().numpy().astype(np.int32), best.values.to(torch.float32).cpu().numpy()
    rows = logits.numpy()
    tokens = rows.argmax(axis=1)
    if len(tokens) == 1:
        return tokens.astype(np.int32), rows[0, tokens]
    return tokens.astype(np.int32), rows[np.arange(len(tokens)), tokens]


def _not_finite(peaks: np.ndarray) -> list[int]:
    """Rows whose largest logit is no finite number. A maximum over NaN is NaN, so one number per row tells."""
    finite = np.isfinite(peaks)
    return [] if finite.all() else np.flatnonzero(~finite).tolist()


def _refuse_undrawn(tokens: torch.Tensor, vocabulary: int, failures: dict[int, str]) -> None:
    """Rows that a processor left without a distribution fail; their token, outside the vocabulary, becomes 0."""
    is_outside = tokens >= vocabulary
    if bool(is_outside.any()):
        for row in torch.nonzero(is_outside).squeeze(1).tolist():
            failures.setdefault(row, _BROKEN_LOGITS)
        tokens[is_outside] = 0


def _neutralize(logits: torch.Tensor, failures: dict[int, str]) -> None:
    """Give failed rows harmless values: their result is discarded, but it must not raise."""
    if failures:
        logits[list(failures)] = 0.0

"""Incremental text of one sequence, with stop strings that never leak (R6.60 - R6.71).

Characters flow ``decode stream -> window -> text``. The window is the tail a stop string may still reach into; what
leaves it is final::

    ... text (never changes) ... | window: up to longest stop - 1 characters | new piece

Cost per token depends on the stop strings, not on the length of the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.tokenizer import Tokenizer


class Detokenizer:
    """``num_tokens`` counts every recorded token. Text before ``min_tokens`` is never searched (R6.68)."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], params: SamplingParams) -> None:
        self.num_tokens = 0
        self.stopped_by: str | None = None
        self._stream = tokenizer.decode_stream(prompt_ids, skip_special_tokens=params.skip_special_tokens)
        self._stop = params.stop
        self._min_tokens = params.min_tokens
        self._include_stop = params.include_stop_str_in_output
        self._reach = max((len(text) for text in self._stop), default=1) - 1
        self._final: list[str] = []
        self._window = ""
        self._num_taken = 0

    def update(self, token_ids: Sequence[int], stop_terminated: bool = False) -> int:
        """Record tokens until a stop string completes; returns how many were used, :attr:`stopped_by` tells why.

        ``stop_terminated``: the last id ended the sequence by itself, so its text is left out unless stops are
        included (R6.64).
        """
        undecoded = len(token_ids) - 1 if stop_terminated and not self._include_stop else len(token_ids)
        for used, token_id in enumerate(token_ids):
            self.num_tokens += 1
            if used < undecoded and self._append(self._stream.step(token_id) or ""):
                return used + 1
        return len(token_ids)

    def take(self, finished: bool) -> str:
        """Text that became certain since the last call; everything once ``finished`` (R6.69)."""
        if finished:
            self._release(0)
        elif self._include_stop:
            # Text before an included stop is shown at once, yet stays in the window to be matched.
            shown, self._num_taken = self._num_taken, len(self._window)
            return self._drain() + self._window[shown:]
        return self._drain()

    def text(self, finished: bool) -> str:
        """All visible text so far, for callers that want the whole each time. Do not mix with :meth:`take`."""
        if finished:
            self._release(0)
        if len(self._final) > 1:
            self._final = ["".join(self._final)]
        return "".join(self._final) + (self._window if self._include_stop else "")

    def _drain(self) -> str:
        text, self._final = "".join(self._final), []
        return text

    def _release(self, keep: int) -> None:
        """Move all but ``keep`` characters out of the window, less what was shown of them already."""
        cut = max(len(self._window) - keep, 0)
        if cut:
            self._final.append(self._window[min(self._num_taken, cut) : cut])
            self._window = self._window[cut:]
            self._num_taken = max(self._num_taken - cut, 0)

    def _append(self, piece: str) -> bool:
        """Add text and search it. True when a stop string completed; the text is then cut (R6.67)."""
        if not piece:
            return False
        self._window += piece
        if self._stop and self.num_tokens > self._min_tokens:
            found = self._search(len(piece))
            if found is not None:
                self.stopped_by, end = found
                self._window = self._window[: end if self._include_stop else end - len(self.stopped_by)]
                return True
        self._release(self._reach)
        return False

    def _search(self, num_new: int) -> tuple[str, int] | None:
        """The stop string that completes first among the new characters, and where it ends (R6.65, R6.66)."""
        best: tuple[str, int] | None = None
        for stop in self._stop:
            start = max(len(self._window) - num_new - len(stop) + 1, 0)
            position = self._window.find(stop, start)
            if position >= 0 and (best is None or position + len(stop) < best[1]):
                best = (stop, position + len(stop))
        return best

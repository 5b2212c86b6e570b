"""When prefills go on: data-parallel engines do them in the same steps, so that none waits for another's long step."""

from __future__ import annotations


class PrefillBalance:
    """Prefills run in every ``interval``-th step only, while decodes run in all of them (R3.43).

    Engines count steps alike, so their prefill steps fall together. The cadence is given up as long as it costs
    throughput: while nobody decodes, and after an aligned step that was full, since then more is waiting than aligned
    steps can take.
    """

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._was_full = False

    @property
    def enabled(self) -> bool:
        return self._interval > 1

    def defers(self, step_id: int, any_decodes: bool) -> bool:
        """Whether prefills wait for a later step than ``step_id``."""
        return any_decodes and not self._was_full and not self._is_aligned(step_id)

    def note(self, step_id: int, was_full: bool) -> None:
        """The step is planned; ``was_full``: no more tokens fit it."""
        if self._is_aligned(step_id):
            self._was_full = was_full

    def _is_aligned(self, step_id: int) -> bool:
        return step_id % self._interval == 0

"""How well the prefix cache does of late: sums over the most recent admissions."""

from __future__ import annotations

from collections import deque

RECENT_REQUESTS = 1000


class HitWindow:
    """Tokens looked up and found, of the last ``size`` requests. O(1) per request, bounded memory."""

    def __init__(self, size: int = RECENT_REQUESTS) -> None:
        self.num_queried = 0
        self.num_found = 0
        self._entries: deque[tuple[int, int]] = deque()
        self._size = size

    def add(self, num_queried: int, num_found: int) -> None:
        """One admitted request: its tokens, and those of them that were cached."""
        self.num_queried += num_queried
        self.num_found += num_found
        self._entries.append((num_queried, num_found))
        if len(self._entries) > self._size:
            queried, found = self._entries.popleft()
            self.num_queried -= queried
            self.num_found -= found

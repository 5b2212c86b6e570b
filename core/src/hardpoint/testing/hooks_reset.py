"""What production code has no way to do: a process forgets its hooks, so that the next test starts with none."""

from __future__ import annotations

from hardpoint.plugins import hooks

__all__ = ["forget_hooks"]


def forget_hooks() -> None:
    """The next boot in this process creates and boots its hooks anew. Nobody is told ``process_stopping``."""
    hooks._of_process.clear()

"""Garbage collection as the engine process has it."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["as_in_an_engine", "num_collections"]


@contextmanager
def as_in_an_engine() -> Iterator[None]:
    """Automatic, but full collections pass over whatever is there already: an engine freezes what its start made."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def num_collections() -> int:
    """Of all generations so far."""
    return sum(generation["collections"] for generation in gc.get_stats())

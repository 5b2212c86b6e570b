"""The seed of block hashes in a process whose hashes nobody shares."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["own_hash_seed"]

_VARIABLE = "PYTHONHASHSEED"
_SEED = "0"


@contextmanager
def own_hash_seed() -> Iterator[None]:
    """The operator's seed if there is one, else a fixed one, which takes no more time.

    Without any, a hash that is not cryptographic warns that other instances cannot use what is cached here; none would.
    """
    before = os.environ.get(_VARIABLE)
    if before not in (None, "", "random"):
        yield
        return
    os.environ[_VARIABLE] = _SEED
    try:
        yield
    finally:
        if before is None:
            del os.environ[_VARIABLE]
        else:
            os.environ[_VARIABLE] = before

"""Memory to hand to another process by descriptor. It has no name, and goes with its last descriptor."""

from __future__ import annotations

import os
import sys
import tempfile


def anonymous_file(label: str, size: int) -> int:
    """A new file of ``size`` zero bytes, not inherited unless passed on; ``label`` shows in memory maps.

    Kept in memory where the system can do that, so that a full disk stops nothing.
    """
    if sys.platform == "linux":
        descriptor = os.memfd_create(label)
    else:
        with tempfile.TemporaryFile() as file:
            descriptor = os.dup(file.fileno())
    os.ftruncate(descriptor, size)
    return descriptor

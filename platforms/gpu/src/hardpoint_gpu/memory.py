"""How much of a device the KV cache may take: pure arithmetic over what was measured. All numbers are bytes.

A worker asks twice: after its weights are loaded it computes the largest step, without a cache, and then takes
``budget - used``. What the step needed at its worst is still held by the framework's allocator at that moment (or was,
which the peak tells), so it counts as used and the cache leaves room for it.
"""

from __future__ import annotations

from hardpoint.errors import ConfigError

__all__ = ["budget", "used"]


def budget(total: int, fraction: float, reserve: int) -> int:
    """What may be used in all: ``fraction`` of the device, less ``reserve`` for what is allocated after the cache
    (captured graphs, workspaces of libraries).

    Raises ``ConfigError`` where nothing is left.
    """
    left = int(total * fraction) - reserve
    if left <= 0:
        raise ConfigError(
            f"nothing is left of a device of {total} bytes: memory_fraction {fraction:g} less reserve_bytes {reserve}; "
            "raise the one or lower the other under plugins.platform"
        )
    return left


def used(device_used: int, reserved: int, peak_reserved: int) -> int:
    """What counts as used: everything in use on the device, by all processes, and what this process's allocator held at
    its worst and has given back since."""
    return device_used + max(0, peak_reserved - reserved)

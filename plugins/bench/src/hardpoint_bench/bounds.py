"""How large the numbers of a benchmark may be: beyond these a run would overflow, never end, or eat all memory."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hardpoint.config import EngineConfig
from hardpoint.errors import ConfigError

__all__ = [
    "BOUNDS", "MAX_ARRIVAL_S", "MAX_BLOCKS", "MAX_LENGTH", "MAX_POSITIONS", "Bound", "check_option", "check_settings",
    "memory_told",
]  # fmt: skip

MAX_LENGTH = 2**24
"""Tokens of a prompt, an answer or a block."""
MAX_ARRIVAL_S = 1e15
"""Simulated seconds, about 30 million years: so that sums of them stay finite."""
MAX_POSITIONS = 2**30
"""Tokens of a request or of a step. Positions are int32, and rounding up to whole blocks must not overflow them."""
_REQUESTS = 1_000_000
MAX_BLOCKS = 20_000_000
"""The null block included. A scheduler takes some seconds to make so many."""
_SEED = 2**63 - 1


@dataclass(frozen=True, slots=True)
class Bound:
    """Least and most of one option, both allowed."""

    least: float
    most: float
    hint: str = ""

    def check(self, option: str, value: float) -> None:
        """Raises ``ConfigError`` for a ``value`` outside, or one that is not a number."""
        if self.least <= value <= self.most:
            return
        hint = f": {self.hint}" if self.hint else ""
        raise ConfigError(
            f"{option} {value} must be at least {_shown(self.least)} and at most {_shown(self.most)}{hint}"
        )


_RUNNING = Bound(1, _REQUESTS)
_LENGTH = Bound(1, MAX_LENGTH)
_TOKENS = Bound(1, MAX_POSITIONS)

BOUNDS = {
    "running": _RUNNING,
    "waiting": Bound(0, _REQUESTS),
    "steps": Bound(1, 10_000_000),
    "repeats": Bound(1, 1_000),
    "blocks": Bound(2, MAX_BLOCKS, "one of them is the null block"),
    "lookup": Bound(2, MAX_LENGTH, "the last token of a prompt is always computed"),
    "prompt-len": _LENGTH,
    "output-len": _LENGTH,
    "shared-prefix": Bound(0, MAX_LENGTH),
    "hash-block": _LENGTH,
    "requests": Bound(1, 1_000_000_000),
    "rate": Bound(1e-3, 1e9, "requests per second"),
    "length-spread": Bound(0, 3, "0 makes all lengths alike"),
    "prefixes": Bound(1, 1_000_000),
    "tenants": Bound(1, 1_000_000),
    "priorities": Bound(1, 1_000_000),
    "trace-seed": Bound(-_SEED, _SEED),
    "speed": Bound(1e-6, 1e6, "2 doubles the load"),
    "batch": Bound(1, 100_000),
    "id-seed": Bound(0, _SEED),
    "threads": Bound(1, 4_096),
    "shrink": Bound(1, 1_024),
    "step-cost": Bound(1e-3, 1e9, "microseconds; or 0"),
}
"""By the options of the command."""

_SETTINGS = {
    "max-num-seqs": _RUNNING,
    "max-num-active-seqs": _RUNNING,
    "max-waiting": Bound(1, 2**31 - 1),
    "max-num-batched-tokens": _TOKENS,
    "long-prefill-threshold": Bound(0, MAX_POSITIONS),
    "max-model-len": _TOKENS,
    "block-size": _LENGTH,
    "num-kv-blocks": BOUNDS["blocks"],
}


def check_option(name: str, value: float) -> None:
    """Raises ``ConfigError`` for a ``value`` that option ``--name`` cannot have."""
    BOUNDS[name].check(f"--{name}", value)


def check_settings(engine: EngineConfig) -> None:
    """Raises ``ConfigError`` for a setting that an engine might have, but no benchmark has room for."""
    for name, bound in _SETTINGS.items():
        field = name.replace("-", "_")
        for section in (engine.scheduler, engine.cache, engine.model):
            value = getattr(section, field, None)
            if value is not None:
                bound.check(f"--{name}", value)


@contextmanager
def memory_told() -> Iterator[None]:
    """Turns ``MemoryError`` into ``ConfigError``: each number was in its bounds, together they are too much."""
    try:
        yield
    except MemoryError as error:
        advice = "lower --running, --waiting, --steps, --prompt-len or --blocks"
        raise ConfigError(f"the benchmark needs more memory than there is ({error}); {advice}") from None


def _shown(number: float) -> str:
    is_long = math.isfinite(number) and number == int(number) and abs(number) < 2**63
    return f"{int(number):,}" if is_long else f"{number:g}"

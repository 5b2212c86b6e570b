"""Made-up traces for capacity planning: Poisson arrivals, log-normal lengths, prompts that share prefixes."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields
from itertools import accumulate

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint_bench.bounds import MAX_LENGTH, check_option
from hardpoint_bench.requests import own_tokens, prefix_tokens
from hardpoint_bench.trace import TraceRequest, line_of

__all__ = ["Mix"]

_MAX_FACTOR = 64
"""No length is more than this many times the mean."""
_LAST_TENANT = 64


@dataclass(frozen=True, slots=True)
class Mix:
    """What kind of requests come, and how many.

    ``rate`` per second; gaps are exponential. Lengths in tokens: ``prompt_len`` and ``output_len`` are means,
    ``length_spread`` the sigma of their log-normal distribution (0: all alike). The first ``shared_prefix`` tokens are
    one of ``prefixes`` texts, drawn for each request; a prompt is always at least one token longer. Each tenant sends
    half as much as the one before. ``priorities`` are drawn evenly from 0 to one less.
    """

    requests: int
    rate: float
    prompt_len: int
    output_len: int
    length_spread: float = 0.0
    shared_prefix: int = 0
    prefixes: int = 1
    tenants: int = 1
    priorities: int = 1
    seed: int = 0

    def check(self) -> None:
        """Raises ``ConfigError`` for numbers that make no trace."""
        for field in fields(self):
            name = "trace-seed" if field.name == "seed" else field.name.replace("_", "-")
            check_option(name, getattr(self, field.name))
        if self.shared_prefix >= self.prompt_len:
            raise ConfigError(f"--shared-prefix {self.shared_prefix} must be less than --prompt-len {self.prompt_len}")

    def __call__(self) -> Iterator[TraceRequest]:
        """The requests, the same ones at every call."""
        for number, arrival, shared, length, output, rest in self._draws():
            prefix, priority, tenant = rest
            own = own_tokens(number, length - shared)
            prompt = np.concatenate([prefix_tokens(prefix, shared), own]) if shared else own
            yield TraceRequest(number, arrival, prompt, output, priority, tenant)

    def lines(self) -> Iterator[bytes]:
        """The same requests as lines of a trace file."""
        for _, arrival, shared, length, output, rest in self._draws():
            prefix, priority, tenant = rest
            yield line_of(
                arrival_s=arrival,
                prefix_id=prefix if shared else None,
                prefix_length=shared or None,
                input_length=length,
                output_length=output,
                priority=priority,
                tenant=tenant,
            )

    def _draws(self) -> Iterator[tuple[int, float, int, int, int, tuple[int, int, str]]]:
        source = random.Random(self.seed)
        arrival = 0.0
        # Summed once, and not at every draw; further tenants are so small that they add nothing to the sum.
        tenants = range(min(self.tenants, _LAST_TENANT))
        weights = list(accumulate(0.5**index for index in tenants))
        for number in range(self.requests):
            shared = self.shared_prefix
            length = max(self._length(source, self.prompt_len), shared + 1)
            output = self._length(source, self.output_len)
            prefix = source.randrange(self.prefixes)
            priority = source.randrange(self.priorities)
            tenant = f"tenant-{source.choices(tenants, cum_weights=weights)[0]}" if self.tenants > 1 else ""
            yield number, round(arrival, 6), shared, length, output, (prefix, priority, tenant)
            arrival += source.expovariate(self.rate)

    def _length(self, source: random.Random, mean: int) -> int:
        if not self.length_spread:
            return mean
        # The mean of a log-normal distribution is exp(mu + sigma^2 / 2).
        mu = math.log(mean) - self.length_spread**2 / 2
        drawn = source.lognormvariate(mu, self.length_spread)
        return max(1, min(round(drawn), mean * _MAX_FACTOR, MAX_LENGTH))

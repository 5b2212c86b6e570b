"""How many tokens a KV cache block may hold: what attention backends declare, and the smallest size all of them take.

Sizes are in tokens.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.errors import ConfigError

BLOCK_SIZES_CAPABILITY = "block_sizes"
"""Key of ``@plugin(capabilities=...)`` under which an attention backend states its rule for the launcher."""


@dataclass(frozen=True, slots=True)
class BlockSizeRule:
    """Kernel block sizes a backend accepts: exact sizes, any multiple of ``multiple_of``, or both.

    Raises ``ConfigError`` for a size below 1 and for a rule that accepts nothing.
    """

    multiple_of: int | None = None
    exact: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        sizes = self.exact if self.multiple_of is None else (*self.exact, self.multiple_of)
        if min(sizes, default=0) < 1:
            raise ConfigError(f"{self!r} is no rule for block sizes; give multiple_of or exact sizes of 1 or more")

    def __str__(self) -> str:
        multiples = () if self.multiple_of is None else (f"any multiple of {self.multiple_of}",)
        return " or ".join((*multiples, *map(str, sorted(self.exact))))

    def accepts(self, block_size: int) -> bool:
        return block_size in self.exact or (self.multiple_of is not None and block_size % self.multiple_of == 0)

    @classmethod
    def from_capability(cls, value: Any, origin: str) -> BlockSizeRule:
        """The rule stated by a mapping of this class's fields.

        Raises ``ConfigError`` for anything else, naming ``origin``, the plugin that states it.
        """
        try:
            return msgspec.convert(value, cls)
        except (msgspec.ValidationError, ConfigError) as error:
            wanted = 'write {"multiple_of": 16} or {"exact": [16, 32]}'
            raise ConfigError(f"{origin}: {value!r} states no block sizes ({error}); {wanted}") from error


def smallest_block_size(rules: Mapping[str, BlockSizeRule], minimum: int = 1) -> int:
    """The smallest size of at least ``minimum`` that every rule accepts; without rules ``minimum`` itself.

    A size that none names exactly is a multiple of all ``multiple_of``, so few candidates need a look. Raises
    ``ConfigError`` listing each rule by its name (an attention backend's) when they have no size in common.
    """
    candidates = [size for rule in rules.values() for size in rule.exact if size >= minimum]
    multiples = [rule.multiple_of for rule in rules.values() if rule.multiple_of is not None]
    if len(multiples) == len(rules):
        step = math.lcm(*multiples)
        candidates.append(-(-max(minimum, 1) // step) * step)
    for size in sorted(candidates):
        if all(rule.accepts(size) for rule in rules.values()):
            return size
    listed = "; ".join(f"{name}: {rule}" for name, rule in sorted(rules.items()))
    raise ConfigError(
        f"no KV block size of {minimum} tokens or more suits every attention backend ({listed}); name one backend with "
        "--attention-backend, or set --block-size"
    )

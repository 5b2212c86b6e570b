"""How kernels are tiled: tables by what is computed and on what, and the pure functions that read them.

Nothing is measured at start: the first token would wait for it, and two runs could round differently. The tables hold
what fits each device's shared memory and registers, which the ahead-of-time compile check proves for every entry.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = [
    "INTERPRETED",
    "INTERPRETED_TOKENS",
    "SPLITS",
    "TABLES",
    "WRITE_TOKENS",
    "Phase",
    "SizeClass",
    "Target",
    "TileConfig",
    "choose_splits",
    "choose_tiles",
    "next_power_of_two",
    "size_class",
    "target_for",
]

SPLITS = (1, 2, 4, 8, 16)
MIN_KEYS_PER_SPLIT = 256
PROGRAMS_PER_PROCESSOR = 2


class Phase(enum.StrEnum):
    """``DECODE``: no row has more queries than a small block holds anyway."""

    PREFILL = "prefill"
    DECODE = "decode"


class Target(enum.StrEnum):
    """Devices whose tiles differ. ``SM_80`` stands for all with its little shared memory, newer ones among them."""

    SM_80 = "sm_80"
    SM_90 = "sm_90"
    SM_100 = "sm_100"
    GFX942 = "gfx942"
    INTERPRETER = "interpreter"


class SizeClass(enum.StrEnum):
    """Head sizes that share an entry: up to so many entries, or latents whose first entries are the values."""

    UP_TO_64 = "64"
    UP_TO_128 = "128"
    UP_TO_256 = "256"
    LATENT = "latent"


@dataclass(frozen=True, slots=True)
class TileConfig:
    """``block_m``: lanes for queries times heads. ``tile``: keys read at once."""

    block_m: int
    tile: int
    num_warps: int = 4
    num_stages: int = 1


Key = tuple[SizeClass, int, Phase]
"""Size class, bytes of an element of computation, phase."""


def _table(halves: tuple[TileConfig, ...], floats: tuple[TileConfig, ...]) -> Mapping[Key, TileConfig]:
    keys = [(size, phase) for size in SizeClass for phase in Phase]
    pairs = ((2, halves), (4, floats))
    return {(size, width, phase): found for width, row in pairs for (size, phase), found in zip(keys, row, strict=True)}


# Rows: sizes up to 64, 128, 256, latents; each first for prefills, then for decodes. Large tiles of float32 are read in
# one stage: where keys are converted behind that, pipelined ones spill up to five kilobytes a thread.
_SMALL = _table(
    (
        *(TileConfig(64, 64, 4, 2), TileConfig(16, 64, 4, 2)),
        *(TileConfig(64, 32, 8, 2), TileConfig(16, 64, 4, 2)),
        *(TileConfig(32, 32, 4, 2), TileConfig(16, 32, 4, 2)),
        *(TileConfig(16, 32, 8, 1), TileConfig(16, 32, 8, 1)),
    ),
    (
        *(TileConfig(32, 32, 8, 1), TileConfig(16, 32, 4, 2)),
        *(TileConfig(32, 32, 8, 1), TileConfig(16, 32, 8, 1)),
        *(TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 1)),
        *(TileConfig(16, 16, 8, 1), TileConfig(16, 16, 8, 1)),
    ),
)
_LARGE = _table(
    (
        *(TileConfig(128, 64, 8, 2), TileConfig(16, 64, 4, 3)),
        *(TileConfig(128, 64, 8, 2), TileConfig(16, 64, 4, 3)),
        *(TileConfig(64, 32, 8, 2), TileConfig(16, 32, 4, 3)),
        *(TileConfig(32, 32, 8, 2), TileConfig(16, 32, 8, 2)),
    ),
    (
        *(TileConfig(32, 32, 8, 1), TileConfig(16, 32, 4, 2)),
        *(TileConfig(16, 32, 8, 1), TileConfig(16, 32, 8, 1)),
        *(TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 1)),
        *(TileConfig(16, 16, 8, 1), TileConfig(16, 16, 8, 1)),
    ),
)
_CDNA = _table(
    (
        *(TileConfig(64, 64, 4, 1), TileConfig(16, 64, 4, 1)),
        *(TileConfig(64, 32, 4, 1), TileConfig(16, 32, 4, 1)),
        *(TileConfig(32, 32, 4, 1), TileConfig(16, 32, 4, 1)),
        *(TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 1)),
    ),
    (
        *(TileConfig(32, 32, 4, 1), TileConfig(16, 32, 4, 1)),
        *(TileConfig(32, 16, 4, 1), TileConfig(16, 16, 4, 1)),
        *(TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 1)),
        *(TileConfig(16, 16, 4, 1), TileConfig(16, 16, 4, 1)),
    ),
)
TABLES: Mapping[Target, Mapping[Key, TileConfig]] = {
    Target.SM_80: _SMALL,
    Target.SM_90: _LARGE,
    Target.SM_100: _LARGE,
    Target.GFX942: _CDNA,
}
INTERPRETED = TileConfig(256, 128)
"""The interpreter takes the same time for a tile of any size, so that few large ones are fastest."""


WRITE_TOKENS = 8
INTERPRETED_TOKENS = 128
"""Tokens whose keys and values one program writes: few enough that a decode does not idle."""


def target_for(capability: tuple[int, int] | None, *, is_hip: bool = False) -> Target:
    """``capability`` (major, minor) as torch tells it; None on a device without: the interpreter's."""
    if capability is None:
        return Target.INTERPRETER
    if is_hip:
        return Target.GFX942
    major = capability[0]
    return {9: Target.SM_90, 10: Target.SM_100}.get(major, Target.SM_80)


def size_class(head_size: int, *, is_latent: bool) -> SizeClass:
    if is_latent:
        return SizeClass.LATENT
    for limit in (SizeClass.UP_TO_64, SizeClass.UP_TO_128):
        if head_size <= int(limit):
            return limit
    return SizeClass.UP_TO_256


def choose_tiles(target: Target, size: SizeClass, element_bytes: int, phase: Phase) -> TileConfig:
    """The entry for computation in elements of ``element_bytes``."""
    if target is Target.INTERPRETER:
        return INTERPRETED
    return TABLES[target][size, 4 if element_bytes > 2 else 2, phase]


def choose_splits(*, num_tokens: int, programs: int, max_seq_len: int, processors: int, max_parts: int) -> int:
    """Parts that every row's keys are cut into, of ``SPLITS``, from what the host knows without asking the device.

    ``programs`` would run without splitting, on ``processors`` (multiprocessors). More only where these would idle,
    where each part is worth starting, and where there is scratch for all ``max_parts``, counted over tokens (R5.33).
    """
    wanted = min(
        -(-PROGRAMS_PER_PROCESSOR * processors // max(programs, 1)),
        max_seq_len // MIN_KEYS_PER_SPLIT,
        max_parts // max(num_tokens, 1),
    )
    return max((splits for splits in SPLITS if splits <= wanted), default=1)


def next_power_of_two(value: int, minimum: int = 16) -> int:
    """At least ``minimum``, the smallest side of a product that tensor cores take."""
    return max(minimum, 1 << max(value - 1, 0).bit_length())

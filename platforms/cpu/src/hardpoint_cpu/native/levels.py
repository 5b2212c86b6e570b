"""Levels of processors that the kernels are compiled for: which one fits, and the compiler's flags for it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["LEVELS", "Level", "best_level", "named_level"]


@dataclass(frozen=True, slots=True)
class Level:
    """``needs``: processor features under the names of Linux; ``flags``: what makes the compiler use them."""

    name: str
    machine: str
    needs: frozenset[str]
    flags: tuple[str, ...]


_AVX2 = ("avx2", "fma", "f16c")
_AVX2_FLAGS = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq")
_AVX512_FLAGS = (*_AVX2_FLAGS, *("-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq", "-mprefer-vector-width=512"))
_VNNI = (*_AVX512, "avx512_vnni")
_VNNI_FLAGS = (*_AVX512_FLAGS, "-mavx512vnni")
_BF16 = (*_VNNI, "avx512_bf16")
_BF16_FLAGS = (*_VNNI_FLAGS, "-mavx512bf16")
_AMX = (*_BF16, "amx_tile", "amx_int8", "amx_bf16")
_AMX_FLAGS = (*_BF16_FLAGS, "-mamx-tile", "-mamx-int8", "-mamx-bf16")

LEVELS: tuple[Level, ...] = (
    Level("amx", "x86_64", frozenset(_AMX), _AMX_FLAGS),
    Level("avx512_bf16", "x86_64", frozenset(_BF16), _BF16_FLAGS),
    Level("avx512_vnni", "x86_64", frozenset(_VNNI), _VNNI_FLAGS),
    Level("avx512", "x86_64", frozenset(_AVX512), _AVX512_FLAGS),
    Level("avx2_vnni", "x86_64", frozenset((*_AVX2, "avx_vnni")), (*_AVX2_FLAGS, "-mavxvnni")),
    Level("avx2", "x86_64", frozenset(_AVX2), _AVX2_FLAGS),
    Level("neon_dot", "aarch64", frozenset(("asimd", "asimddp")), ("-march=armv8.2-a+dotprod",)),
    Level("neon", "aarch64", frozenset(("asimd",)), ("-march=armv8-a",)),
    Level("generic", "", frozenset(), ()),
)
"""The best first. Levels that need less than another one run wherever that one does."""


def best_level(machine: str, features: Collection[str]) -> Level:
    """The first level whose needs ``features`` meet on a ``machine`` such as ``x86_64``; ``generic`` always does."""
    return next(level for level in LEVELS if _fits(level, machine, features))


def named_level(name: str, machine: str, features: Collection[str]) -> Level:
    """``name``, or the best one for ``auto``. Raises ``ValueError`` for one that is unknown or does not run here."""
    if name == "auto":
        return best_level(machine, features)
    found = next((level for level in LEVELS if level.name == name), None)
    if found is None:
        raise ValueError(f"there is no level {name!r}; allowed: auto, {', '.join(level.name for level in LEVELS)}")
    if not _fits(found, machine, features):
        missing = ", ".join(sorted(found.needs - frozenset(features))) or f"a {found.machine} processor"
        raise ValueError(f"level {name!r} does not run here, where this is missing: {missing}")
    return found


def _fits(level: Level, machine: str, features: Collection[str]) -> bool:
    return level.machine in ("", machine) and level.needs <= frozenset(features)

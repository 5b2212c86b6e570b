"""Compiled kernels for tests: of the level that suits this machine best in the quick tier, of all in the slow one."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from functools import cache

import pytest

from hardpoint_cpu.host import Host
from hardpoint_cpu.native.build import KernelBuild, cache_folder, find_compiler
from hardpoint_cpu.native.levels import LEVELS, named_level
from hardpoint_cpu.native.library import NativeLibrary

# What test_cpu_native_sanitized.py sets for the process in which it runs all these tests again.
FLAGS_VARIABLE = "HARDPOINT_TEST_KERNEL_FLAGS"

_FEATURES = Host().cpu_flags()
_BEST = named_level("auto", platform.machine(), _FEATURES)


def _runs(name: str) -> bool:
    try:
        named_level(name, platform.machine(), _FEATURES)
    except ValueError:
        return False
    return True


_LEVELS = [
    pytest.param(level.name, id=level.name, marks=() if level is _BEST else pytest.mark.slow)
    for level in LEVELS
    if _runs(level.name)
]


@cache
def load(level: str = _BEST.name, threads: int = 2, spin_us: int = 100) -> NativeLibrary:
    chosen = named_level(level, platform.machine(), _FEATURES)
    flags = tuple(os.environ.get(FLAGS_VARIABLE, "").split())
    return NativeLibrary(
        KernelBuild(chosen, cache_folder(), find_compiler(), flags).compile(), threads=threads, spin_us=spin_us
    )


@pytest.fixture
def load_native() -> Callable[..., NativeLibrary]:
    """``load_native(level, threads=2, spin_us=100)``: of ``level`` (the best), compiled if need be, loaded once."""
    return load


@pytest.fixture(params=_LEVELS)
def native(request: pytest.FixtureRequest) -> NativeLibrary:
    """Kernels on two threads, of every level that runs here, one after the other."""
    return load(request.param)


@pytest.fixture
def best_native() -> NativeLibrary:
    """Kernels on two threads, of the level that suits this machine best."""
    return load()

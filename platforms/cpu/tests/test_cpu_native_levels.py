"""Which level fits a processor, from fabricated feature sets."""

from __future__ import annotations

import pytest

from hardpoint_cpu.native.levels import LEVELS, best_level, named_level

AVX2 = {"sse2", "avx", "avx2", "fma", "f16c"}
AVX512 = {*AVX2, "avx512f", "avx512bw", "avx512vl", "avx512dq"}
VNNI = {*AVX512, "avx512_vnni"}
AMX = {*VNNI, "avx512_bf16", "amx_tile", "amx_int8", "amx_bf16"}


@pytest.mark.parametrize(
    ("machine", "features", "expected"),
    [
        ("x86_64", AMX, "amx"),
        ("x86_64", AMX - {"amx_bf16"}, "avx512_bf16"),
        ("x86_64", AMX - {"amx_bf16", "avx512_bf16"}, "avx512_vnni"),
        ("x86_64", VNNI, "avx512_vnni"),
        ("x86_64", AVX512 | {"avx_vnni"}, "avx512"),
        ("x86_64", AVX512 - {"avx512dq"}, "avx2"),
        ("x86_64", AVX2 | {"avx_vnni"}, "avx2_vnni"),
        ("x86_64", AVX2, "avx2"),
        ("x86_64", AVX2 - {"fma"}, "generic"),
        ("x86_64", set(), "generic"),
        ("aarch64", {"asimd", "asimddp"}, "neon_dot"),
        ("aarch64", {"asimd"}, "neon"),
        ("aarch64", AVX2, "generic"),
        ("riscv64", {"asimd", *AMX}, "generic"),
    ],
)
def test_the_best_level_needs_no_more_than_there_is(machine: str, features: set[str], expected: str) -> None:
    assert best_level(machine, features).name == expected
    assert named_level("auto", machine, features).name == expected


def test_a_lower_level_may_be_asked_for_by_name() -> None:
    for name in ("avx512_bf16", "avx512_vnni", "avx512", "avx2", "generic"):
        assert named_level(name, "x86_64", AMX).name == name


def test_a_level_that_does_not_run_says_what_is_missing() -> None:
    with pytest.raises(ValueError, match="'avx512' does not run here.*avx512bw, avx512dq, avx512f, avx512vl"):
        named_level("avx512", "x86_64", AVX2)
    with pytest.raises(ValueError, match="'neon' does not run here.*missing: asimd"):
        named_level("neon", "x86_64", AMX)
    with pytest.raises(ValueError, match="'neon' does not run here.*an? aarch64 processor"):
        named_level("neon", "x86_64", {"asimd"})


def test_an_unknown_level_lists_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"no level 'sse9'; allowed: auto, amx, avx512_bf16, .*generic"):
        named_level("sse9", "x86_64", AMX)


def test_levels_are_ordered_and_named_once() -> None:
    assert len({level.name for level in LEVELS}) == len(LEVELS)
    for index, level in enumerate(LEVELS):
        better = [other for other in LEVELS[:index] if other.machine == level.machine]
        assert not any(other.needs <= level.needs for other in better), f"{level.name} could never be the best"

"""Every Triton kernel of attention in every configuration that its tables hold, for the ahead-of-time compile check.

Run ``python -m hardpoint_testing_torch.triton_aot plugins/attention/tests/attention_kernel_cases.py:kernel_cases
--write plugins/attention/tests/attention_kernel_resources.json`` after a change of a kernel or a table.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import triton.language as tl

from hardpoint_attention.triton.configs import (
    TABLES,
    WRITE_TOKENS,
    Phase,
    SizeClass,
    Target,
    TileConfig,
    next_power_of_two,
)
from hardpoint_attention.triton.kernels.attention import attend
from hardpoint_attention.triton.kernels.cache_write import write_states
from hardpoint_attention.triton.kernels.partials import combine_parts, merge_pair
from hardpoint_testing_torch.triton_aot import KernelCase

__all__ = ["kernel_cases"]

SIZES = {
    SizeClass.UP_TO_64: (64, 64),
    SizeClass.UP_TO_128: (128, 128),
    SizeClass.UP_TO_256: (256, 256),
    SizeClass.LATENT: (576, 512),
}
"""Keys' and values' entries of a class: the largest it stands for."""
GROUPS = {SizeClass.LATENT: 16}
NAMES = {2: "bf16", 4: "fp32"}
COMPUTE = {2: tl.bfloat16, 4: tl.float32}
DECODE_SPLITS = 8
SPILL_BUDGET = 16
"""Bytes: a value or two that live through the whole loop over keys, and are read once behind it."""


def tensor(dtype: str, dimensions: int) -> tuple[Any, ...]:
    """A tensor as kernels take it: aligned, with contiguous entries."""
    return (f"*{dtype}:16", *["i32:16"] * (dimensions - 1), 1)


class Variant(NamedTuple):
    """What a call of ``attend`` asks for beside tiles."""

    name: str = "plain"
    stored: str | None = None
    token_scales: bool = False
    head_scales: bool = False
    soft_cap: bool = False
    slopes: bool = False
    sinks: bool = False
    is_paged: bool = True
    causal: int = 1
    window: int = 0
    chunk: int = 0
    keeps_prompt: bool = False
    has_ranges: bool = False
    with_lse: bool = False


VARIANTS = (
    Variant("scores", soft_cap=True, slopes=True, sinks=True, window=512, with_lse=True),
    Variant("masks", causal=2, chunk=1024, has_ranges=True),
    Variant("prompt", window=512, keeps_prompt=True),
    Variant("int8", stored="i8", token_scales=True),
    Variant("fp8_e5m2", stored="fp8e5", head_scales=True),
    Variant("encoder", is_paged=False, causal=0),
)
E4M3 = Variant("fp8_e4m3", stored="fp8e4nv", head_scales=True)


def attend_case(
    variant: Variant, size: SizeClass, width: int, phase: Phase, tiles: TileConfig, targets: tuple[str, ...]
) -> KernelCase:
    keys, values = SIZES[size]
    name, group = NAMES[width], GROUPS.get(size, 4)
    is_latent = size is SizeClass.LATENT
    splits = DECODE_SPLITS if phase is Phase.DECODE else 1
    states = tensor(variant.stored or name, 4)
    logs = ("*fp32:16", "i32", "i32", "i32", "fp32")
    scale = ("*fp32:16", 1)
    pointer = "*fp32:16"
    return KernelCase(
        f"attend[{variant.name},{size},{name},{phase},{tiles.block_m}x{tiles.tile},warps={tiles.num_warps},"
        f"stages={tiles.num_stages}]",
        attend,
        {
            "query": tensor(name, 3),
            "states": (states, None if is_latent else states, tensor("fp32", 4) if variant.token_scales else None),
            "output": tensor("fp32" if splits > 1 else name, 4),
            "rows": ("*i32:16", "*i32:16", "*i32:16", "i32", "*i32:16"),
            "masks": (
                "*i1:16" if variant.causal == 2 else None,
                "*i32:16" if variant.keeps_prompt else None,
                *(["*i32:16"] * 2 if variant.has_ranges else [None] * 2),
            ),
            "shaping": (
                "fp32",
                "fp32" if variant.soft_cap else None,
                pointer if variant.slopes else None,
                pointer if variant.sinks else None,
            ),
            "head_scales": (scale, scale) if variant.head_scales else (None, None),
            "num_rows": "i32",
            "key_begin": "i32",
            **({"lse": logs} if variant.with_lse or splits > 1 else {}),
        },
        {
            **({} if variant.with_lse or splits > 1 else {"lse": None}),
            "GROUP": group,
            "HEADS": min(group, tiles.block_m),
            "SIZE": keys,
            "VALUES": values,
            "PAD": next_power_of_two(values),
            "REST": next_power_of_two(keys - values) if is_latent else 0,
            "BLOCK_SIZE": 16 if variant.is_paged else 0,
            "CAUSAL": variant.causal,
            "WINDOW": variant.window,
            "CHUNK": variant.chunk,
            "KEEPS_PROMPT": variant.keeps_prompt,
            "HAS_RANGES": variant.has_ranges,
            "SPLITS": splits,
            "BLOCK_M": tiles.block_m,
            "TILE": tiles.tile,
            "COMPUTE": COMPUTE[width],
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=targets,
        spill_budget=SPILL_BUDGET,
    )


def configurations(size: SizeClass, width: int, phase: Phase) -> Iterator[tuple[TileConfig, tuple[str, ...]]]:
    """Each entry of the tables once, with the targets that share it."""
    found: dict[TileConfig, list[str]] = {}
    for target, table in TABLES.items():
        found.setdefault(table[size, width, phase], []).append(target.value)
    for tiles, targets in found.items():
        yield tiles, tuple(targets)


def attend_cases() -> Iterator[KernelCase]:
    for size in SizeClass:
        for width in NAMES:
            for phase in Phase:
                for tiles, targets in configurations(size, width, phase):
                    yield attend_case(Variant(), size, width, phase, tiles, targets)
    for variant in VARIANTS:
        for phase in Phase:
            for tiles, targets in configurations(SizeClass.UP_TO_128, 2, phase):
                yield attend_case(variant, SizeClass.UP_TO_128, 2, phase, tiles, targets)
    for tiles, targets in configurations(SizeClass.UP_TO_128, 2, Phase.DECODE):
        newer = tuple(name for name in targets if name != Target.SM_80.value)
        if newer:
            yield attend_case(E4M3, SizeClass.UP_TO_128, 2, Phase.DECODE, tiles, newer)


def partial_cases() -> Iterator[KernelCase]:
    part, logs, log = tensor("fp32", 4), ("*fp32:16", "i32", "i32", 1), ("*fp32:16", "i32", 1)
    out = tensor("bf16", 3)
    for size in (128, 512):
        sizes = {"SIZE": size, "PAD": size}
        yield KernelCase(
            f"combine_parts[{size}]",
            combine_parts,
            {"parts": part, "part_lse": logs, "output": out, "lse": log},
            {**sizes, "SPLITS": DECODE_SPLITS},
        )
        pair = {"left": out, "left_lse": log, "right": out, "right_lse": log, "output": out, "lse": log}
        yield KernelCase(f"merge_pair[{size}]", merge_pair, pair, sizes)


def write_cases() -> Iterator[KernelCase]:
    types: dict[str, Any] = {
        "key": tensor("bf16", 3),
        "key_cache": tensor("bf16", 4),
        "slots": ("*i64:16", 1),
        "num_tokens": "i32",
    }
    nothing: dict[str, Any] = {
        "key_scale": None,
        "value_scale": None,
        "scales": None,
        "limit": None,
        "MANTISSA": 0,
        "LOWEST": 0,
    }
    nothing["TOKENS"] = WRITE_TOKENS
    plain = KernelCase(
        "write_states[bf16]",
        write_states,
        {**types, "value": types["key"], "value_cache": types["key_cache"]},
        {**nothing, "SIZE": 128, "PAD": 128, "BLOCK_SIZE": 16},
    )
    yield plain
    latent = {name: value for name, value in plain.signature.items() if name != "value"}
    yield replace(
        plain,
        name="write_states[latent]",
        signature=latent,
        constexprs={**plain.constexprs, "value": None, "SIZE": 576, "PAD": 1024},
    )
    for dtype, targets in (("fp8e5", ()), ("fp8e4nv", ("sm_90", "sm_100", "gfx942"))):
        stored, scale = tensor(dtype, 4), ("*fp32:16", 1)
        quantized = {"key_cache": stored, "value_cache": stored, "key_scale": scale, "value_scale": scale}
        kept = {name: value for name, value in plain.constexprs.items() if name not in (*quantized, "limit")}
        signature = {**plain.signature, **quantized, "limit": "fp32"}
        yield replace(plain, name=f"write_states[{dtype}]", signature=signature, constexprs=kept, targets=targets)
    stored = tensor("i8", 4)
    signature = {**plain.signature, "key_cache": stored, "value_cache": stored, "scales": tensor("fp32", 4)}
    kept = {name: value for name, value in plain.constexprs.items() if name != "scales"}
    yield replace(plain, name="write_states[int8]", signature=signature, constexprs=kept)


def kernel_cases() -> tuple[KernelCase, ...]:
    return (*attend_cases(), *partial_cases(), *write_cases())

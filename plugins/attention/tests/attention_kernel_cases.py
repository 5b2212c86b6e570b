"""Every Triton kernel of attention in every configuration that its tables hold, for the ahead-of-time compile check.

Run ``python -m hardpoint_testing_torch.triton_aot plugins/attention/tests/attention_kernel_cases.py:kernel_cases
--write plugins/attention/tests/attention_kernel_resources.json`` after a change of a kernel or a table.

An *entry* is what the tables answer for a device, a class of head sizes, a width of elements and a phase. All features
with all sizes on all entries are far more than can be compiled. Of them these are made:

- each entry with each of ``VARIANTS``, which between them have every feature,
- each entry with one of ``MIXES``, which with the variants have every pair of features that goes together,
- the size of heads, the dtype, the number of heads to a KV head and the number of parts change from case to case, so
  that each variant and each entry meets all of them.

``test_attention_triton_cases.py`` counts that it is so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, NamedTuple

import triton.language as tl

from hardpoint_attention.triton.configs import (
    SPLITS,
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

SIZES: Mapping[SizeClass, Sequence[tuple[int, int]]] = {
    SizeClass.UP_TO_64: ((64, 64), (32, 32), (40, 40)),
    SizeClass.UP_TO_128: ((128, 128), (80, 80), (96, 96)),
    SizeClass.UP_TO_256: ((256, 256), (160, 160), (192, 192)),
    SizeClass.LATENT: ((576, 512), (640, 512), (320, 256)),
}
"""Keys' and values' entries: of each class the most that it stands for, and others, which are padded."""
GROUPS, LATENT_GROUPS = (4, 1, 7, 8), (16, 128, 20, 8)
"""Query heads to a KV head."""
DTYPES = {2: ("bf16", "fp16"), 4: ("fp32",)}
COMPUTE = {"bf16": tl.bfloat16, "fp16": tl.float16, "fp32": tl.float32}
CAST = {"bf16": "fp32", "fp16": "bf16", "fp32": "bf16"}
"""A cache's dtype where it is none of the layer's."""
SPILL_BUDGET, RARER_BUDGET, SCALED_BUDGET = 16, 32, 48
"""Bytes: a few values that live through the whole loop over keys, and are read once behind it. More of them where more
than plain attention is asked for, for which tiles are not made smaller, and most where values get their digits back by
scales of their own."""


def tensor(dtype: str, dimensions: int) -> tuple[Any, ...]:
    """A tensor as kernels take it: aligned, with contiguous entries."""
    return (f"*{dtype}:16", *["i32:16"] * (dimensions - 1), 1)


class Variant(NamedTuple):
    """What a call of ``attend`` asks for beside tiles.

    ``stored``: what keys and values are read from: ``same``, ``cast`` of another dtype, ``i8`` with scales by token,
    ``fp8e5`` and ``fp8e4nv`` with scales by tensor or ``by_head``, ``given`` without a cache.
    """

    name: str = "plain"
    stored: str = "same"
    by_head: bool = False
    causal: int = 1
    window: int = 0
    chunk: int = 0
    keeps_prompt: bool = False
    ranges: bool = False
    soft_cap: bool = False
    slopes: bool = False
    sinks: bool = False
    lse: bool = False

    @property
    def suits_latents(self) -> bool:
        """These are in a cache, where there is no place for scales by token."""
        return self.stored not in ("i8", "given")


VARIANTS = (
    Variant(),
    Variant("scores", soft_cap=True, slopes=True, sinks=True, window=512, lse=True),
    Variant("masks", causal=2, chunk=1024, ranges=True),
    Variant("prompt", window=512, keeps_prompt=True),
    Variant("int8", "i8"),
    Variant("fp8_e5m2", "fp8e5"),
    Variant("fp8_e4m3", "fp8e4nv", by_head=True),
    Variant("cast", "cast"),
    Variant("encoder", "given", causal=0, window=512),
    Variant("across", causal=0, lse=True),
)
_ALL = {"soft_cap": True, "slopes": True, "sinks": True}
MIXES = (
    Variant("mix1", "fp8e5", True, causal=0, chunk=1024, ranges=True, lse=True, **_ALL),
    Variant("mix2", "fp8e4nv", causal=2, ranges=True, **_ALL),
    Variant("mix3", "cast", window=512, keeps_prompt=True, ranges=True, slopes=True, sinks=True, lse=True),
    Variant("mix4", "i8", causal=2, window=512, ranges=True, soft_cap=True, sinks=True, lse=True),
    Variant("mix5", "fp8e4nv", causal=0, chunk=1024, soft_cap=True, slopes=True, lse=True),
    Variant("mix6", "given", chunk=1024, ranges=True, **_ALL),
    Variant("mix7", "fp8e5", True, causal=2, window=512),
    Variant("mix8", "cast", causal=0, window=512, soft_cap=True),
    Variant("mix9", "i8", causal=0, chunk=1024, slopes=True),
    Variant("mix10", "fp8e5", window=512, keeps_prompt=True, soft_cap=True),
    Variant("mix11", "cast", causal=2, chunk=1024),
    Variant("mix12", "fp8e4nv", causal=0, window=512),
    Variant("mix13", "fp8e4nv", True, window=512, keeps_prompt=True),
    Variant("mix14", "given", causal=2),
    Variant("mix15", "i8", window=512, keeps_prompt=True),
)


class Shape(NamedTuple):
    """``size``: of keys and of values. ``group``: query heads to a KV head."""

    size: tuple[int, int]
    dtype: str
    group: int
    splits: int


def stored_type(variant: Variant, dtype: str, target: str) -> str:
    """Devices of compute capability 8.0 know float8_e4m3fn by its codes only."""
    if variant.stored == "fp8e4nv" and target == Target.SM_80.value:
        return "u8"
    return {"same": dtype, "given": dtype, "cast": CAST[dtype]}.get(variant.stored, variant.stored)


def attend_case(
    variant: Variant, shape: Shape, stored: str, is_latent: bool, tiles: TileConfig, targets: tuple[str, ...]
) -> KernelCase:
    (keys, values), splits = shape.size, shape.splits
    states, is_paged = tensor(stored, 4), variant.stored != "given"
    by_head = ("*fp32:16", 1 if variant.by_head else "i32:16") if variant.stored.startswith("fp8") else None
    pointer, returns_logs = "*fp32:16", variant.lse or splits > 1
    name = f"{variant.name}={stored}" if stored == "u8" else variant.name
    return KernelCase(
        f"attend[{name},{keys}{f'/{values}' if is_latent else ''},{shape.dtype},group={shape.group},splits={splits},"
        f"{tiles.block_m}x{tiles.tile},warps={tiles.num_warps},stages={tiles.num_stages}]",
        attend,
        {
            "query": tensor(shape.dtype, 3),
            "states": (states, None if is_latent else states, tensor("fp32", 4) if variant.stored == "i8" else None),
            "output": tensor("fp32" if splits > 1 else shape.dtype, 4),
            "rows": ("*i32:16", "*i32:16", "*i32:16", "i32", "*i32:16"),
            "masks": (
                "*i1:16" if variant.causal == 2 else None,
                "*i32:16" if variant.keeps_prompt else None,
                *(["*i32:16"] * 2 if variant.ranges else [None] * 2),
            ),
            "shaping": (
                "fp32",
                "fp32" if variant.soft_cap else None,
                pointer if variant.slopes else None,
                pointer if variant.sinks else None,
            ),
            "head_scales": (by_head, by_head),
            "num_rows": "i32",
            "key_begin": "i32",
            **({"lse": ("*fp32:16", "i32", "i32", "i32", "fp32")} if returns_logs else {}),
        },
        {
            **({} if returns_logs else {"lse": None}),
            "GROUP": shape.group,
            "HEADS": min(shape.group, tiles.block_m),
            "SIZE": keys,
            "VALUES": values,
            "PAD": next_power_of_two(values),
            "REST": next_power_of_two(keys - values) if is_latent else 0,
            "BLOCK_SIZE": 16 if is_paged else 0,
            "CAUSAL": variant.causal,
            "WINDOW": variant.window,
            "CHUNK": variant.chunk,
            "KEEPS_PROMPT": variant.keeps_prompt,
            "HAS_RANGES": variant.ranges,
            "SPLITS": splits,
            "BLOCK_M": tiles.block_m,
            "TILE": tiles.tile,
            "COMPUTE": COMPUTE[shape.dtype],
        },
        num_warps=tiles.num_warps,
        num_stages=tiles.num_stages,
        targets=targets,
        spill_budget=_budget(variant),
    )


def _budget(variant: Variant) -> int:
    if variant.stored == "i8":
        return SCALED_BUDGET
    return SPILL_BUDGET if variant == Variant() else RARER_BUDGET


def tables() -> list[tuple[Mapping[Any, TileConfig], list[str]]]:
    """Each table with the targets that share it."""
    found: list[tuple[Mapping[Any, TileConfig], list[str]]] = []
    for target, table in TABLES.items():
        known = next((targets for other, targets in found if other is table), None)
        if known is None:
            found.append((table, [target.value]))
        else:
            known.append(target.value)
    return found


def shape_of(size: SizeClass, width: int, phase: Phase, cell: int, turn: int) -> Shape:
    """The ``turn``-th case of the ``cell``-th entry of its class and width."""
    shapes = list(product(DTYPES[width], SIZES[size]))
    dtype, sizes = shapes[(cell + turn) % len(shapes)]
    groups = LATENT_GROUPS if size is SizeClass.LATENT else GROUPS
    splits = SPLITS[(3 + cell + 2 * turn) % len(SPLITS)] if phase is Phase.DECODE else 1
    return Shape(sizes, dtype, groups[(cell + turn + turn // 4) % len(groups)], splits)


def attend_cases() -> Iterator[KernelCase]:
    """Where two tables have the same tiles their cases may be the same; then it has the targets of both."""
    made: dict[tuple[Any, ...], list[str]] = {}
    next_mix = 0
    for size, width in product(SizeClass, DTYPES):
        is_latent = size is SizeClass.LATENT
        for cell, (phase, (table, targets)) in enumerate(product(Phase, tables())):
            while is_latent and not MIXES[next_mix % len(MIXES)].suits_latents:
                next_mix += 1
            chosen = (*VARIANTS, MIXES[next_mix % len(MIXES)])
            next_mix += 1
            for turn, variant in enumerate(found for found in chosen if found.suits_latents or not is_latent):
                shape = shape_of(size, width, phase, cell, turn)
                for target in targets:
                    stored = stored_type(variant, shape.dtype, target)
                    key = (variant, shape, stored, is_latent, table[size, width, phase])
                    made.setdefault(key, []).append(target)
    for (variant, shape, stored, is_latent, tiles), names in made.items():
        yield attend_case(variant, shape, stored, is_latent, tiles, tuple(names))


def partial_cases() -> Iterator[KernelCase]:
    part, logs, log = tensor("fp32", 4), ("*fp32:16", "i32", "i32", 1), ("*fp32:16", "i32", 1)
    for turn, (size, splits) in enumerate(product((64, 96, 256, 512), (count for count in SPLITS if count > 1))):
        sizes = {"SIZE": size, "PAD": next_power_of_two(size), "SPLITS": splits}
        dtype, has_log = list(COMPUTE)[turn % len(COMPUTE)], turn % 2 == 0
        yield KernelCase(
            f"combine_parts[{size},{dtype},splits={splits}{',lse' if has_log else ''}]",
            combine_parts,
            {"parts": part, "part_lse": logs, "output": tensor(dtype, 3), **({"lse": log} if has_log else {})},
            sizes if has_log else {**sizes, "lse": None},
        )
    for turn, (size, dtype) in enumerate(product((96, 128, 512), COMPUTE)):
        out, has_log = tensor(dtype, 3), turn % 2 == 0
        pair = {"left": out, "left_lse": log, "right": out, "right_lse": log, "output": out}
        sizes = {"SIZE": size, "PAD": next_power_of_two(size)}
        yield KernelCase(
            f"merge_pair[{size},{dtype}{',lse' if has_log else ''}]",
            merge_pair,
            {**pair, "lse": log} if has_log else pair,
            sizes if has_log else {**sizes, "lse": None},
        )


def write_case(variant: Variant, size: int, dtype: str, is_latent: bool, targets: tuple[str, ...]) -> KernelCase:
    stored = stored_type(variant, dtype, targets[0])
    cache, scale = tensor(stored, 4), ("*fp32:16", 1 if variant.by_head else "i32:16")
    types: dict[str, Any] = {"key": tensor(dtype, 3), "key_cache": cache, "value_cache": cache}
    types |= {"slots": ("*i64:16", 1), "num_tokens": "i32"}
    absent: dict[str, Any] = dict.fromkeys(("key_scale", "value_scale", "scales", "limit"))
    if is_latent:
        absent["value"] = None
    else:
        types["value"] = types["key"]
    if variant.stored.startswith("fp8"):
        types |= {"key_scale": scale, "value_scale": scale, "limit": "fp32"}
    if variant.stored == "i8":
        types["scales"] = tensor("fp32", 4)
    sizes = {"SIZE": size, "PAD": next_power_of_two(size, 1), "TOKENS": WRITE_TOKENS, "BLOCK_SIZE": 16}
    return KernelCase(
        f"write_states[{variant.name}{'=u8' if stored == 'u8' else ''},{size},{dtype}{',latent' if is_latent else ''}]",
        write_states,
        types,
        {
            **{name: value for name, value in absent.items() if name not in types},
            **sizes,
            "MANTISSA": 3 * (stored == "u8"),
        },
        targets=targets,
    )


def write_cases() -> Iterator[KernelCase]:
    """Every way of storing with every dtype and every size."""
    old, newer = (Target.SM_80.value,), tuple(target.value for target in TABLES if target is not Target.SM_80)
    kinds = (*(variant for variant in VARIANTS if variant.name in ("plain", "int8", "fp8_e5m2", "fp8_e4m3", "cast")),)
    sizes = ((64, False), (80, False), (128, False), (256, False), (576, True))
    turn = 0
    for variant, (size, is_latent) in product(kinds, sizes):
        if is_latent and not variant.suits_latents:
            continue
        for dtype in COMPUTE if size in (80, 128) else [list(COMPUTE)[turn % len(COMPUTE)]]:
            changed = variant._replace(by_head=turn % 2 == 0 and not is_latent)
            groups = (old, newer) if variant.stored == "fp8e4nv" else ((*old, *newer),)
            for targets in groups:
                yield write_case(changed, size, dtype, is_latent, targets)
            turn += 1


def kernel_cases() -> tuple[KernelCase, ...]:
    return (*attend_cases(), *partial_cases(), *write_cases())

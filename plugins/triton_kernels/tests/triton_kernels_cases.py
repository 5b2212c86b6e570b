"""Every kernel of this distribution in every configuration that its launchers choose, for the ahead-of-time check.

Dtypes of data vary where the arithmetic is the kernel's; tiles are those of the launchers, asked for the widths that
models have.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

from hardpoint_testing_torch.triton_aot import TARGETS, KernelCase
from hardpoint_triton_kernels.kernels import (
    activation,
    blocks,
    moe,
    moe_align,
    norm,
    penalties,
    quantize,
    rejection,
    rotary,
    truncation,
)
from hardpoint_triton_kernels.kernels.common import row_tile

FLOATS = ("fp16", "bf16", "fp32")
WITHOUT_FP8 = ("sm_80",)
"""The 8-bit float that is stored came with compute capability 8.9; before, its codes are."""


def case(name: str, function: Any, types: dict[str, str], constants: dict[str, Any], **settings: Any) -> KernelCase:
    """Pointers are aligned, as the framework allocates them."""
    aligned = tuple(argument for argument, kind in types.items() if kind.startswith("*"))
    divisible = (*aligned, *settings.pop("divisible", ()))
    return KernelCase(name, function, types, constants, divisible_by_16=divisible, **settings)


def activations() -> Iterator[KernelCase]:
    sizes = {"num_rows": "i32", "size": "i32", "source_stride": "i32"}
    for dtype, (name, number), size in product(FLOATS, activation.ACTIVATIONS.items(), (48, 11008)):
        if size == 48 and (dtype, name) != ("bf16", "silu"):
            continue
        tile = row_tile(size, widest=1024)
        constants = {"ROWS": tile.rows, "WIDTH": tile.width, "ACTIVATION": number}
        yield case(
            f"act_and_mul[{name},{dtype},{tile.rows}x{tile.width}]",
            activation.act_and_mul_kernel,
            {"source": f"*{dtype}", "target": f"*{dtype}", **sizes},
            constants,
            divisible=("size", "source_stride"),
            num_warps=tile.warps,
        )


def norms() -> Iterator[KernelCase]:
    for dtype, size, adds in product(FLOATS, (128, 4096, 16384), (False, True)):
        if dtype != "bf16" and size != 4096:
            continue
        tile = row_tile(size)
        types = {"source": f"*{dtype}", "weight": f"*{dtype}", "target": f"*{dtype}", "num_rows": "i32", "size": "i32"}
        types |= {"outer_stride": "i32", "inner_stride": "i32", "residual_stride": "i32", "eps": "fp32"}
        constants: dict[str, Any] = {"ROWS": tile.rows, "WIDTH": tile.width, "ONE_PASS": tile.width >= size}
        if adds:
            types["residual"] = f"*{dtype}"
            constants["inner"] = 1
        else:
            types["inner"] = "i32"
            constants["residual"] = None
        yield case(
            f"{'add_' if adds else ''}rms_norm[{dtype},{size}]",
            norm.rms_norm_kernel,
            types,
            constants,
            divisible=("size", "outer_stride", "inner_stride", "residual_stride"),
            num_warps=tile.warps,
        )


def rotations() -> Iterator[KernelCase]:
    types = {
        "cos": "*fp32",
        "sin": "*fp32",
        "num_heads": "i32",
        "token_stride": "i32",
        "head_stride": "i32",
        "half": "i32",
    }
    for dtype, neighbors, (heads, pairs) in product(FLOATS, (False, True), ((16, 64), (32, 32))):
        if heads == 32 and dtype != "bf16":
            continue
        constants = {"value_stride": 1, "HEADS": heads, "PAIRS": pairs, "NEIGHBORS": neighbors}
        yield case(
            f"rotary[{dtype},{'neighbors' if neighbors else 'halves'},{heads}x{pairs}]",
            rotary.rotary_kernel,
            {"heads": f"*{dtype}", **types},
            constants,
            divisible=("token_stride", "head_stride", "half"),
            num_warps=4,
        )


def quantizations() -> Iterator[KernelCase]:
    with_fp8 = tuple(name for name in TARGETS if name not in WITHOUT_FP8)
    kinds: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("int8", "i8", ()),
        ("fp8", "fp8e4nv", with_fp8),
        ("fp8_codes", "u8", WITHOUT_FP8),
    )
    for dtype, (kind, stored, targets), size in product(FLOATS, kinds, (4096, 16384)):
        if dtype != "bf16" and size != 4096:
            continue
        tile = row_tile(size)
        types = {"source": f"*{dtype}", "target": f"*{stored}", "scales": "*fp32"}
        types |= {"num_rows": "i32", "size": "i32", "source_stride": "i32", "largest": "fp32"}
        constants = {"ROWS": tile.rows, "WIDTH": tile.width, "ONE_PASS": tile.width >= size, "TO_INT8": kind == "int8"}
        yield case(
            f"quantize_{kind}[{dtype},{size}]",
            quantize.quantize_kernel,
            types,
            constants,
            divisible=("size", "source_stride"),
            num_warps=tile.warps,
            targets=targets,
        )


def sampling() -> Iterator[KernelCase]:
    optional = {"top_k": "*i64", "top_p": "*fp32"}
    for given in (("top_k",), ("top_p",), ("top_k", "top_p")):
        types = {"logits": "*fp32", "size": "i32", "row_stride": "i32", **{name: optional[name] for name in given}}
        absent = dict.fromkeys(set(optional) - set(given))
        name = f"truncation[{'+'.join(given)}]"
        yield case(name, truncation.truncation_kernel, types, {**absent, "WIDTH": 4096}, num_warps=8)
    known = {"KNOWN": 1 << 30, "WIDTH": 1024}
    types = {"tokens": "*i64", "is_output": "*i1", "counts": "*i32", "length": "i32", "size": "i32"}
    yield case("penalty_counts", penalties.count_kernel, types, known)
    types = {"logits": "*fp32", "rows": "*i64", "counts": "*i32", "size": "i32", "row_stride": "i32"}
    types |= {"repetition": "*fp32", "frequency": "*fp32", "presence": "*fp32"}
    yield case("penalties", penalties.penalty_kernel, types, known)
    for certain in (True, False):
        types = {"drafts": "*i64", "starts": "*i64", "is_greedy": "*i1", "best": "*i64", "target": "*fp32"}
        types |= {"bonus": "*i64", "accept_uniforms": "*fp32", "redraw_uniforms": "*fp32", "tokens": "*i64"}
        types |= {"counts": "*i64", "size": "i32", "width": "i32"} | ({} if certain else {"proposed": "*fp32"})
        constants: dict[str, Any] = {"WIDTH": 4096} | ({"proposed": None} if certain else {})
        name = f"rejection[{'certain' if certain else 'proposed'}]"
        yield case(name, rejection.rejection_kernel, types, constants, num_warps=8)


def mixtures() -> Iterator[KernelCase]:
    types = {"chosen": "*i64", "counts": "*i32", "num_pairs": "i32"}
    yield case("moe_count", moe_align.count_pairs_kernel, types, {"WIDTH": 1024})
    types = {**types, "pairs": "*i32", "experts": "*i32", "num_experts": "i32"}
    for rows, experts in ((16, 8), (16, 256), (64, 128)):
        constants = {"ROWS": rows, "EXPERTS": experts, "WIDTH": 1024}
        yield case(f"moe_deal[{rows},{experts}]", moe_align.deal_pairs_kernel, types, constants)
    for dtype in FLOATS:
        for tile in moe.TILES[4 if dtype == "fp32" else 2]:
            types = {"source": f"*{dtype}", "weights": f"*{dtype}", "target": f"*{dtype}", "pairs": "*i32"}
            types |= {"experts": "*i32", **dict.fromkeys(("num_pairs", "size", "depth", "pairs_per_row"), "i32")}
            types |= dict.fromkeys(("source_stride", "expert_stride", "output_stride"), "i32")
            constants = {"ROWS": tile.rows, "COLUMNS": tile.columns, "DEPTH": tile.depth, "UPCAST": False}
            yield case(
                f"moe_product[{dtype},{tile.rows}x{tile.columns}x{tile.depth}]",
                moe.grouped_product_kernel,
                types,
                constants,
                divisible=("size", "depth", "source_stride", "expert_stride", "output_stride"),
                num_warps=tile.warps,
                num_stages=tile.stages,
            )
    for dtype, choices in (*product(FLOATS, (2,)), ("bf16", 8)):
        types = {"source": f"*{dtype}", "weights": "*fp32", "chosen": "*i64", "target": f"*{dtype}"}
        types |= {"size": "i32", "num_experts": "i32"}
        constants = {"CHOICES": choices, "WIDTH": 1024}
        yield case(f"moe_sum[{dtype},{choices}]", moe.sum_choices_kernel, types, constants, divisible=("size",))


def cache_blocks() -> Iterator[KernelCase]:
    for bits in (64, 32, 16, 8):
        sizes = {"size": "i32", "block_stride": "i32"}
        types = {"cache": f"*i{bits}", "sources": "*i64", "targets": "*i64", **sizes}
        constants, divisible = {"WIDTH": 2048}, ("size", "block_stride")
        yield case(f"copy_blocks[i{bits}]", blocks.copy_kernel, types, constants, divisible=divisible)
        types = {"cache": f"*i{bits}", "blocks": "*i64", **sizes}
        yield case(f"zero_blocks[i{bits}]", blocks.zero_kernel, types, constants, divisible=divisible)


def kernel_cases() -> tuple[KernelCase, ...]:
    """All of them, for ``python -m hardpoint_testing_torch.triton_aot``."""
    parts = (activations, norms, rotations, quantizations, sampling, mixtures, cache_blocks)
    return tuple(found for part in parts for found in part())

"""The kernel cases leave nothing out: what launches may ask for is counted in the cases themselves, compiling nothing.

A new entry of a table, parameter of a kernel or ability of the backend that no case has makes a test here fail.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import triton.language as tl

from hardpoint.interfaces.attention import AttentionKind, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_attention.triton import TritonBackend
from hardpoint_attention.triton.capabilities import COMPUTE_DTYPES, MAX_HEAD_SIZE, MAX_LATENT_SIZE, refuse
from hardpoint_attention.triton.configs import SPLITS, TABLES, Phase, SizeClass, Target, choose_tiles, size_class
from hardpoint_attention.triton.kernels.attention import attend
from hardpoint_attention.triton.kernels.cache_write import write_states
from hardpoint_attention.triton.kernels.partials import combine_parts, merge_pair
from hardpoint_testing_torch.triton_aot import TARGETS, KernelCase, load_cases

CASES = f"{Path(__file__).parent / 'attention_kernel_cases.py'}:kernel_cases"
NAMES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
DTYPES = {tl.float32: "fp32", tl.bfloat16: "bf16", tl.float16: "fp16"}

Facts = Mapping[str, Any]
"""What one case says of the features of ``attend``, by their names in ``FEATURES``."""


@cache
def cases_of(kernel: Any) -> tuple[KernelCase, ...]:
    """By name: the cases are loaded from a file, whose kernels are this process's own."""
    return tuple(case for case in load_cases(CASES) if case.function is kernel)


def _stored(case: KernelCase) -> str:
    stated = case.signature["states"]
    states, token_scales = stated[0], stated[2]
    element = states[0].partition(":")[0].lstrip("*")
    if case.constexprs["BLOCK_SIZE"] == 0:
        return "given"
    if element in NAMES.values():
        return "same" if element == DTYPES[case.constexprs["COMPUTE"]] else "cast"
    assert (element == "i8") == (token_scales is not None)
    # Codes stand for the type where it is missing.
    return {"u8": "fp8e4nv"}.get(element, element)


def _scale(case: KernelCase) -> str:
    scale = case.signature["head_scales"][0]
    return "none" if scale is None else "head" if scale[1] == 1 else "tensor"


def _span(case: KernelCase) -> str:
    constants = case.constexprs
    assert not (constants["WINDOW"] and constants["CHUNK"])
    if constants["KEEPS_PROMPT"]:
        assert constants["WINDOW"]
        assert case.signature["masks"][1] is not None
        return "prompt"
    return "window" if constants["WINDOW"] else "chunk" if constants["CHUNK"] else "all"


def _ranges(case: KernelCase) -> bool:
    assert (case.signature["masks"][3] is not None) == case.constexprs["HAS_RANGES"]
    return bool(case.constexprs["HAS_RANGES"])


def _logs(case: KernelCase) -> bool:
    """Of a call that is asked for them, or works in parts."""
    return "lse" in case.signature


FEATURES: Mapping[str, tuple[Callable[[KernelCase], Any], tuple[Any, ...]]] = {
    "stored": (_stored, ("same", "cast", "i8", "fp8e5", "fp8e4nv", "given")),
    "scale": (_scale, ("none", "tensor", "head")),
    "causal": (lambda case: case.constexprs["CAUSAL"], (0, 1, 2)),
    "span": (_span, ("all", "window", "chunk", "prompt")),
    "ranges": (_ranges, (False, True)),
    "soft_cap": (lambda case: case.signature["shaping"][1] is not None, (False, True)),
    "slopes": (lambda case: case.signature["shaping"][2] is not None, (False, True)),
    "sinks": (lambda case: case.signature["shaping"][3] is not None, (False, True)),
    "lse": (_logs, (False, True)),
}
PLAIN: Facts = {
    **{"stored": "same", "scale": "none", "causal": 1, "span": "all"},
    **dict.fromkeys(("ranges", "soft_cap", "slopes", "sinks"), False),
}
"""With log-sum-exps or without: parts have them."""
ASKED: Mapping[str, tuple[str, Any]] = {
    "kv_cache_dtype": ("stored", "fp8e5"),
    "per_head_scales": ("scale", "head"),
    "sliding_window": ("span", "window"),
    "chunk_size": ("span", "chunk"),
    "keeps_prompt": ("span", "prompt"),
    "uses_mm_prefix": ("ranges", True),
    "uses_row_causality": ("causal", 2),
    "logits_soft_cap": ("soft_cap", True),
    "uses_alibi": ("slopes", True),
    "uses_sinks": ("sinks", True),
    "needs_lse": ("lse", True),
    "kind": ("stored", "given"),
}
"""By field of a need: the feature that answers it."""
NO_FEATURES = {
    *("num_heads", "num_kv_heads", "head_size", "dtype", "device", "block_size"),  # the shape
    *("uses_mla", "batch_invariant"),  # a class of sizes, and the tiles of prefills
}
CONSTANTS = {
    "GROUP": "group",
    "HEADS": "group",
    "SIZE": "size",
    "VALUES": "size",
    "PAD": "size",
    "REST": "size",
    "BLOCK_SIZE": "stored",
    "CAUSAL": "causal",
    "WINDOW": "span",
    "CHUNK": "span",
    "KEEPS_PROMPT": "span",
    "HAS_RANGES": "ranges",
    "SPLITS": "splits",
    "BLOCK_M": "tiles",
    "TILE": "tiles",
    "COMPUTE": "dtype",
}
"""What the tests below count of each constant parameter of ``attend``."""


def goes_together(wanted: Facts) -> bool:
    """Whether some layer may ask for these values of some features, all others left open."""
    stored, scale, causal, span = (wanted.get(name) for name in ("stored", "scale", "causal", "span"))
    if stored is not None and scale is not None and stored.startswith("fp8") != (scale != "none"):
        return False
    # Layers that keep the prompt are decoders, whose queries look back whatever a row says.
    return span != "prompt" or (causal in (None, 1) and stored != "given")


def facts(case: KernelCase) -> Facts:
    return {name: read(case) for name, (read, _) in FEATURES.items()}


def entry(case: KernelCase) -> tuple[SizeClass, int, tuple[int, ...]]:
    constants = case.constexprs
    is_latent = constants["REST"] > 0
    width = 4 if DTYPES[constants["COMPUTE"]] == "fp32" else 2
    tiles = (constants["BLOCK_M"], constants["TILE"], case.num_warps, case.num_stages)
    return size_class(constants["SIZE"], is_latent=is_latent), width, tiles


def entries() -> Iterator[tuple[Target, SizeClass, int, Phase]]:
    """Whatever the tables are asked on devices that compile."""
    yield from product((target for target in Target if target is not Target.INTERPRETER), SizeClass, (2, 4), Phase)


@cache
def by_entry() -> dict[tuple[str, SizeClass, int, tuple[int, ...]], list[KernelCase]]:
    found: dict[Any, list[KernelCase]] = {}
    for case in cases_of(attend):
        for target in case.all_targets:
            found.setdefault((target.name, *entry(case)), []).append(case)
    return found


def cases_at(target: Target, size: SizeClass, width: int, phase: Phase) -> list[KernelCase]:
    tiles = choose_tiles(target, size, width, phase)
    key = (target.value, size, width, (tiles.block_m, tiles.tile, tiles.num_warps, tiles.num_stages))
    return by_entry().get(key, [])


def missing(found: Iterable[Any], wanted: Iterable[Any]) -> set[Any]:
    return set(wanted) - set(found)


def test_the_tables_are_compiled_for_all_the_targets_that_there_are() -> None:
    assert {target.value for target in TABLES} == set(TARGETS) == {target.value for target, *_ in entries()}


def test_every_entry_is_compiled_with_every_feature() -> None:
    """Whatever a table can answer; latents without what they have no place for."""
    for target, size, width, phase in entries():
        found = [facts(case) for case in cases_at(target, size, width, phase)]
        for name, (_, values) in FEATURES.items():
            wanted = set(values) - ({"i8", "given"} if size is SizeClass.LATENT else set())
            assert not missing((fact[name] for fact in found), wanted), (target, size, width, phase, name)
        assert any(PLAIN.items() <= fact.items() for fact in found), "nothing out of the ordinary"


def test_every_entry_is_compiled_in_every_dtype_and_size() -> None:
    sizes: dict[SizeClass, set[int]] = {}
    for case in cases_of(attend):
        sizes.setdefault(entry(case)[0], set()).add(case.constexprs["SIZE"])
    assert all(len(found) >= 3 for found in sizes.values())
    assert set().union(*sizes.values()) >= {64, 80, 96, 128, 160, 192, 256, 576}
    assert max(sizes[SizeClass.UP_TO_256]) == MAX_HEAD_SIZE
    assert max(sizes[SizeClass.LATENT]) == MAX_LATENT_SIZE
    for target, size, width, phase in entries():
        cases = cases_at(target, size, width, phase)
        dtypes = {NAMES[name] for name in COMPUTE_DTYPES if (name == "float32") == (width == 4)}
        pairs = {(DTYPES[case.constexprs["COMPUTE"]], case.constexprs["SIZE"]) for case in cases}
        assert not missing(pairs, product(dtypes, sizes[size])), (target, size, width, phase)
        assert len({case.constexprs["GROUP"] for case in cases}) >= 4
        if phase is Phase.DECODE:
            assert not missing((case.constexprs["SPLITS"] for case in cases), SPLITS), (target, size, width)


def test_every_pair_of_features_that_goes_together_is_compiled() -> None:
    found = [facts(case) for case in cases_of(attend)]
    pairs = {(first, fact[first], second, fact[second]) for fact in found for first, second in combinations(fact, 2)}
    wanted = {
        (first, one, second, other)
        for first, second in combinations(FEATURES, 2)
        for one, other in product(FEATURES[first][1], FEATURES[second][1])
        if goes_together({first: one, second: other})
    }
    assert not missing(pairs, wanted)
    assert all(goes_together(fact) for fact in found), "a case that no layer asks for"


def test_every_feature_is_compiled_in_every_dtype_and_size() -> None:
    for size in SizeClass:
        cases = [case for case in cases_of(attend) if entry(case)[0] is size]
        sizes = {case.constexprs["SIZE"] for case in cases}
        for name, (read, values) in FEATURES.items():
            wanted = set(values) - ({"i8", "given"} if size is SizeClass.LATENT else set())
            found = {(read(case), DTYPES[case.constexprs["COMPUTE"]], case.constexprs["SIZE"]) for case in cases}
            assert not missing(((value, dtype) for value, dtype, _ in found), product(wanted, DTYPES.values())), name
            assert not missing(((value, length) for value, _, length in found), product(wanted, sizes)), name


def test_whatever_the_backend_knows_of_a_need_is_a_feature_of_some_case() -> None:
    """What one learns to compute has to be compiled: a new field of a need has no place in these lists."""
    assert TritonBackend.known_needs - NO_FEATURES - {"kv_cache_dtype", "kind"} <= set(ASKED)
    found = [facts(case) for case in cases_of(attend)]
    for name, value in ASKED.values():
        assert any(fact[name] == value for fact in found)
    device = DeviceDescription(device_type="cuda", name="one", capability=(8, 0))
    plain = AttentionNeed(8, 2, 128, "bfloat16", "bfloat16", device)
    assert all(hasattr(plain, field) for field in ASKED)
    for stored in ("bfloat16", "float32", "int8_per_token_head", "fp8_e5m2", "fp8"):
        need = AttentionNeed(8, 2, 128, "bfloat16", stored, device)
        assert refuse(need, is_interpreted=False) is None, "as there are cases of it for all targets"
    assert set(AttentionKind) == {"decoder", "encoder", "encoder_only", "encoder_decoder"}


def test_every_constant_parameter_of_a_kernel_is_counted() -> None:
    """A new flag is to be listed, with a feature that has its values."""
    counted = {*FEATURES, "group", "size", "splits", "tiles", "dtype"}
    assert {name: CONSTANTS.get(name) in counted for name in _constants(attend)} == dict.fromkeys(CONSTANTS, True)
    sizes = {"SIZE", "PAD"}
    assert set(_constants(combine_parts)) == sizes | {"SPLITS"}
    assert set(_constants(merge_pair)) == sizes
    assert set(_constants(write_states)) == sizes | {"TOKENS", "BLOCK_SIZE", "MANTISSA"}


def _constants(kernel: Any) -> list[str]:
    annotated = inspect.get_annotations(kernel.fn)
    return [name for name, annotation in annotated.items() if annotation == "tl.constexpr"]


def test_parts_are_put_together_in_every_number_and_dtype() -> None:
    found = [case.constexprs for case in cases_of(combine_parts)]
    assert not missing(((case["SPLITS"], case["SIZE"]) for case in found), product(SPLITS[1:], (64, 96, 256, 512)))
    for kernel in (combine_parts, merge_pair):
        outputs = {case.signature["output"][0] for case in cases_of(kernel)}
        assert outputs == {f"*{name}:16" for name in NAMES.values()}
        assert {"lse" in case.signature for case in cases_of(kernel)} == {True, False}
        assert all(case.all_targets == tuple(TARGETS.values()) for case in cases_of(kernel))


def test_caches_are_written_from_every_dtype_in_every_form() -> None:
    for target in TARGETS:
        cases = [case for case in cases_of(write_states) if target in {found.name for found in case.all_targets}]
        forms = {(case.signature["key"][0], case.signature["key_cache"][0]) for case in cases}
        e4m3 = "u8" if target == "sm_80" else "fp8e4nv"
        for dtype, stored in product(NAMES.values(), ("i8", "fp8e5", e4m3, *NAMES.values())):
            if stored not in NAMES.values() or stored == dtype:
                assert (f"*{dtype}:16", f"*{stored}:16") in forms, (target, dtype, stored)
        assert {case.constexprs["SIZE"] for case in cases} >= {64, 80, 128, 256, 576}
        assert all((case.constexprs["MANTISSA"] == 3) == (case.signature["key_cache"][0] == "*u8:16") for case in cases)
        scales = {case.signature["key_scale"][1] for case in cases if "key_scale" in case.signature}
        assert scales == {1, "i32:16"}, "one for each head, and one for all"


def test_the_old_device_takes_codes_where_the_others_take_the_type() -> None:
    """Nothing is left out for want of an 8-bit type."""
    for kernel, argument in ((attend, "states"), (write_states, "key_cache")):
        types: dict[str, set[str]] = {}
        for case in cases_of(kernel):
            stated = case.signature[argument]
            element = (stated[0] if argument == "states" else stated)[0]
            for target in case.all_targets:
                types.setdefault(target.name, set()).add(element)
        assert "*u8:16" in types["sm_80"]
        assert "*fp8e4nv:16" not in types["sm_80"]
        for newer in ("sm_90", "sm_100", "gfx942"):
            assert "*fp8e4nv:16" in types[newer]
            assert "*u8:16" not in types[newer]

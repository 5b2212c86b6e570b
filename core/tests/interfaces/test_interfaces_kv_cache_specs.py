"""KV cache specs: page arithmetic, bounds, values and their way between processes (spec 01 section 1.2)."""

from __future__ import annotations

from fractions import Fraction
from typing import Any, ClassVar

import msgspec
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    AttentionSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheSpec,
    KVQuantization,
    KVStorage,
    MambaCacheMode,
    MambaSpec,
    MixedSizeSpec,
    MLASpec,
    SlidingWindowSpec,
    WireSpec,
    dtype_bytes,
    kv_storage,
    register_kv_storage,
    spec_from_wire,
    spec_to_wire,
)

USUAL: dict[str, Any] = {"block_size": 16, "num_kv_heads": 32, "head_size": 128, "dtype": "float16"}
CONV: dict[str, Any] = {"block_size": 16, "shapes": ((3, 64), (8, 16, 4)), "dtypes": ("bfloat16", "float32")}
SPECS: tuple[KVCacheSpec, ...] = (
    FullAttentionSpec(**USUAL, sliding_window=7),
    FullAttentionSpec(**USUAL, tokens_per_state=Fraction(1, 4), padded_page_size=1 << 21),
    SlidingWindowSpec(**USUAL, sliding_window=128, tokens_per_state=4),
    ChunkedLocalAttentionSpec(**USUAL, chunk_size=64),
    MLASpec(block_size=64, num_kv_heads=1, head_size=576, dtype="bfloat16", alignment=65536),
    CrossAttentionSpec(**USUAL, max_encoder_tokens=1500),
    EncoderOnlyAttentionSpec(**{**USUAL, "dtype": "int8"}, quantization=KVQuantization.PER_TOKEN_HEAD, scale_bytes=8),
    MambaSpec(**CONV, mode=MambaCacheMode.ALIGN, num_checkpoint_blocks=2),
)
CLASSES = {spec.kind: type(spec) for spec in SPECS}


def full(**fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{**USUAL, **fields})


def test_the_worked_pages_of_attention() -> None:
    """R1.22, R1.23: 16 tokens, 32 heads of 128 elements of 2 bytes; a quarter of the states; four times as many."""
    assert full().page_size_bytes == full().unpadded_page_size_bytes == 262144
    assert full(tokens_per_state=4).states_per_block == 4
    assert full(tokens_per_state=4).page_size_bytes == 262144 // 4
    assert full(tokens_per_state=Fraction(1, 4)).states_per_block == 64
    assert full(tokens_per_state=Fraction(1, 4)).page_size_bytes == 262144 * 4


@pytest.mark.parametrize("ratio", [0.25, 1.0, 4.0])
def test_ratios_are_exact(ratio: float) -> None:
    """R1.23: no floats, not even whole ones."""
    with pytest.raises(ConfigError, match="is a float; give a Fraction"):
        full(tokens_per_state=ratio)


@pytest.mark.parametrize("ratio", [3, 32, Fraction(3, 2), Fraction(5)])
def test_ratios_divide_the_block(ratio: int | Fraction) -> None:
    """R1.23."""
    with pytest.raises(ConfigError, match=r"block size 16 is not a whole number of states.*--block-size"):
        full(tokens_per_state=ratio)


@pytest.mark.parametrize("ratio", [0, -1, Fraction(-1, 2)])
def test_a_state_of_the_request_is_one_per_block(ratio: int | Fraction) -> None:
    """R1.24."""
    for block_size in (1, 16, 100):
        assert full(tokens_per_state=ratio, block_size=block_size).states_per_block == 1


def test_specs_are_frozen_values() -> None:
    """R1.20, P1.2."""
    for spec in SPECS:
        for name in spec.__struct_fields__:
            with pytest.raises(AttributeError):
                setattr(spec, name, getattr(spec, name))
        same = msgspec.structs.replace(spec)
        assert same == spec
        assert hash(same) == hash(spec)
    assert len(set(SPECS)) == len(SPECS)


@pytest.mark.parametrize("missing", ["heads", "content_bytes", "tokens_per_state"])
def test_the_three_properties_are_mandatory(missing: str) -> None:
    """R1.21: no instance can be made without one, and the error names it."""
    given = {name: 1 for name in ("heads", "content_bytes", "tokens_per_state") if name != missing}
    made: Any = msgspec.defstruct("Lacking", [], bases=(KVCacheSpec,), namespace=given, frozen=True, kw_only=True)
    with pytest.raises(TypeError, match=f"Lacking defines no '{missing}'"):
        made(block_size=4)


def test_explicit_slots_and_contents_replace_the_computed_ones() -> None:
    """R1.26."""
    packed = full(head_slots=8, content_size=100)
    assert (packed.heads, packed.content_bytes) == (8, 100)
    assert packed.page_size_bytes == 8 * 16 * 100


def test_a_padded_page_is_no_smaller_than_what_it_holds() -> None:
    """R1.26."""
    assert full(padded_page_size=262144).page_size_bytes == 262144
    padded = full(padded_page_size=300000)
    assert (padded.page_size_bytes, padded.unpadded_page_size_bytes) == (300000, 262144)
    with pytest.raises(ConfigError, match="holds 262144 bytes; set padded_page_size"):
        full(padded_page_size=262143)


@pytest.mark.parametrize("fields", [{"block_size": 0}, {"num_kv_heads": 0}, {"num_kv_heads": -1, "head_size": -1}])
def test_sizes_are_positive(fields: dict[str, int]) -> None:
    with pytest.raises(ConfigError, match="must be 1 or more"):
        full(**fields)


def test_full_attention_records_how_the_layer_looks_back() -> None:
    """R1.27: a window or a chunk size, neither of which changes pages or bounds."""
    assert (full().sliding_window, full().chunk_size) == (None, None)
    for spec in (full(sliding_window=64), full(chunk_size=64)):
        assert spec != full()
        assert spec.page_size_bytes == full().page_size_bytes
        assert spec.max_blocks(1000, 7) == full().max_blocks(1000, 7)


def test_latent_pages() -> None:
    """R1.30, R1.31, P1.6: one latent, no values; pages end at multiples of the alignment."""
    fields: dict[str, Any] = {"block_size": 64, "num_kv_heads": 1, "head_size": 576, "dtype": "bfloat16"}
    assert MLASpec(**fields).page_size_bytes == 73728
    aligned = MLASpec(**fields, alignment=65536)
    assert (aligned.page_size_bytes, aligned.unpadded_page_size_bytes) == (131072, 73728)
    for alignment in (None, 73728, 1024):
        assert MLASpec(**fields, alignment=alignment).page_size_bytes == 73728
    assert MLASpec(**fields, alignment=65536, padded_page_size=140000).page_size_bytes == 3 * 65536


def test_states_of_recurrent_layers() -> None:
    """R1.32: the sum over tensors, whatever the block size; no attention spec."""
    expected = 3 * 64 * 2 + 8 * 16 * 4 * 4
    for block_size in (1, 16, 4096):
        spec = MambaSpec(**{**CONV, "block_size": block_size})
        assert spec.content_bytes == spec.page_size_bytes == expected
    assert not isinstance(spec, AttentionSpec)
    with pytest.raises(ConfigError, match="2 shapes and 1 dtypes"):
        MambaSpec(**{**CONV, "dtypes": ("int8",)})


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(MambaCacheMode.ALL, 63 + 3), (MambaCacheMode.ALIGN, 2 + 3 + 5), (MambaCacheMode.NONE, 1 + 3)],
)
def test_memory_of_recurrent_layers(mode: MambaCacheMode, expected: int) -> None:
    """R1.33, P1.5: only mode ``all`` grows with the sequence."""
    spec = MambaSpec(**CONV, mode=mode, num_speculative_blocks=3, num_checkpoint_blocks=5)
    assert spec.max_blocks(1000, 7) == expected
    assert (spec.max_blocks(100_000, 7) == expected) == (mode is not MambaCacheMode.ALL)


def test_the_other_bounds() -> None:
    """R1.34."""
    assert full().max_blocks(1000, 7) == 63
    assert full(context_shards=4).max_blocks(1001, 7) == 16
    window = SlidingWindowSpec(**USUAL, sliding_window=100)
    assert window.max_blocks(1000, 30) == 10
    assert window.max_blocks(50, 30) == 5
    chunked = ChunkedLocalAttentionSpec(**USUAL, chunk_size=100)
    assert chunked.max_blocks(1000, 30) == 9
    assert chunked.max_blocks(50, 30) == 4
    assert EncoderOnlyAttentionSpec(**USUAL).max_blocks(1000, 30) == 0
    assert CrossAttentionSpec(**USUAL, max_encoder_tokens=1500).max_blocks(10, 30) == 94


def test_the_start_up_bound_covers_every_length_admitted_at_run_time() -> None:
    """R1.35: no shorter sequence, and no smaller step, needs more than what start-up sizing set aside."""
    for spec in SPECS:
        for length in range(1, 130, 7):
            assert spec.max_blocks(length, 5) <= spec.max_blocks(130, 16)


def test_quantization_is_resolved_once_from_the_name() -> None:
    """R1.25, R1.67: a registry by name that strangers extend; kernels see an enumeration."""
    assert kv_storage("bfloat16") == KVStorage("bfloat16")
    assert kv_storage("fp8") == KVStorage("float8_e4m3fn", KVQuantization.PER_TENSOR)
    rows = kv_storage("int8_per_token_head")
    spec = full(dtype=rows.dtype, quantization=rows.quantization, scale_bytes=rows.scale_bytes)
    assert spec.quantization is KVQuantization.PER_TOKEN_HEAD
    assert spec.page_size_bytes == 32 * 16 * (2 * 128 + 8)
    blocks = KVStorage("uint8", KVQuantization.CUSTOM, scale_bytes=16)
    register_kv_storage("test_block_scaled", blocks)
    register_kv_storage("test_block_scaled", blocks)
    assert kv_storage("test_block_scaled") is blocks
    with pytest.raises(ConfigError, match="stands for .* already"):
        register_kv_storage("test_block_scaled", KVStorage("uint8"))
    with pytest.raises(ConfigError, match=r"'int3' is unknown; allowed: .*fp8, "):
        kv_storage("int3")
    with pytest.raises(ConfigError, match="'int3' is unknown"):
        register_kv_storage("test_other", KVStorage("int3"))
    with pytest.raises(ConfigError, match="KV cache dtype 'int3' is unknown"):
        full(dtype="int3")


def test_layers_share_slots_only_if_they_always_need_the_same() -> None:
    """R1.36: different windows are different groups, different pages are not."""
    wide = full(num_kv_heads=64)
    latent = MLASpec(block_size=16, num_kv_heads=1, head_size=576, dtype="bfloat16")
    assert full().slot_key == wide.slot_key == latent.slot_key == full(sliding_window=4).slot_key
    windows = [SlidingWindowSpec(**USUAL, sliding_window=size) for size in (4, 8)]
    different = [full(), full(block_size=32), *windows, ChunkedLocalAttentionSpec(**USUAL, chunk_size=4), *SPECS[5:]]
    assert len({spec.slot_key for spec in different}) == len(different)

    class Plain(AttentionSpec, frozen=True, kw_only=True):
        """States nothing about slots."""

    class Other(AttentionSpec, frozen=True, kw_only=True):
        """Another kind with the same fields."""

    assert Plain(**USUAL).slot_key == Plain(**USUAL).slot_key != Plain(**{**USUAL, "head_size": 64}).slot_key
    assert Plain(**USUAL).slot_key != Other(**USUAL).slot_key


def test_a_wrapper_for_layers_of_mixed_size() -> None:
    """R1.36: its page is the sum of all pages, padding included; it needs the slots its layers need."""
    layers = (full(), full(num_kv_heads=8, padded_page_size=70_000), full(context_shards=1, dtype="int8"))
    mixed = MixedSizeSpec.of(layers)
    assert mixed.page_size_bytes == 262144 + 70_000 + 131072
    assert mixed.block_size == 16
    assert mixed.slot_key == layers[0].slot_key
    assert mixed.max_blocks(1000, 3) == 63
    with pytest.raises(ConfigError, match="different token slots"):
        MixedSizeSpec.of((full(), SlidingWindowSpec(**USUAL, sliding_window=3)))
    back = spec_from_wire(spec_to_wire(mixed), CLASSES)
    assert back == mixed
    assert spec_to_wire(mixed).kinds == {"full_attention"}


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind)
def test_specs_travel(spec: KVCacheSpec) -> None:
    """R1.20, R1.23: equal on both sides, fractions included."""
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(spec_to_wire(spec)), type=WireSpec)
    back = spec_from_wire(wire, CLASSES)
    assert type(back) is type(spec)
    assert back == spec
    assert hash(back) == hash(spec)
    assert wire.kinds == {spec.kind}
    with pytest.raises(ConfigError, match="has no plugin; installed: none"):
        spec_from_wire(wire, {})


def test_a_subclass_that_loses_its_pages_on_the_way_is_refused() -> None:
    """P1.3: rebuilt as its ancestor, it would address other bytes."""

    class Fat(FullAttentionSpec, frozen=True, kw_only=True):
        content_bytes: ClassVar[int] = 1000

    with pytest.raises(ConfigError, match="sent with pages of 512000 bytes, but FullAttentionSpec makes them 262144"):
        spec_from_wire(spec_to_wire(Fat(**USUAL)), CLASSES)


def test_a_float_on_the_wire_is_refused() -> None:
    fields = msgspec.msgpack.encode({**USUAL, "tokens_per_state": 0.25})
    with pytest.raises(msgspec.ValidationError, match=r"0\.25 is no Fraction"):
        spec_from_wire(WireSpec("full_attention", fields), CLASSES)


ratios = st.one_of(st.integers(-2, 9), st.fractions(min_value=Fraction(1, 8), max_value=4, max_denominator=8))


RANDOM = given(
    block_size=st.integers(1, 256),
    heads=st.integers(1, 64),
    size=st.integers(1, 300),
    value_size=st.none() | st.integers(0, 300),
    dtype=st.sampled_from(["float32", "bfloat16", "int8"]),
    ratio=ratios,
    padding=st.none() | st.integers(0, 5000),
)


def check_pages(
    block_size: int,
    heads: int,
    size: int,
    value_size: int | None,
    dtype: str,
    ratio: int | Fraction,
    padding: int | None,
) -> None:
    """A page is at least what it holds, which is the formula to the byte, and larger blocks have larger pages."""
    assume(ratio <= 0 or (Fraction(block_size) / ratio).denominator == 1)
    fields = {"num_kv_heads": heads, "head_size": size, "dtype": dtype, "value_head_size": value_size}
    states = 1 if ratio <= 0 else Fraction(block_size) / ratio
    expected = heads * states * (size + (size if value_size is None else value_size)) * dtype_bytes(dtype)
    padded = None if padding is None else int(expected) + padding
    spec = FullAttentionSpec(block_size=block_size, tokens_per_state=ratio, padded_page_size=padded, **fields)  # type: ignore[arg-type]
    assert spec.page_size_bytes >= spec.unpadded_page_size_bytes == expected > 0
    assert spec.page_size_bytes == expected + (padding or 0)
    larger = FullAttentionSpec(block_size=3 * block_size, tokens_per_state=ratio, **fields)  # type: ignore[arg-type]
    assert larger.page_size_bytes >= spec.unpadded_page_size_bytes
    if ratio > 0:
        assert larger.page_size_bytes == 3 * expected
    assert spec_from_wire(spec_to_wire(spec), CLASSES) == spec


@RANDOM
def test_pages_of_random_specs(**fields: Any) -> None:
    """I1.3, R1.22."""
    check_pages(**fields)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=10_000, deadline=None)
@RANDOM
def test_pages_of_many_specs(**fields: Any) -> None:
    """I1.3, R1.22."""
    check_pages(**fields)

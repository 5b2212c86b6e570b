"""Groups of layers on the worker: one block table each, one builder per shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from hardpoint.interfaces import (
    AttentionMetadataBuilder,
    AttentionSpec,
    BlockSizeRule,
    CommonAttentionMetadata,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaCacheMode,
    MambaSpec,
    MixedSizeSpec,
    NewRow,
    SchedulerOutput,
    SlidingWindowSpec,
    spec_to_wire,
)
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.input_batch import InputBuilder
from hardpoint_torch_runtime.runner.slot_state import SlotState

CPU = torch.device("cpu")
FULL = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
WIDE = FullAttentionSpec(block_size=16, num_kv_heads=4, head_size=8, dtype="float32")
WINDOW = SlidingWindowSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=5)


class Watched(PlainAttentionBackend):
    """Remembers for which layers builders were asked."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[tuple[KVCacheSpec, tuple[str, ...]]] = []

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        self.asked.append((spec, tuple(layer_names)))
        return super().create_builder(spec, layer_names, max_rows, max_tokens, device)


def groups(
    planned: KVCacheSpec, wished: dict[str, KVCacheSpec], backend: PlainAttentionBackend, rule: BlockSizeRule
) -> AttentionGroups:
    config = KVCacheConfig(num_blocks=4, groups=(KVCacheGroup(tuple(wished), spec_to_wire(planned)),), tensors=())
    specs = config.layer_specs(wished)
    return AttentionGroups(config, specs, backend, rule, max_rows=2, max_tokens=8, max_model_len=100, device=CPU)


def test_layers_of_several_shapes_share_a_table_but_no_metadata() -> None:
    """R1.36: what a builder plans may depend on the heads; the block table does not."""
    wished: dict[str, KVCacheSpec] = {"a": FULL, "b": WIDE, "c": FULL}
    backend = Watched()
    made = groups(MixedSizeSpec.of(list(wished.values())), wished, backend, BlockSizeRule(16))
    assert backend.asked == [(FULL, ("a", "c")), (WIDE, ("b",))]
    assert [group.layer_names for group in made.groups] == [("a", "b", "c")]
    assert made.kernel_block_size_by_layer == {"a": 16, "b": 16, "c": 16}


def test_windows_alone_need_no_builder_of_their_own() -> None:
    """R1.28: one table for all, and each layer keeps its own window."""
    backend = Watched()
    merged = FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32", sliding_window=5)
    groups(merged, {"w": WINDOW, "f": FULL}, backend, BlockSizeRule(16))
    assert backend.asked == [(WINDOW, ("w", "f"))]


def test_steps_with_the_same_objects_share_one_map_of_layers(
    make_step: Callable[..., SchedulerOutput], make_row: Callable[..., NewRow]
) -> None:
    """R4.51: nothing is listed by layer again while builders and buffers give the same objects."""

    class Same(AttentionMetadataBuilder):
        """Its metadata is one object for all steps."""

        def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> object:
            return self

    class Keeping(PlainAttentionBackend):
        def create_builder(self, *args: Any) -> AttentionMetadataBuilder:
            return Same()

    made = groups(FULL, {"a": FULL, "b": FULL}, Keeping(), BlockSizeRule(16))
    state = SlotState(2, 99, [16])
    inputs = InputBuilder(state, 8, CPU)
    state.enter(make_row(0, list(range(20)), [1, 2]))
    maps = []
    for computed, count in ((18, 1), (19, 1), (10, 4)):
        record = make_step(0, [(0, 1, computed, count, True)])
        batch = inputs.build(record)
        maps.append((batch, *made.build(batch, record)))
    (first, metadata, mappings), (_, again, mapped_again), (last, other, mapped) = maps
    assert again is metadata
    assert mapped_again is mappings
    assert set(metadata) == set(mappings) == {"a", "b"}
    assert mappings["b"] is first.slot_mappings[0]
    assert mapped["a"] is last.slot_mappings[0]
    assert other == metadata


def test_layers_get_the_block_size_of_the_plan() -> None:
    """R12.40: alignment may have enlarged it; kernels keep a size they accept."""
    larger = FullAttentionSpec(block_size=48, num_kv_heads=2, head_size=8, dtype="float32")
    backend = Watched()
    made = groups(larger, {"a": FULL}, backend, BlockSizeRule(exact=(16,)))
    assert backend.asked == [(larger, ("a",))]
    assert (made.block_sizes, made.kernel_blocks) == ((48,), (3,))


def test_layers_of_an_encoder_see_both_sides() -> None:
    """R5.46."""
    encoder = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=2, head_size=8, dtype="float32")
    for spec, is_causal in ((FULL, True), (encoder, False)):
        made = groups(spec, {"a": spec}, Watched(), BlockSizeRule(16))
        assert [group.is_causal for group in made.groups] == [is_causal]


def test_one_state_serves_a_sequence_of_any_length() -> None:
    """R1.33: its table has one position for all tokens, and kernels split no state."""
    state = MambaSpec(block_size=16, shapes=((2,),), dtypes=("float32",))
    backend = Watched()
    made = groups(state, {"s": state, "t": state}, backend, BlockSizeRule(16))
    assert backend.asked == []
    assert (made.block_sizes, made.kernel_blocks) == ((101,), (1,))
    assert made.kernel_block_size_by_layer == {}
    assert [names for names, _ in made.groups[0].builders] == [("s", "t")]


@pytest.mark.parametrize("mode", [MambaCacheMode.ALL, MambaCacheMode.ALIGN])
def test_states_at_block_ends_have_positions_of_their_own(mode: MambaCacheMode) -> None:
    """R1.33."""
    state = MambaSpec(block_size=16, shapes=((2,),), dtypes=("float32",), mode=mode)
    assert groups(state, {"s": state}, Watched(), BlockSizeRule(exact=(64,))).block_sizes == (16,)


def test_models_without_attention_are_reordered_all_the_same() -> None:
    """R4.36, P4.9: what counts is that there are cache groups, not that anything attends."""
    state = MambaSpec(block_size=16, shapes=((2,),), dtypes=("float32",))
    assert groups(state, {"s": state}, Watched(), BlockSizeRule(16)).reorder_threshold == 1
    nothing = KVCacheConfig(num_blocks=1, groups=(), tensors=())
    made = AttentionGroups(
        nothing, {}, Watched(), BlockSizeRule(16), max_rows=2, max_tokens=8, max_model_len=100, device=CPU
    )
    assert made.reorder_threshold is None

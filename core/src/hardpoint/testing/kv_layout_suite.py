"""Conformance of the plugin kind ``kv_layout``: derive from :class:`KVLayoutSuite` and say how to create yours."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheSpec,
    KVLayout,
    KVPlanRequest,
    MixedSizeSpec,
    SlidingWindowSpec,
    spec_from_wire,
)
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["KVLayoutSuite", "check_memory", "layers"]


def layers(count: int = 3, *, heads: int = 2, head_size: int = 8, block_size: int = 4) -> dict[str, KVCacheSpec]:
    """Specs of a plain decoder."""
    spec = FullAttentionSpec(block_size=block_size, num_kv_heads=heads, head_size=head_size, dtype="float16")
    return {f"layers.{i}": spec for i in range(count)}


def request(
    specs: Mapping[str, KVCacheSpec], budget_bytes: int, *, num_blocks: int | None = None, max_model_len: int = 32
) -> KVPlanRequest:
    """A wish with small limits."""
    return KVPlanRequest(
        specs=specs,
        budget_bytes=budget_bytes,
        max_model_len=max_model_len,
        max_num_batched_tokens=16,
        num_blocks=num_blocks,
    )


class KVLayoutSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.KVLayout`.

    ``mixed`` declares that layers whose pages differ in size can be planned together. ``spec_classes`` are the kinds
    that a plan may name. ``windows`` declares that layers which keep the last tokens only are planned as the request's
    ``hybrid`` says.
    """

    kind: ClassVar[str] = "kv_layout"
    torch_free: ClassVar[bool] = True
    mixed: ClassVar[bool] = True
    windows: ClassVar[bool] = False
    spec_classes: ClassVar[Mapping[str, type[KVCacheSpec]]] = {
        FullAttentionSpec.kind: FullAttentionSpec,
        SlidingWindowSpec.kind: SlidingWindowSpec,
    }

    def create_layout(self) -> KVLayout:
        """The layout under test."""
        made: KVLayout = self.create_plugin(self.context())
        return made

    @pytest.fixture
    def layout(self) -> KVLayout:
        return self.create_layout()

    def check(self, layout: KVLayout, wish: KVPlanRequest) -> KVCacheConfig:
        """A plan whose groups and memory are sound."""
        plan = layout.plan(wish)
        self.check_groups(plan, wish)
        check_memory(plan, wish.specs)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=KVCacheConfig) == plan, "the plan must travel"
        return plan

    def check_groups(self, plan: KVCacheConfig, wish: KVPlanRequest) -> None:
        """R1.36: each layer in one group, with layers that need the same token slots, and what it asked for or more.

        A layout may enlarge blocks and pad pages; what workers then build is what the group's spec says.
        """
        names = [name for group in plan.groups for name in group.layer_names]
        assert sorted(names) == sorted(wish.specs), "every layer belongs to exactly one group"
        granted = plan.layer_specs(wish.specs)
        for group in plan.groups:
            spec = spec_from_wire(group.spec, self.spec_classes)
            parts = spec.layers if isinstance(spec, MixedSizeSpec) else (spec,) * len(group.layer_names)
            for name, part in zip(group.layer_names, parts, strict=True):
                asked, got = wish.specs[name], granted[name]
                assert got.block_size == spec.block_size, f"{name} has blocks of another size than its group"
                assert got.page_size_bytes == part.page_size_bytes, f"{name} has pages of another size"
                assert got.block_size >= asked.block_size, f"{name} asked for larger blocks"
                assert wish.hybrid is False or got.slot_key == spec.slot_key, f"{name} needs other token slots"

    @pytest.mark.parametrize("seed", range(12))
    def test_plans_are_sound(self, layout: KVLayout, seed: int) -> None:
        """R1.40: every page of every layer lies in its tensor, and no two share a byte."""
        rng = np.random.default_rng(seed)
        specs = layers(
            int(rng.integers(1, 9)),
            heads=int(rng.integers(1, 5)),
            head_size=int(rng.choice([8, 40, 64])),
            block_size=int(rng.choice([1, 4, 16])),
        )
        per_block = sum(spec.page_size_bytes for spec in specs.values())
        budget = per_block * int(rng.integers(33, 120)) + int(rng.integers(0, per_block))
        plan = self.check(layout, request(specs, budget))
        assert plan.num_blocks == budget // per_block, "the budget holds more blocks, or fewer, than were planned"

    def test_the_budget_is_kept(self, layout: KVLayout) -> None:
        """To the byte: one byte less is one block less."""
        specs = layers()
        per_block = sum(spec.page_size_bytes for spec in specs.values())
        exact = self.check(layout, request(specs, 20 * per_block))
        assert exact.num_blocks == 20
        assert memory_of(exact) <= 20 * per_block
        assert self.check(layout, request(specs, 20 * per_block - 1)).num_blocks == 19

    def test_a_given_number_of_blocks_is_taken(self, layout: KVLayout) -> None:
        assert self.check(layout, request(layers(), 1 << 18, num_blocks=17)).num_blocks == 17

    def test_layers_of_different_sizes(self, layout: KVLayout) -> None:
        if not self.mixed:
            pytest.skip("the layout declares that all layers must have pages of one size")
        specs = {**layers(2), "wide": layers(1, heads=4)["layers.0"]}
        plan = self.check(layout, request(specs, 1 << 20))
        assert memory_of(plan) <= 1 << 20

    def test_windowed_layers(self, layout: KVLayout) -> None:
        """R1.28, R1.36, R1.48: tables of their own, whose pages may lie where other groups' pages lie; on request one
        table for all, with as many blocks as full attention needs."""
        if not self.windows:
            pytest.skip("the layout declares no layers with windows")
        usual: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
        window = SlidingWindowSpec(**usual, sliding_window=6)
        specs: dict[str, KVCacheSpec] = {f"w{i}": window for i in range(10)}
        specs |= {f"f{i}": FullAttentionSpec(**usual) for i in range(2)}
        plan = self.check(layout, request(specs, 1 << 20))
        assert len(plan.groups) > 1
        assert memory_of(plan) <= 1 << 20
        for some in (specs, {name: spec for name, spec in specs.items() if spec == window}):
            single = self.check(layout, replace(request(some, 1 << 20), hybrid=False))
            assert len(single.groups) == 1, "one block table was asked for"
            assert spec_from_wire(single.groups[0].spec, self.spec_classes).max_blocks(32, 16) == 8

    def test_one_sequence_must_fit(self, layout: KVLayout) -> None:
        """R1.35: the null block included; the error names a number to set, and that number works."""
        specs = layers()
        per_block = sum(spec.page_size_bytes for spec in specs.values())
        for wish in (request(specs, 8 * per_block), request(specs, 1 << 30, num_blocks=8), request(specs, 0)):
            with pytest.raises(ConfigError) as caught:
                layout.plan(wish)
            assert re.search(r"\d", str(caught.value)), "the error must say which number to set"
        assert self.check(layout, request(specs, 9 * per_block)).num_blocks == 9

    def test_equal_wishes_give_equal_plans(self, layout: KVLayout) -> None:
        """Scheduler and workers rely on one plan."""
        wish = request(layers(5), 1 << 20)
        assert layout.plan(wish) == self.create_layout().plan(wish) == layout.plan(wish)


def memory_of(plan: KVCacheConfig) -> int:
    """Bytes to allocate: tensors of one buffer number share theirs."""
    shared: dict[int, int] = {}
    alone = 0
    for tensor in plan.tensors:
        if tensor.buffer is None:
            alone += tensor.size
        else:
            shared[tensor.buffer] = max(shared.get(tensor.buffer, 0), tensor.size)
    return alone + sum(shared.values())


def check_memory(plan: KVCacheConfig, specs: Mapping[str, KVCacheSpec]) -> None:
    """Each layer's pages inside its buffer, and no byte in two pages of one group (R1.40, R1.48).

    ``specs`` are the layers' wishes; pages are those that the plan grants.
    """
    specs = plan.layer_specs(specs)
    group_of = {name: number for number, group in enumerate(plan.groups) for name in group.layer_names}
    placed = [name for tensor in plan.tensors for name in tensor.layer_names]
    assert sorted(placed) == sorted(specs), "every layer has exactly one place in memory"
    spans: dict[tuple[object, int], list[tuple[int, int]]] = {}
    for number, tensor in enumerate(plan.tensors):
        for index, name in enumerate(tensor.layer_names):
            page = specs[name].page_size_bytes
            starts = tensor.offset + index * tensor.layer_stride + np.arange(plan.num_blocks) * tensor.block_stride
            assert tensor.offset >= 0, f"{name} begins before its buffer"
            assert int(starts[-1]) + page <= tensor.size, f"{name} reaches beyond its buffer of {tensor.size} bytes"
            buffer = ("own", number) if tensor.buffer is None else ("shared", tensor.buffer)
            found = spans.setdefault((buffer, group_of[name]), [])
            found.extend((int(start), int(start) + page) for start in starts)
    for found in spans.values():
        found.sort()
        for (_, end), (start, _) in pairwise(found):
            assert end <= start, "two pages share bytes"

"""The kit for KV layouts accepts a small correct one and rejects each mutant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import ClassVar

import msgspec
import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    AttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVCacheTensor,
    KVLayout,
    KVPlanRequest,
    SlidingWindowSpec,
    spec_to_wire,
)
from hardpoint.testing.kv_layout_suite import KVLayoutSuite
from hardpoint.testing.suite_runner import run_suite


class OneByOne(KVLayout):
    """A group and a tensor for each layer."""

    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        num_blocks = self.count(request)
        needed = 1 + sum(
            spec.max_blocks(request.max_model_len, request.max_num_batched_tokens)
            for spec in list(request.specs.values())[:1]
        )
        if num_blocks < needed:
            raise ConfigError(f"{num_blocks} KV cache blocks are too few; set --num-kv-blocks {needed}")
        return KVCacheConfig(
            num_blocks=num_blocks,
            groups=tuple(KVCacheGroup((name,), spec_to_wire(spec)) for name, spec in request.specs.items()),
            tensors=self.tensors(request.specs, num_blocks),
        )

    def count(self, request: KVPlanRequest) -> int:
        if request.num_blocks is not None:
            return request.num_blocks
        return request.budget_bytes // sum(spec.page_size_bytes for spec in request.specs.values())

    def tensors(self, specs: Mapping[str, KVCacheSpec], num_blocks: int) -> tuple[KVCacheTensor, ...]:
        return tuple(
            KVCacheTensor(
                size=spec.page_size_bytes * num_blocks,
                layer_names=(name,),
                layer_stride=spec.page_size_bytes * num_blocks,
                block_stride=spec.page_size_bytes,
            )
            for name, spec in specs.items()
        )


def make_suite(kind: type[KVLayout]) -> type[KVLayoutSuite]:
    class Suite(KVLayoutSuite):
        def create_layout(self) -> KVLayout:
            return kind()

    return Suite


class TestOneByOne(make_suite(OneByOne)):  # type: ignore[misc]
    pass


class OneTable(OneByOne):
    """On request one group for all, whose windows are those of layers that hold every token."""

    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        config = super().plan(request)
        if request.hybrid:
            return config
        return msgspec.structs.replace(config, groups=(self.whole(request.specs),))

    def whole(self, specs: Mapping[str, KVCacheSpec]) -> KVCacheGroup:
        one = next(iter(specs.values()))
        assert isinstance(one, AttentionSpec)
        usual = {"num_kv_heads": one.num_kv_heads, "head_size": one.head_size, "sliding_window": 6}
        full = FullAttentionSpec(block_size=one.block_size, dtype=one.dtype, **usual)  # type: ignore[arg-type]
        return KVCacheGroup(tuple(specs), spec_to_wire(full))


class WindowsSuite(make_suite(OneTable)):  # type: ignore[misc]
    windows: ClassVar[bool] = True


class TestOneTable(WindowsSuite):
    pass


class Overlaps(OneByOne):
    """Pages lie closer than they are large."""

    def tensors(self, specs: Mapping[str, KVCacheSpec], num_blocks: int) -> tuple[KVCacheTensor, ...]:
        whole = super().tensors(specs, num_blocks)
        return tuple(msgspec.structs.replace(one, block_stride=one.block_stride // 2) for one in whole)


class TooSmall(OneByOne):
    def tensors(self, specs: Mapping[str, KVCacheSpec], num_blocks: int) -> tuple[KVCacheTensor, ...]:
        return super().tensors(specs, num_blocks - 1)


class ForgetsALayer(OneByOne):
    def tensors(self, specs: Mapping[str, KVCacheSpec], num_blocks: int) -> tuple[KVCacheTensor, ...]:
        return super().tensors(specs, num_blocks)[:-1]


class OverBudget(OneByOne):
    """The null block comes on top."""

    def count(self, request: KVPlanRequest) -> int:
        return super().count(request) + (request.num_blocks is None)


class IgnoresTheNumber(OneByOne):
    def count(self, request: KVPlanRequest) -> int:
        return request.budget_bytes // sum(spec.page_size_bytes for spec in request.specs.values())


class NeverRefuses(OneByOne):
    def count(self, request: KVPlanRequest) -> int:
        return max(super().count(request), 9)


class IgnoresTheSetting(OneTable):
    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        return super().plan(replace(request, hybrid=True))


class AlwaysOneTable(OneTable):
    """Windowed layers get the blocks of all tokens although nobody asked."""

    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        config = super().plan(request)
        if len(set(request.specs.values())) == 1:
            return config
        full = next(spec for spec in request.specs.values() if isinstance(spec, FullAttentionSpec))
        return msgspec.structs.replace(config, groups=(KVCacheGroup(tuple(request.specs), spec_to_wire(full)),))


class KeepsWindows(OneTable):
    """One group, but it would not hold the blocks that its full layers need."""

    def whole(self, specs: Mapping[str, KVCacheSpec]) -> KVCacheGroup:
        window = next(spec for spec in specs.values() if isinstance(spec, SlidingWindowSpec))
        return KVCacheGroup(tuple(specs), spec_to_wire(window))


class HalvesBlocks(OneByOne):
    """Workers asked for larger blocks."""

    def plan(self, request: KVPlanRequest) -> KVCacheConfig:
        halved = {
            name: msgspec.structs.replace(spec, block_size=max(spec.block_size // 2, 1))
            for name, spec in request.specs.items()
        }
        return super().plan(replace(request, specs=halved))


MUTANTS: dict[type[KVLayout], str] = {
    IgnoresTheSetting: "test_windowed_layers",
    AlwaysOneTable: "test_windowed_layers",
    KeepsWindows: "test_windowed_layers",
    HalvesBlocks: "test_plans_are_sound",
    Overlaps: "test_plans_are_sound",
    TooSmall: "test_plans_are_sound",
    ForgetsALayer: "test_plans_are_sound",
    OverBudget: "test_the_budget_is_kept",
    IgnoresTheNumber: "test_a_given_number_of_blocks_is_taken",
    NeverRefuses: "test_one_sequence_must_fit",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[KVLayout]) -> None:
    suite = make_suite(mutant)
    suite.windows = issubclass(mutant, OneTable)
    assert MUTANTS[mutant] in run_suite(suite, only=MUTANTS[mutant]).failed

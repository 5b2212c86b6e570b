"""What attention backends are asked: fields that a backend does not know are refused for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import MISSING, dataclass, fields, replace
from typing import Any

import pytest

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
)
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.interfaces.platform import DeviceDescription

PLAIN: AttentionNeed = AttentionNeed(
    num_heads=4,
    num_kv_heads=2,
    head_size=16,
    dtype="float32",
    kv_cache_dtype="float32",
    device=DeviceDescription(device_type="cpu", name="test"),
    block_size=16,
)
FIRST: dict[str, Any] = {
    "kind": AttentionKind.ENCODER,
    "sliding_window": 4,
    "logits_soft_cap": 5.0,
    "uses_alibi": True,
    "uses_sinks": True,
    "uses_mla": True,
    "batch_invariant": True,
}
"""Backends of the first versions judge these."""
LATER: dict[str, Any] = {
    "chunk_size": 8,
    "keeps_prompt": True,
    "uses_mm_prefix": True,
    "uses_row_causality": True,
    "uses_sparse": True,
    "per_head_scales": True,
    "needs_lse": True,
    "dcp_size": 2,
    "uses_relative_bias": True,
}


class Lenient(AttentionBackend):
    """Refuses nothing that it is asked about."""

    name = "lenient"

    def refuse(self, need: AttentionNeed) -> str | None:
        return f"no {need.kind}" if need.kind is AttentionKind.ENCODER_DECODER else None

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return BlockSizeRule(multiple_of=1)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: Any
    ) -> AttentionMetadataBuilder:
        raise TypeError("it computes nothing")

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        raise TypeError("it computes nothing")


class Knowing(Lenient):
    known_needs = AttentionBackend.known_needs | {"chunk_size", "dcp_size"}


def test_every_optional_field_is_one_of_these() -> None:
    """A field that is added belongs to one of the lists above, so that somebody decided which."""
    optional = {field.name for field in fields(AttentionNeed) if field.default is not MISSING}
    assert optional == {*FIRST, *LATER, "block_size"}


@pytest.mark.parametrize("name", FIRST)
def test_what_was_always_there_is_the_backends_to_judge(name: str) -> None:
    assert Lenient().objection(replace(PLAIN, **{name: FIRST[name]})) is None


@pytest.mark.parametrize("name", LATER)
def test_what_a_backend_does_not_list_is_refused(name: str) -> None:
    """R5.5: also for backends that were written before there was such a need."""
    need = replace(PLAIN, **{name: LATER[name]})
    assert name in (Lenient().objection(need) or "")
    assert (Knowing().objection(need) is None) == (name in Knowing.known_needs)


def test_all_that_is_not_known_is_named_at_once() -> None:
    need = replace(PLAIN, keeps_prompt=True, uses_sparse=True, chunk_size=4)
    assert Knowing().objection(need) == "it does not know the need for keeps_prompt, uses_sparse"


def test_fields_of_later_versions_are_refused_as_well() -> None:
    @dataclass(frozen=True, slots=True)
    class LaterNeed(AttentionNeed):
        uses_magic: bool = False

    given = {field.name: getattr(PLAIN, field.name) for field in fields(PLAIN)}
    assert Knowing().objection(LaterNeed(**given)) is None
    assert "uses_magic" in (Knowing().objection(LaterNeed(**given, uses_magic=True)) or "")


def test_the_backends_own_reason_is_passed_on() -> None:
    """R5.12: for people, as it is."""
    assert Lenient().objection(replace(PLAIN, kind=AttentionKind.ENCODER_DECODER)) == "no encoder_decoder"
    assert Lenient().objection(replace(PLAIN, block_size=None)) is None

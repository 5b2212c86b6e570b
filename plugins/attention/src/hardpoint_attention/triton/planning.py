"""Which tiles a call runs with and into how many parts it cuts keys: pure functions of what the host knows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hardpoint_attention.triton.configs import Phase, SizeClass, TileConfig, choose_splits, choose_tiles
from hardpoint_attention.triton.device import DeviceFacts

__all__ = ["LaunchPlan", "LaunchQuestion", "Planner", "plan_fast", "plan_fixed"]


@dataclass(frozen=True, slots=True)
class LaunchQuestion:
    """One layer in one step. ``max_parts``: parts of all query tokens together for which there is scratch."""

    num_heads: int
    num_kv_heads: int
    size: SizeClass
    element_bytes: int
    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    max_parts: int
    device: DeviceFacts

    @property
    def group(self) -> int:
        return self.num_heads // self.num_kv_heads


@dataclass(frozen=True, slots=True)
class LaunchPlan:
    tiles: TileConfig
    splits: int = 1


Planner = Callable[[LaunchQuestion], LaunchPlan]


def plan_fast(question: LaunchQuestion) -> LaunchPlan:
    """Small blocks and split keys for steps of decodes, large blocks for all others."""
    asked = (question.device.target, question.size, question.element_bytes)
    tiles = choose_tiles(*asked, Phase.DECODE)
    heads = min(question.group, tiles.block_m)
    if question.max_query_len > tiles.block_m // heads:
        return LaunchPlan(choose_tiles(*asked, Phase.PREFILL))
    programs = question.num_rows * question.num_kv_heads * -(-question.group // heads)
    splits = choose_splits(
        num_tokens=question.num_tokens,
        programs=programs,
        max_seq_len=question.max_seq_len,
        max_parts=question.max_parts,
        processors=question.device.processors,
    )
    return LaunchPlan(tiles, splits)


def plan_fixed(question: LaunchQuestion) -> LaunchPlan:
    """The same for every step, so that a row is added up in one order whatever comes with it (R5.33)."""
    return LaunchPlan(choose_tiles(question.device.target, question.size, question.element_bytes, Phase.PREFILL))

"""A problem's contexts dealt out among ranks, by the definition and position by position: what each of them holds, and
the answers to its parts.

Legend: N ranks, I tokens dealt to a rank at a time, T tokens of the step, H query heads, V size of a head's values.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np
import torch

from hardpoint.interfaces.attention import CommonAttentionMetadata
from hardpoint.interfaces.kv_cache_specs import AttentionSpec
from hardpoint_testing_torch.attention_oracle import dense_attention
from hardpoint_testing_torch.attention_problems import AttentionProblem
from hardpoint_torch_runtime.layers import Partial

__all__ = ["RankShare", "merged_exactly", "shares", "step_answer"]


@dataclass(frozen=True, slots=True)
class RankShare:
    """What one of ``num_ranks`` has of ``whole``: its share of each context, and all of the step."""

    whole: AttentionProblem
    rank: int
    num_ranks: int
    interleave: int = 1

    def positions(self, row: int) -> list[int]:
        """Of the row's context, in the order in which they lie in the rank's blocks."""
        context, _ = self.whole.rows[row]
        return [position for position in range(context) if position // self.interleave % self.num_ranks == self.rank]

    @property
    def spec(self) -> AttentionSpec:
        made: AttentionSpec = msgspec.structs.replace(self.whole.spec(), context_shards=self.num_ranks)
        return made

    def kv_cache(self) -> torch.Tensor:
        """The rank's tokens from each row's first block on; NaN wherever it holds nothing."""
        held = [self.positions(row) for row in range(len(self.whole.rows))]
        history = tuple(
            (keys[mine], values[mine]) for (keys, values), mine in zip(self.whole.history, held, strict=True)
        )
        return replace(self.whole, history=history).kv_cache()

    def common(self) -> CommonAttentionMetadata:
        lengths = [len(self.positions(row)) for row in range(len(self.whole.rows))]
        local = np.array(lengths + [0] * self.whole.num_padding_rows, dtype=np.int32)
        on_device = torch.from_numpy(local).to(self.whole.query.device)
        return replace(self.whole.common(), dcp_local_seq_lens=on_device, dcp_local_seq_lens_cpu=local)

    def answer(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Output [T, H, V] and log-sum-exp [T, H] in float64 of what is over the rank's share, which has no sinks."""
        held = [self.positions(row) for row in range(len(self.whole.rows))]
        return dense_attention(replace(_seeing(self.whole, held), sinks=None))


def shares(whole: AttentionProblem, num_ranks: int, interleave: int = 1) -> list[RankShare]:
    """Those of all ranks, in their order."""
    return [RankShare(whole, rank, num_ranks, interleave) for rank in range(num_ranks)]


def step_answer(whole: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """As :meth:`RankShare.answer`, over the step's own tokens, where sinks belong."""
    return dense_attention(_seeing(whole, [list(range(context, context + query)) for context, query in whole.rows]))


def merged_exactly(parts: Sequence[Partial]) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, V] and log-sum-exp [T, H] of all parts as one, in float64 on the CPU."""
    lses = [part.known_lse.double().cpu() for part in parts]
    total = torch.logsumexp(torch.stack(lses), dim=0)
    merged = torch.zeros(parts[0].output.shape, dtype=torch.float64)
    for part, lse in zip(parts, lses, strict=True):
        seen = lse > -torch.inf
        merged[seen] += part.output.double().cpu()[seen] * torch.exp(lse - total)[seen].unsqueeze(-1)
    return merged, total


def _seeing(whole: AttentionProblem, positions: Sequence[Sequence[int]]) -> AttentionProblem:
    """The problem with each row's queries seeing no keys but these, as far as they see them at all."""
    longest = max(map(len, positions), default=0)
    by_row = [[*keys, *[-1] * (longest - len(keys))] for keys in positions]
    by_query = [keys for keys, (_, query) in zip(by_row, whole.rows, strict=True) for _ in range(query)]
    return replace(whole, selected=torch.tensor(by_query, dtype=torch.int32).view(whole.num_tokens, longest))

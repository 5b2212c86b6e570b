"""The judge of greedy tokens: ``transformers`` on the same weights, dequantized to float32.

It sees prompt and generated tokens in one forward. When the most likely token at every position is the one generated,
both sides would have produced the same sequence, by induction over its length.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

__all__ = ["Difference", "TransformersOracle"]

TIE_GAP = 1e-4
"""Two logits closer than this share of the logit range are a tie that either side may break its way."""

TIE_SHARE = 0.005
"""Largest share of positions that may be such ties."""


@dataclass(frozen=True, slots=True)
class Difference:
    """The token at ``position`` is not the oracle's; ``gap`` is relative to the logit range."""

    position: int
    token: int
    wanted: int
    gap: float

    @property
    def is_tie(self) -> bool:
        return self.gap < TIE_GAP


class TransformersOracle:
    """A causal model of ``transformers`` from a GGUF file or a folder."""

    def __init__(self, path: Path) -> None:
        from transformers import AutoModelForCausalLM

        source: dict[str, Any] = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
        folder = path.parent if source else path
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.model = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32, **source).eval()

    @torch.inference_mode()
    def differences(self, prompt: Sequence[int], generated: Sequence[int]) -> list[Difference]:
        """Positions of ``generated`` at which the oracle, given everything before, prefers another token."""
        tokens = torch.tensor([[*prompt, *generated]])
        logits = self.model(tokens).logits[0, len(prompt) - 1 : -1].double()
        spread = (logits.max(dim=-1).values - logits.min(dim=-1).values).clamp_min(1e-30)
        found = []
        for position in (logits.argmax(dim=-1) != torch.tensor(list(generated))).nonzero().flatten().tolist():
            row, token = logits[position], int(generated[position])
            gap = float((row.max() - row[token]) / spread[position])
            found.append(Difference(position, token, int(row.argmax()), gap))
        return found

    def require_equal(self, pairs: Sequence[tuple[Sequence[int], Sequence[int]]]) -> None:
        """Raise ``AssertionError`` unless all differences are ties, and few; ``pairs`` are (prompt, generated) ids."""
        differences = [one for prompt, generated in pairs for one in self.differences(prompt, generated)]
        total = sum(len(generated) for _, generated in pairs)
        faults = [one for one in differences if not one.is_tie]
        if faults:
            raise AssertionError(f"tokens differ from the oracle: {faults[:5]}")
        if len(differences) > TIE_SHARE * total:
            raise AssertionError(f"{len(differences)} ties in {total} positions: {differences}")

"""Models that only embed, through the whole engine: the hidden state of every token beside that of Hugging Face."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardpoint import Prompt
from hardpoint_testing_torch.parity import relative_error
from hardpoint_testing_torch.parity_case import MAX_BFLOAT16_ERROR, TENSOR_PARALLEL, EngineParity
from hardpoint_testing_torch.parity_report import MAX_RELATIVE_ERROR, ModeResult
from hardpoint_testing_torch.tiny_models import TinyModel

__all__ = ["EncoderParity"]

LENGTHS = (30, 7, 18, 1, 40, 5, 22, 12)


class EncoderParity(EngineParity):
    """Prompts are computed whole and once, so there are no chunks, no answers and nothing to find again."""

    why_not = "an encoder computes whole prompts, once"

    def runs(self) -> Mapping[str, Callable[[], ModeResult]]:
        return {
            "prefill": self._alone,
            "batch": self._together,
            "tp2": self._tensor_parallel,
            "bfloat16": self._bfloat16,
        }

    def _alone(self) -> ModeResult:
        """One prompt at a time."""
        pairs = []
        for prompt in self._prompts(1, 4, 5, 45):
            pairs += self._embed("prefill", [prompt], self._tiny)
        return self._compare("prefill", pairs)

    def _together(self) -> ModeResult:
        """Twice as many prompts as places, of all lengths."""
        return self._compare(
            "batch", self._embed("batch", self._prompts(*LENGTHS), self._tiny, max_num_batched_tokens=50)
        )

    def _tensor_parallel(self) -> ModeResult:
        """Two worker processes, each with its share of every layer."""
        return self._compare("tp2", self._embed("tp2", self._prompts(*LENGTHS), self._tiny, **TENSOR_PARALLEL))

    def _bfloat16(self) -> ModeResult:
        """Weights that bfloat16 can hold, computed in bfloat16 here and in float32 there; all entries together."""
        tiny = self._checkpoint(torch.bfloat16)
        pairs = self._embed("bfloat16", self._prompts(*LENGTHS), tiny, dtype="bfloat16")
        found, expected = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        error = float((found - expected).norm() / expected.norm())
        return ModeResult("bfloat16", error, self.limit("bfloat16", MAX_BFLOAT16_ERROR), len(found))

    def _embed(
        self, mode: str, prompts: Sequence[list[int]], tiny: TinyModel, **changes: Any
    ) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """What the engine and the oracle say of each prompt, [tokens, hidden size]."""
        with self._engine(mode, tiny, **changes) as llm:
            asked = [Prompt(token_ids=prompt) for prompt in prompts]
            outputs = llm.embed(asked, pooling="token_embed", normalize=False)
        found = [torch.from_numpy(output.embedding.copy()) for output in outputs]
        return list(zip(found, (tiny.logits(prompt) for prompt in prompts), strict=True))

    def _compare(self, mode: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> ModeResult:
        error = max(relative_error(found, expected) for found, expected in pairs)
        return ModeResult(mode, error, self.limit(mode, MAX_RELATIVE_ERROR), sum(len(found) for found, _ in pairs))

"""Models that only embed or judge, through the whole engine: what comes of a text beside that of Hugging Face."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hardpoint import LLM, Prompt
from hardpoint.interfaces import EmbeddingOutput
from hardpoint.interfaces.request import EngineOutputs
from hardpoint_testing_torch.parity import relative_error
from hardpoint_testing_torch.parity_case import MAX_BFLOAT16_ERROR, TENSOR_PARALLEL, EngineParity
from hardpoint_testing_torch.parity_report import MAX_RELATIVE_ERROR, ModeResult
from hardpoint_testing_torch.tiny_models import TinyModel

__all__ = ["EncoderParity", "PooledDecoderParity"]

CHUNKS = (1, 3, 4, 17)
LENGTHS = (30, 7, 18, 1, 40, 5, 22, 12)


class EncoderParity(EngineParity):
    """Of models that embed the hidden state of every token is compared, of models that judge the raw scores.

    Prompts are computed whole and once, so there are no chunks, no answers and nothing to find again.
    """

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
        """What the engine and the oracle say of each prompt, [tokens, hidden size] or scores."""
        with self._engine(mode, tiny, **changes) as llm:
            outputs = self._outputs(llm, prompts, tiny)
        found = [torch.from_numpy(output.embedding.copy()) for output in outputs]
        say = tiny.scores if tiny.judges else tiny.logits
        return list(zip(found, (say(prompt) for prompt in prompts), strict=True))

    def _outputs(self, llm: LLM, prompts: Sequence[list[int]], tiny: TinyModel) -> list[EmbeddingOutput]:
        asked = [Prompt(token_ids=prompt) for prompt in prompts]
        return llm.embed(asked, pooling=None if tiny.judges else "token_embed", normalize=False)

    def _compare(self, mode: str, pairs: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> ModeResult:
        num_rows = sum(len(found) for found, _ in pairs)
        if self._tiny.judges:
            # A single score may be next to nothing: the largest one of all texts is the measure.
            pairs = [(_flat(found for found, _ in pairs), _flat(expected for _, expected in pairs))]
        error = max(relative_error(found, expected) for found, expected in pairs)
        return ModeResult(mode, error, self.limit(mode, MAX_RELATIVE_ERROR), num_rows)


def _flat(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    return torch.cat([part.flatten() for part in parts])


class PooledDecoderParity(EncoderParity):
    """Causal models that only embed or judge: their prompts may come in chunks, and be thrown out half-way."""

    why_not = "nothing is generated"

    def runs(self) -> Mapping[str, Callable[[], ModeResult]]:
        return {**super().runs(), "chunk": self._chunk, "prefix": self._prefix, "preempt": self._preempt}

    def _chunk(self) -> ModeResult:
        """Prompts in steps of several sizes, that of a block among them."""
        pairs = []
        for size in CHUNKS:
            pairs += self._embed(
                "chunk", self._prompts(30, 17), self._tiny, max_num_batched_tokens=size, max_num_seqs=1
            )
        return self._compare("chunk", pairs)

    def _prefix(self) -> ModeResult:
        """Prompts that begin like one before: their last states, which alone may go on from what is cached."""
        if self._tiny.info.architecture.endswith("ForTokenClassification"):
            return ModeResult("prefix", note="scores of all tokens need all states, so nothing is taken from the cache")
        shared, *tails = self._prompts(41, 9, 2)
        prompts = [shared, *([*shared, *tail] for tail in tails)]
        with self._engine("prefix", prefix_caching=True) as llm:
            llm.embed([Prompt(token_ids=shared)])
            outputs = llm.embed([Prompt(token_ids=one) for one in prompts], pooling="last", normalize=False)
        cached = [output.num_cached_tokens for output in outputs]
        if not all(cached):
            return ModeResult("prefix", math.inf, note=f"no prefix was found again: {cached} cached tokens")
        judges = self._tiny.judges
        expected = [self._tiny.scores(one) if judges else self._tiny.logits(one)[-1] for one in prompts]
        found = [torch.from_numpy(output.embedding.copy()) for output in outputs]
        return self._compare("prefix", list(zip(found, expected, strict=True)))

    def _preempt(self) -> ModeResult:
        """Everybody is thrown out after every other chunk, as long as any is left to be."""
        prompts = self._prompts(30, 6, 17, 33)
        with self._engine("preempt", max_num_batched_tokens=24) as llm:
            outputs = _thrown_out(llm, lambda: self._outputs(llm, prompts, self._tiny))
            num_preemptions = llm.core.scheduler.stats().num_preemptions
        if not num_preemptions:
            return ModeResult("preempt", math.inf, note="no request was preempted")
        say = self._tiny.scores if self._tiny.judges else self._tiny.logits
        found = [torch.from_numpy(output.embedding.copy()) for output in outputs]
        return self._compare("preempt", list(zip(found, (say(prompt) for prompt in prompts), strict=True)))


def _thrown_out(llm: LLM, ask: Callable[[], list[EmbeddingOutput]]) -> list[EmbeddingOutput]:
    """What ``ask`` gives while the first steps each end with everybody preempted."""
    core, step, left = llm.core, llm.core.step, [3]

    def interrupted() -> dict[int, EngineOutputs]:
        made = step()
        if left[0]:
            left[0] -= 1
            core.scheduler.reset_prefix_cache(reset_running=True)
        return made

    core.step = interrupted  # type: ignore[method-assign]
    try:
        return ask()
    finally:
        core.step = step  # type: ignore[method-assign]

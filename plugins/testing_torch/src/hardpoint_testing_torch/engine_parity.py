"""Does an installed architecture compute what Hugging Face computes, through the whole engine?

    report = run_parity(ParityCase("Qwen3ForCausalLM", {"head_dim": 16}), folder)
    print(report)
    report.require_ok()

A tiny random checkpoint is made, saved and served by :class:`hardpoint.LLM` with the installed plugins: loader, model,
attention backend, scheduler and KV cache. Each mode makes the engine compute the same kind of prompts in another way.
Logits are compared as log-probabilities of the whole vocabulary, at every position that the engine reports. The judge
sees prompt and generated tokens in one forward.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.interfaces import Feature, PositionLogprobs, RequestOutput
from hardpoint_testing_torch.drawn_media import MediaDrawer, media_drawer
from hardpoint_testing_torch.encoder_parity import EncoderParity, PooledDecoderParity
from hardpoint_testing_torch.parity import TIE_GAP
from hardpoint_testing_torch.parity_case import MAX_BFLOAT16_ERROR, MODES, TENSOR_PARALLEL, EngineParity, ParityCase
from hardpoint_testing_torch.parity_report import MAX_RELATIVE_ERROR, ModeResult, ParityReport
from hardpoint_testing_torch.tiny_models import TinyModel

__all__ = ["EncoderDecoderParity", "GenerationParity", "VisionLanguageParity", "run_parity"]

NUM_TOKENS = 64
CHUNKS = (1, 3, 4, 17)


class GenerationParity(EngineParity):
    """Models that generate: log-probabilities and greedy tokens."""

    def runs(self) -> Mapping[str, Callable[[], ModeResult]]:
        return {
            "prefill": self._prefill,
            "chunk": self._chunk,
            "decode": self._decode,
            "batch": self._batch,
            "prefix": self._prefix,
            "preempt": self._preempt,
            "tp2": self._tensor_parallel,
            "bfloat16": self._bfloat16,
        }

    def _prefill(self) -> ModeResult:
        """Whole prompts, one at a time: logits of all their positions."""
        with self._engine("prefill") as llm:
            outputs = [self._ask(llm, [prompt], 1, echoes=True)[0] for prompt in self._prompts(1, 4, 5, 45)]
        return self._compare("prefill", outputs)

    @property
    def _chunk_sizes(self) -> Sequence[int]:
        return CHUNKS

    def _chunk(self) -> ModeResult:
        """Prompts in steps of several sizes, that of a block among them: logits of all their positions."""
        prompts = self._prompts(30, 17)
        outputs = []
        for size in self._chunk_sizes:
            with self._engine("chunk", max_num_batched_tokens=size, max_num_seqs=1) as llm:
                outputs += self._ask(llm, prompts, 3, echoes=True)
        return self._compare("chunk", outputs)

    def _decode(self) -> ModeResult:
        """Greedy answers, one request at a time: logits of each generated token."""
        with self._engine("decode") as llm:
            outputs = [self._ask(llm, [prompt], NUM_TOKENS)[0] for prompt in self._prompts(6, 1, 13)]
        return self._compare("decode", outputs)

    def _batch(self) -> ModeResult:
        """Twice as many requests as places, of all lengths: prefills beside decodes, joining and leaving."""
        prompts = self._prompts(30, 7, 18, 1, 40, 5, 22, 12)
        counts = [NUM_TOKENS, 9, 20, NUM_TOKENS, 1, 33, 40, 50]
        with self._engine("batch", max_num_batched_tokens=24) as llm:
            outputs = self._ask(llm, prompts, counts, echoes=True)
        return self._compare("batch", outputs)

    def _prefix(self) -> ModeResult:
        """The same prompt again, and others that begin like it: what is cached is not computed again."""
        shared, *tails = self._prompts(41, 9, 2)
        with self._engine("prefix", prefix_caching=True) as llm:
            cold = self._ask(llm, [shared], 16)
            warm = self._ask(llm, [shared, *([*shared, *tail] for tail in tails)], NUM_TOKENS)
        if not all(output.num_cached_tokens > 0 for output in warm):
            cached = [output.num_cached_tokens for output in warm]
            return ModeResult("prefix", math.inf, note=f"no prefix was found again: {cached} cached tokens")
        return self._compare("prefix", [*cold, *warm])

    def _preempt(self) -> ModeResult:
        """Everybody is thrown out again and again, and computed anew from the first token on."""
        outputs: dict[int, RequestOutput] = {}
        prompts = self._prompts(30, 6, 17, 33)
        with self._engine("preempt") as llm:
            params = _params(llm, NUM_TOKENS)
            stream = llm.stream([self._prompt(prompt) for prompt in prompts], params)
            for count, (index, output) in enumerate(stream):
                outputs[index] = output
                if count % 23 == 22:
                    llm.core.scheduler.reset_prefix_cache(reset_running=True)
            num_preemptions = llm.core.scheduler.stats().num_preemptions
        if num_preemptions < 2 * len(prompts):
            return ModeResult("preempt", math.inf, note=f"only {num_preemptions} requests were preempted")
        return self._compare("preempt", list(outputs.values()))

    def _tensor_parallel(self) -> ModeResult:
        """Two worker processes, each with its share of every layer."""
        with self._engine("tp2", **TENSOR_PARALLEL) as llm:
            outputs = self._ask(llm, self._prompts(6, 30, 13), NUM_TOKENS, echoes=True)
        return self._compare("tp2", outputs)

    def _bfloat16(self) -> ModeResult:
        """Weights that bfloat16 can hold, computed in bfloat16 here and in float32 there.

        Single logits and tokens may differ, say where a router chooses another expert; the error is that of all logits
        together, root mean square over root mean square.
        """
        tiny = self._checkpoint(torch.bfloat16)
        with self._engine("bfloat16", tiny, dtype="bfloat16") as llm:
            outputs = self._ask(llm, self._prompts(6, 30, 13), 24, echoes=True)
        answers = [_Answer.of(output) for output in outputs]
        judged = [self._expected(tiny, answer.tokens[:-1], answer.num_prompt) for answer in answers]
        pairs = [answer.centered(logits) for answer, logits in zip(answers, judged, strict=True)]
        found, expected = (torch.cat(parts) for parts in zip(*pairs, strict=True))
        error = float((found - expected).norm() / expected.norm())
        limit = self.limit("bfloat16", MAX_BFLOAT16_ERROR)
        return ModeResult("bfloat16", error, limit, len(found))

    def _prompt(self, tokens: Sequence[int]) -> Prompt:
        """What is asked where ``tokens`` are to be continued."""
        return Prompt(token_ids=list(tokens))

    def _expected(self, tiny: TinyModel, tokens: list[int], num_prompt: int) -> torch.Tensor:
        """The oracle's logits [tokens, vocabulary] where ``num_prompt`` of the ``tokens`` were asked."""
        del num_prompt
        return tiny.logits(tokens)

    def _ask(
        self, llm: LLM, prompts: Sequence[Sequence[int]], counts: int | Sequence[int], *, echoes: bool = False
    ) -> list[RequestOutput]:
        """Greedy answers of exactly ``counts`` tokens with all log-probabilities; with ``echoes`` the prompt's too."""
        each = [counts] * len(prompts) if isinstance(counts, int) else counts
        params = [_params(llm, count, echoes=echoes) for count in each]
        return llm.generate([self._prompt(prompt) for prompt in prompts], params)

    def _compare(self, mode: str, outputs: Sequence[RequestOutput]) -> ModeResult:
        error, positions, differences = 0.0, 0, 0
        for output in outputs:
            answer = _Answer.of(output)
            logits = self._expected(self._tiny, answer.tokens[:-1], answer.num_prompt)
            error = max(error, answer.error(logits))
            positions += len(answer.rows)
            differences += answer.num_differences(logits)
        return ModeResult(mode, error, self.limit(mode, MAX_RELATIVE_ERROR), positions, differences)


class EncoderDecoderParity(GenerationParity):
    """Models whose decoder attends to an encoder's output. Each prompt of the decoder goes with an input of the encoder
    that is drawn from it, so that the judge can draw the same."""

    why_not = "no hash of the decoder's tokens stands for what an encoder has seen, so no prefix is kept"

    def runs(self) -> Mapping[str, Callable[[], ModeResult]]:
        return {mode: run for mode, run in super().runs().items() if mode != "prefix"}

    def _prompt(self, tokens: Sequence[int]) -> Prompt:
        name, data, length = self._drawn(tokens)
        digest = hashlib.sha256(data.tobytes()).hexdigest()
        feature = Feature(
            modality=name, content_hash=digest, offset=0, length=1, num_encoder_tokens=length, data={name: data}
        )
        return Prompt(token_ids=list(tokens), features=(feature,))

    @torch.inference_mode()
    def _expected(self, tiny: TinyModel, tokens: list[int], num_prompt: int) -> torch.Tensor:
        name, data, _ = self._drawn(tokens[:num_prompt])
        given = {"input_ids" if name == "token_ids" else name: torch.from_numpy(data)[None]}
        return tiny.oracle(**given, decoder_input_ids=torch.tensor([tokens])).logits[0].float()

    def _drawn(self, tokens: Sequence[int]) -> tuple[str, np.ndarray, int]:
        """Name and values of the input that goes with these tokens, and its length in encoder tokens."""
        config = self._tiny.oracle.config
        draw = np.random.default_rng(list(tokens))
        if hasattr(config, "num_mel_bins"):
            length = config.max_source_positions
            states = draw.standard_normal((config.num_mel_bins, 2 * length), dtype=np.float32)
            return "input_features", states, length
        length = int(draw.integers(1, 50))
        return "token_ids", draw.integers(0, config.vocab_size, length, dtype=np.int32), length


class VisionLanguageParity(GenerationParity):
    """Decoders that see images: wherever a prompt has room for one, there are images in it."""

    @property
    def _chunk_sizes(self) -> Sequence[int]:
        least = self._drawer.least_step
        return sorted({max(size, least) for size in (*CHUNKS, least + 1)})

    def _prompts(self, *lengths: int) -> list[list[int]]:
        return [self._drawer.place(prompt, self._random) for prompt in super()._prompts(*lengths)]

    def _prompt(self, tokens: Sequence[int]) -> Prompt:
        return Prompt(token_ids=list(tokens), features=tuple(item.feature() for item in self._drawer.shown(tokens)))

    @torch.inference_mode()
    def _expected(self, tiny: TinyModel, tokens: list[int], num_prompt: int) -> torch.Tensor:
        given = self._drawer.oracle_inputs(self._drawer.shown(tokens[:num_prompt]), len(tokens))
        return tiny.oracle(torch.tensor([tokens]), **given).logits[0].float()

    @property
    def _drawer(self) -> MediaDrawer:
        drawer = media_drawer(self._tiny.oracle.config)
        if drawer is None:
            raise TypeError(f"nobody draws images for {self.case.architecture}")
        return drawer


@dataclass(frozen=True, slots=True)
class _Answer:
    """``rows`` are positions whose log-probabilities ``values`` [rows, vocabulary] the engine reported."""

    tokens: list[int]
    num_prompt: int
    rows: list[int]
    values: torch.Tensor

    @classmethod
    def of(cls, output: RequestOutput) -> _Answer:
        if output.error is not None:
            raise RuntimeError(f"request {output.request_id} ended with {output.error!r}")
        prompt, answer = list(output.prompt_token_ids), output.outputs[0]
        # An entry of the prompt says what was expected at its place: it belongs to the position before.
        entries = {place - 1: entry for place, entry in enumerate(output.prompt_logprobs or ()) if entry is not None}
        entries |= {len(prompt) - 1 + place: entry for place, entry in enumerate(answer.logprobs or ())}
        values = torch.stack([_distribution(entry) for entry in entries.values()])
        return cls(prompt + list(answer.token_ids), len(prompt), list(entries), values)

    def centered(self, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """What was found and what the oracle's ``logits`` say, float64 [rows, vocabulary], each row less its mean."""
        expected = logits[self.rows].double()
        return self.values - self.values.mean(-1, keepdim=True), expected - expected.mean(-1, keepdim=True)

    def error(self, logits: torch.Tensor) -> float:
        """Largest deviation over the largest expected logit; infinite if anything is not finite."""
        if not bool(torch.isfinite(self.values).all()):
            return math.inf
        expected = torch.log_softmax(logits[self.rows].double(), dim=-1)
        return float((self.values - expected).abs().max() / logits.abs().max())

    def num_differences(self, logits: torch.Tensor) -> int:
        """Generated tokens that are not the oracle's, though its two best ones are no near-tie."""
        answer = logits[self.num_prompt - 1 :]
        best = answer.topk(2, dim=-1)
        gap = (best.values[:, 0] - best.values[:, 1]) / (answer.amax(-1) - answer.amin(-1))
        differs = best.indices[:, 0] != torch.tensor(self.tokens[self.num_prompt :])
        return int((differs & (gap > TIE_GAP)).sum())


def _distribution(entry: PositionLogprobs) -> torch.Tensor:
    """float64 [vocabulary]."""
    values = torch.full((len(entry.top),), torch.nan, dtype=torch.float64)
    values[[one.token_id for one in entry.top]] = torch.tensor([one.logprob for one in entry.top], dtype=torch.float64)
    return values


def _params(llm: LLM, count: int, *, echoes: bool = False) -> SamplingParams:
    width = llm.limits.vocab_size
    echo = width if echoes else None
    return SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True, logprobs=width, prompt_logprobs=echo)


def _parity_of(oracle: Any) -> type[EngineParity]:
    fields = getattr(oracle.config_class, "__dataclass_fields__", {})
    if not oracle.can_generate():
        return PooledDecoderParity if "num_key_value_heads" in fields else EncoderParity
    if media_drawer(oracle.config_class()) is not None:
        return VisionLanguageParity
    return EncoderDecoderParity if oracle.config_class().is_encoder_decoder else GenerationParity


def run_parity(case: ParityCase, folder: Path, *, modes: Iterable[str] = MODES, seed: int = 0) -> ParityReport:
    """Run ``modes`` of ``case`` with checkpoints below ``folder``, which must hold none yet.

    Raises what the engine raises for a model that it cannot load or run.
    """
    parity = _parity_of(getattr(transformers, case.architecture))(case, folder, seed=seed)
    return ParityReport(case.architecture, case.name, tuple(parity.run(mode) for mode in modes))

"""The optional tier of the kind ``worker``: each test belongs to a switch, and what is switched off is skipped."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.errors import HardpointError
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.request import PoolingParams, SamplingParams
from hardpoint.interfaces.step import GrammarMask, LogprobArrays, TokenUpdate
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_testing_torch.worker_base import PROMPTS, ForcedToken, OnlyTheBest, Start, WorkerSuiteBase
from hardpoint_testing_torch.worker_driver import WorkerDriver
from hardpoint_testing_torch.worker_world import LOADER, WorkerWorld, check_greedy, start_driver

__all__ = ["WorkerFeatures"]

FORCED = 77
TOLERANCE = 1e-3
EMBEDDING = "model.embed_tokens.weight"


class _Watched(PlainAttentionBackend):
    """Counts the layers it serves."""

    def __init__(self) -> None:
        self.layers = 0

    def create_impl(self, params: Any) -> Any:
        self.layers += 1
        return super().create_impl(params)


class _Undoing(QuantizationMethod):
    """Quantizes nothing and remembers what it was asked; ``reason`` makes it refuse."""

    name = "undoing"

    def __init__(self, reason: str | None = None) -> None:
        self.reason = reason
        self.asked: list[str] = []

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        del info, device_type
        return self.reason

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        del shape
        self.asked.append(layer_name)
        return None


class WorkerFeatures(WorkerSuiteBase):
    """Log-probabilities, grammar, logits processors, chosen backends, embeddings, tokens from elsewhere."""

    def _processors(self, tiny: TinyModel, start: Start, **own: Any) -> WorkerDriver:
        """A worker that runs the processors ``own`` in their order."""
        if self.logits_processors_option is None:
            pytest.skip("the worker declares no logits processors (logits_processors_option is None)")
        world = self.world(tiny)
        world.plugins.own.update({("logits_processor", name): _giving(made) for name, made in own.items()})
        return start(world, **{self.logits_processors_option: tuple(own)})

    def test_logits_processors_are_applied(self, tiny: TinyModel, start: Start) -> None:
        """To the requests that ask for it and to no other; state ends with the request."""
        processor = ForcedToken()
        driver = self._processors(tiny, start, kit_force=processor)
        driver.add("plain", PROMPTS["few"])
        driver.add("forced", PROMPTS["long"], sampling=_forced())
        tokens = driver.generate(5)
        assert tokens["forced"] == [FORCED] * 5, "the processor's only token was not drawn"
        check_greedy(tiny, PROMPTS["few"], tokens["plain"], "a request the processor leaves alone")
        assert processor.entered == ["plain", "forced"], "each request enters the processor once"
        for row in driver.rows.values():
            assert processor.heard(row.slot or 0, row.tokens[row.num_prompt :]), (
                f"observe() was told other tokens of {row.name} than were drawn"
            )
        slot = driver.rows["forced"].slot
        driver.finish("forced")
        driver.add("next", PROMPTS["block"])
        check_greedy(tiny, PROMPTS["block"], driver.generate(5)["next"], "the next request in a slot")
        assert slot in processor.removed, "the processor was not told that its request ended"

    def test_logits_processors_survive_preemption(self, tiny: TinyModel, start: Start) -> None:
        """Out of the batch a request is removed, and it is added again when it comes back."""
        processor = ForcedToken()
        driver = self._processors(tiny, start, kit_force=processor)
        driver.add("forced", PROMPTS["few"], sampling=_forced())
        driver.add("plain", PROMPTS["one"])
        driver.generate(2)
        driver.preempt("forced")
        driver.step({"plain": 1})
        assert not processor.tokens, "the processor was not told that its request left the batch"
        assert driver.generate(5)["forced"] == [FORCED] * 5

    def test_processors_that_keep_the_argmax_reach_random_requests(self, tiny: TinyModel, start: Start) -> None:
        """R6.14: applied after temperature, to random rows."""
        driver = self._processors(tiny, start, kit_best=OnlyTheBest())
        driver.add("random", PROMPTS["few"], sampling=SamplingParams(temperature=1.5, seed=3))
        check_greedy(tiny, PROMPTS["few"], driver.generate(6)["random"], "random, but only the best token left")

    def test_an_unknown_logits_processor_stops_the_start(self, tiny: TinyModel) -> None:
        """Ignoring one would serve text that nobody asked for."""
        if self.logits_processors_option is None:
            pytest.skip("the worker declares no logits processors (logits_processors_option is None)")
        world, option = self.world(tiny), {self.logits_processors_option: ("kit_of_nobody",)}
        with pytest.raises(HardpointError, match="kit_of_nobody"):
            self._start_only(world, **option)

    def _start_only(self, world: WorkerWorld, **options: Any) -> None:
        start_driver(self.worker_in(world, **options), world.config)

    def test_the_chosen_attention_backend_is_used(self, tiny: TinyModel, start: Start) -> None:
        """R5.4: by name, for every layer."""
        if not self.uses_attention_backends:
            pytest.skip("the worker declares not to use attention backends")
        watched = _Watched()
        world = self.world(tiny, attention_backend="kit_watched")
        world.plugins.own["attention_backend", "kit_watched"] = lambda ctx: watched
        driver = start(world)
        assert watched.layers == len(driver.worker.kv_cache_specs()), "attention_backend was not what the layers got"

    def test_the_chosen_quantization_is_used(self, tiny: TinyModel, start: Start) -> None:
        """Each linear layer is offered to the method, and one that refuses stops the start with its reason."""
        if not self.uses_quantization:
            pytest.skip("the worker declares not to use quantization methods")
        method = _Undoing()
        world = self.world(tiny, quantization="kit_undoing")
        world.plugins.own["quantization", "kit_undoing"] = lambda ctx: method
        driver = start(world)
        assert method.asked, "the quantization method was asked for no layer"
        driver.add("few", PROMPTS["few"])
        check_greedy(tiny, PROMPTS["few"], driver.generate(4)["few"])
        world.plugins.own["quantization", "kit_undoing"] = lambda ctx: _Undoing("only for Sundays")
        with pytest.raises(HardpointError, match="only for Sundays"):
            self._start_only(world)

    def test_log_probabilities(self, tiny: TinyModel, start: Start) -> None:
        """R6.12: the model's own, of the sampled token first, then of the best ones; only for rows that asked."""
        if not self.computes_logprobs:
            pytest.skip("the worker declares no log-probabilities")
        driver = start()
        driver.add("silent", PROMPTS["one"])
        driver.add("asking", PROMPTS["few"], sampling=SamplingParams(temperature=0.0, logprobs=3))
        output = driver.step()
        found = output.logprobs
        assert isinstance(found, LogprobArrays), "no log-probabilities for a row that asked"
        assert found.rows.tolist() == [1], "log-probabilities belong to the rows that asked"
        exact = torch.log_softmax(tiny.logits(list(PROMPTS["few"]))[-1], dim=-1)
        ids = found.token_ids[0].tolist()
        assert ids[0] == driver.outputs["asking"][0], "the sampled token comes first"
        assert set(exact.topk(3).indices.tolist()) <= set(ids), "the best tokens are missing"
        real = [(token, value) for token, value in zip(ids, found.logprobs[0].tolist(), strict=True) if token >= 0]
        np.testing.assert_allclose([value for _, value in real], exact[[token for token, _ in real]], atol=TOLERANCE)
        assert found.ranks.tolist() == [1]

    @pytest.mark.parametrize("chunks", [(7,), (3, 4), (1, 5, 1)], ids=str)
    def test_prompt_log_probabilities(self, tiny: TinyModel, start: Start, chunks: tuple[int, ...]) -> None:
        """Entry i is of the token after position i, in any chunking; what follows the prompt is sampled instead."""
        if not self.computes_prompt_logprobs:
            pytest.skip("the worker declares no log-probabilities of prompts")
        driver, prompt = start(), list(PROMPTS["few"])
        driver.add("asking", prompt, sampling=SamplingParams(temperature=0.0, prompt_logprobs=1))
        parts = [driver.step({"asking": count}).prompt_logprobs for count in chunks]
        found = [part for part in parts if part is not None]
        assert sum(len(part.rows) for part in found) == len(prompt) - 1, "one entry for each token but the first"
        ids = np.concatenate([part.token_ids[:, 0] for part in found]).tolist()
        assert ids == prompt[1:], "the prompt's own tokens come first"
        exact = torch.log_softmax(tiny.logits(prompt), dim=-1)[torch.arange(len(prompt) - 1), prompt[1:]]
        np.testing.assert_allclose(np.concatenate([part.logprobs[:, 0] for part in found]), exact, atol=TOLERANCE)

    def test_a_grammar_is_obeyed(self, tiny: TinyModel, start: Start) -> None:
        """The mask arrives with ``sample`` and holds for its rows only."""
        if not self.applies_grammar:
            pytest.skip("the worker declares not to apply grammars")
        driver = start()
        driver.add("free", PROMPTS["few"])
        driver.add("bound", PROMPTS["block"])
        bits = np.zeros((1, -(-tiny.info.vocab_size // 32)), dtype=np.int32)
        bits[0, FORCED // 32] = 1 << FORCED % 32
        step = driver.make_step(defers_sampling=True)
        driver.absorb(step, driver.run(step, GrammarMask(np.asarray([1], dtype=np.int32), bits)))
        assert driver.outputs["bound"] == [FORCED], "a token was drawn that the grammar forbids"
        check_greedy(tiny, PROMPTS["few"], driver.generate(3)["free"], "a row without grammar")

    def test_prompt_embeddings(self, tiny: TinyModel, start: Start) -> None:
        """They take the place of the prompt's token ids, also in chunks; outputs are tokens as ever."""
        if not self.takes_prompt_embeddings:
            pytest.skip("the worker declares not to take embeddings")
        driver, prompt = start(), list(PROMPTS["few"])
        embeddings = tiny.tensors()[EMBEDDING][prompt].float().numpy()
        driver.add("embedded", [0] * len(prompt), prompt_embeds=embeddings)
        driver.add("plain", PROMPTS["block"])
        tokens = driver.generate(4, chunk=3)
        check_greedy(tiny, prompt, tokens["embedded"], "from embeddings")
        check_greedy(tiny, PROMPTS["block"], tokens["plain"], "next to embeddings")

    @pytest.mark.parametrize("chunks", [(7,), (3, 4), (1, 5, 1)], ids=str)
    def test_pooled_prompts(self, tiny: TinyModel, start: Start, chunks: tuple[int, ...]) -> None:
        """The result comes with the prompt's last token, in any chunking, and nothing is sampled from it."""
        if not self.pools:
            pytest.skip("the worker declares not to pool")
        info = msgspec.structs.replace(tiny.info, loader=LOADER, tasks=("generate", "embed"))
        driver, prompt = start(self.world(tiny, model=info)), list(PROMPTS["few"])
        driver.add("pooled", prompt, task="embed", pooling=PoolingParams(pooling="mean", normalize=True))
        driver.add("plain", PROMPTS["block"])
        *before, last = [driver.step({"pooled": count, "plain": 1}) for count in chunks]
        assert not any(output.pooled for output in before), "a result before the prompt is computed"
        assert list(last.pooled) == [0], f"the prompt is computed, but results came for the rows {list(last.pooled)}"
        with torch.inference_mode():
            hidden = tiny.oracle.base_model(torch.tensor([prompt])).last_hidden_state[0]
        wanted = torch.nn.functional.normalize(hidden.float().mean(0), dim=0)
        assert last.pooled[0].dtype == np.float32
        np.testing.assert_allclose(last.pooled[0], wanted, atol=TOLERANCE)
        driver.finish("pooled")
        check_greedy(tiny, PROMPTS["block"], driver.generate(3)["plain"], "next to a pooled prompt")

    def test_tokens_sampled_elsewhere_are_learned(self, tiny: TinyModel, start: Start) -> None:
        """What another pipeline stage sampled comes with the next step and is computed like any other token."""
        if not self.learns_tokens:
            pytest.skip("the worker declares not to learn tokens from elsewhere")
        processor, prompt = ForcedToken(), list(PROMPTS["few"])
        driver = start() if self.logits_processors_option is None else self._processors(tiny, start, watch=processor)
        driver.add("told", prompt)
        step = msgspec.structs.replace(driver.make_step(), samples=np.asarray([False]))
        driver.absorb(step, driver.run(step))
        driver.rows["told"].tokens.append(FORCED)
        known = TokenUpdate(np.asarray([1], dtype=np.int32), np.asarray([FORCED], dtype=np.int32))
        driver.step({"told": 1}, known_tokens=known)
        check_greedy(tiny, [*prompt, FORCED], driver.outputs["told"], "after a token from elsewhere")
        if self.logits_processors_option is not None:
            assert processor.heard(0, [FORCED, *driver.outputs["told"]]), "observe() must hear of them as well"


def _giving(made: LogitsProcessor) -> Callable[[Any], LogitsProcessor]:
    return lambda ctx: made


def _forced() -> SamplingParams:
    return SamplingParams(temperature=0.0, extensions={"kit_force": FORCED})

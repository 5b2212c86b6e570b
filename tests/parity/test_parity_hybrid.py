"""Hybrids of recurrent layers and attention as they are installed, through the whole engine: a request's tokens are
those of the oracle however it is scheduled, and whatever its blocks held before."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint_testing_torch import make_tiny_model, write_tiny_tokenizer
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_testing_torch.worker_world import check_greedy

pytestmark = pytest.mark.slow

# The oracle pads sequences to whole chunks.
MIXER: Mapping[str, Any] = {"mamba_n_heads": 6, "mamba_d_state": 8, "mamba_chunk_size": 16, "num_hidden_layers": 3}
FAMILIES: Mapping[str, Mapping[str, Any]] = {
    "BambaForCausalLM": {**MIXER, "attn_layer_indices": [1], "mamba_n_groups": 2},
    "GraniteMoeHybridForCausalLM": {
        **MIXER,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "num_local_experts": 4,
        "shared_intermediate_size": 32,
        "embedding_multiplier": 3.0,
        "residual_multiplier": 0.5,
    },
}
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "block_size": 8,
    "max_model_len": 160,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 128,
    "num_kv_blocks": 60,
}
SHARED = [(7 * place + 3) % 150 for place in range(60)]
PROMPTS = ([5, 9, 2], SHARED, [*SHARED[:50], 11, 12], [140, 1] * 20, [17], [*SHARED, 4, 4, 4], [33] * 9)
NUM_TOKENS = 20


@dataclass(frozen=True, slots=True)
class Case:
    """``num_rounds``: all requests so many times, one after another; ``preempts``: everybody, now and then."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    states: str = "none"
    num_rounds: int = 1
    preempts: bool = False


CASES: Mapping[str, Case] = {
    "plain": Case(),
    "chunks": Case({"max_num_batched_tokens": 7, "max_num_seqs": 3}),
    "few blocks": Case({"num_kv_blocks": 13}, num_rounds=2),
    "thrown out": Case({"max_num_batched_tokens": 24}, preempts=True),
    "asynchronous": Case({"async_scheduling": True, "max_num_batched_tokens": 24}, num_rounds=2),
    "block outermost": Case({"kv_layout": "block_outermost", "max_num_batched_tokens": 24}),
    "aligned": Case({"max_num_batched_tokens": 48}, "align", num_rounds=2),
    "aligned, thrown out": Case({"max_num_batched_tokens": 48, "num_kv_blocks": 40}, "align", preempts=True),
    "aligned, asynchronous": Case({"async_scheduling": True, "max_num_batched_tokens": 24}, "align", num_rounds=2),
    "all": Case({"num_kv_blocks": 200}, "all", num_rounds=2),
}


BAMBA, GRANITE = FAMILIES
RUNS = [(BAMBA, name) for name in CASES] + [(GRANITE, name) for name in ("thrown out", "aligned")]


@pytest.fixture(scope="module")
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    folder = tmp_path_factory.mktemp("hybrid")
    made = make_tiny_model(request.param, folder, **FAMILIES[request.param])
    write_tiny_tokenizer(folder, made.info.vocab_size)
    return made


@contextmanager
def engine(tiny: TinyModel, case: Case) -> Iterator[LLM]:
    """Its cache begins full of values that are no numbers."""
    document = {
        "engines": {"tiny": EngineConfig.sections(str(tiny.folder), **{**SETTINGS, **case.settings})},
        "plugins": {"worker": {"torch": {"recurrent_states": case.states}}},
    }
    with LLM.from_config(AppConfig.model_validate(document)) as llm:
        executor: Any = llm.core.executor
        for buffer in executor._worker.runner.kv.buffers:
            buffer.view(torch.float32).fill_(torch.nan)
        yield llm


def generate(llm: LLM, case: Case) -> Iterator[tuple[Sequence[int], Sequence[int], int]]:
    """Prompt, answer and number of cached tokens of each request."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    prompts = [Prompt(token_ids=prompt) for prompt in PROMPTS]
    for _ in range(case.num_rounds):
        outputs: dict[int, Any] = {}
        for count, (index, output) in enumerate(llm.stream(prompts, params)):
            outputs[index] = output
            if case.preempts and count % 17 == 16:
                llm.core.scheduler.reset_prefix_cache(reset_running=True)
        for prompt, index in zip(PROMPTS, sorted(outputs), strict=True):
            assert outputs[index].error is None
            yield prompt, outputs[index].outputs[0].token_ids, outputs[index].num_cached_tokens


@pytest.mark.parametrize(("tiny", "name"), RUNS, indirect=["tiny"])
def test_tokens_do_not_depend_on_the_schedule(name: str, tiny: TinyModel) -> None:
    """R4.31, R4.36, R4.38, P4.4, P4.9: chunks, few blocks, preemption, steps ahead, reused states, other layouts."""
    case = CASES[name]
    with engine(tiny, case) as llm:
        found = list(generate(llm, case))
        stats = llm.core.scheduler.stats()
    assert len(found) == len(PROMPTS) * case.num_rounds
    for prompt, tokens, _ in found:
        assert len(tokens) == NUM_TOKENS
        check_greedy(tiny, prompt, tokens, f"{name}: greedy tokens")
    assert stats.num_preemptions > 0 or not (case.preempts or name == "few blocks")
    cached = [cached for *_, cached in found]
    if case.states == "none":
        assert not any(cached), "a state is kept for the last token alone: no prefix can be found"
    elif case.num_rounds > 1:
        assert cached[len(PROMPTS) + PROMPTS.index(SHARED)] > 0, "nobody found the states of the first round"

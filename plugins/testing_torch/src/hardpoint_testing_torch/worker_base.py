"""What the tests of the kind ``worker`` share: the tiny model, switches, and how a worker is made and started."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.step import NewRow
from hardpoint.interfaces.worker import Worker, WorkerContext
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.installed import installed_factory
from hardpoint_testing_torch.tiny_models import TinyModel, make_tiny_model
from hardpoint_testing_torch.worker_driver import WorkerDriver
from hardpoint_testing_torch.worker_world import KitPlatform, WorkerWorld, installed_plugins, start_driver

__all__ = ["PROMPTS", "ForcedToken", "OnlyTheBest", "Start", "WorkerSuiteBase"]

Start = Callable[..., WorkerDriver]
PROMPTS: Mapping[str, Sequence[int]] = {
    "one": [7],
    "block": [3, 1, 4, 1],
    "few": [2, 7, 1, 8, 2, 8, 1],
    "long": [(11 * i * i + 5 * i + 3) % 150 for i in range(37)],
}
"""Lengths inside, at and over the ends of blocks of four tokens; all below the poisoned token."""


class ForcedToken(LogitsProcessor):
    """A request that names a token under ``kit_force`` gets nothing else; counts what it is told."""

    def __init__(self) -> None:
        self.tokens: dict[int, int] = {}
        self.entered: list[str] = []
        self.removed: list[int] = []
        self.answers: dict[int, list[int]] = {}

    def add(self, row: NewRow) -> bool:
        self.entered.append(row.request_id)
        self.answers[row.slot] = row.token_ids[row.num_prompt_tokens :].tolist()
        self.tokens.pop(row.slot, None)
        if "kit_force" in row.sampling.extensions:
            self.tokens[row.slot] = int(row.sampling.extensions["kit_force"])
        return row.slot in self.tokens

    def remove(self, slot: int) -> None:
        self.removed.append(slot)
        self.tokens.pop(slot, None)

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self.answers[slot].append(token)

    def heard(self, slot: int, tokens: list[int]) -> bool:
        """Whether it was told of ``tokens``; the last one may be on its way until the next :meth:`apply`."""
        return self.answers[slot] in (tokens, tokens[:-1])

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        for index, slot in enumerate(slots.tolist()):
            if slot in self.tokens:
                kept = logits[index, self.tokens[slot]].clone()
                logits[index] = -torch.inf
                logits[index, self.tokens[slot]] = kept
        return logits


class OnlyTheBest(LogitsProcessor):
    """Makes random requests greedy; keeps the argmax, and returns a new tensor."""

    argmax_invariant = True

    def add(self, row: NewRow) -> bool:
        del row
        return True

    def remove(self, slot: int) -> None:
        del slot

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        del slots
        return logits.masked_fill(logits < logits.amax(dim=1, keepdim=True), -torch.inf)


class WorkerSuiteBase(PluginSuite):
    """``checkpoint_config`` are fields of the tiny model's configuration; its class comes from Hugging Face."""

    kind: ClassVar[str] = "worker"
    architecture: ClassVar[str] = "LlamaForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {}
    logits_processors_option: ClassVar[str | None] = "logits_processors"
    uses_attention_backends: ClassVar[bool] = True
    uses_quantization: ClassVar[bool] = True
    computes_logprobs: ClassVar[bool] = True
    computes_prompt_logprobs: ClassVar[bool] = True
    applies_grammar: ClassVar[bool] = True
    takes_prompt_embeddings: ClassVar[bool] = True
    learns_tokens: ClassVar[bool] = True
    pools: ClassVar[bool] = True

    def create_worker(self, ctx: WorkerContext, options: Mapping[str, Any]) -> Worker:
        """The worker under test, as its factory makes it, with ``options`` added to those of the class."""
        record = self.runtime().load_factory(self.kind, self._name())
        known = record.declaration.options.model_fields
        unknown = ", ".join(options.keys() - known.keys())
        if unknown:
            pytest.fail(
                f"the worker has no option {unknown!r}, only {', '.join(known) or 'none'}; "
                "set logits_processors_option to the one that names its processors, or to None if it runs none"
            )
        made: Worker = record.factory(ctx, record.declaration.options(**{**self.options, **options}))
        return made

    def create_platform(self) -> Platform:
        """The platform that the worker is handed; by default the CPU, whose settings stay as they are."""
        return KitPlatform()

    @classmethod
    def create_checkpoint(cls, folder: Path) -> TinyModel:
        """The tiny model to serve, with its oracle."""
        return make_tiny_model(cls.architecture, folder, **cls.checkpoint_config)

    @pytest.fixture(scope="class")
    @classmethod
    def tiny(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TinyModel]:
        try:
            installed_factory("model", cls.architecture)
        except PluginNotFoundError as error:
            pytest.skip(f"a worker needs a model to run: {error}")
        made = cls.create_checkpoint(tmp_path_factory.mktemp("worker") / "model")
        # Workers may collect garbage when they end; going through all imported libraries each time takes far longer
        # than the tests.
        gc.collect()
        gc.freeze()
        yield made
        gc.unfreeze()

    def world(self, tiny: TinyModel, **config: Any) -> WorkerWorld:
        """A new world around ``tiny``; ``config`` replaces fields of the worker's configuration."""
        return WorkerWorld.create(tiny, installed_plugins(), self.create_platform(), **config)

    def worker_in(self, world: WorkerWorld, **options: Any) -> Worker:
        """A new worker in ``world``, not yet started."""
        return self.create_worker(world.context(self.plugin or "under-test"), options)

    @pytest.fixture
    def start(self, tiny: TinyModel) -> Iterator[Start]:
        """``start(world=None, warm_up=False, **options)``: a started worker; all are shut down afterwards."""
        started: list[Worker] = []

        def begin(world: WorkerWorld | None = None, *, warm_up: bool = False, **options: Any) -> WorkerDriver:
            world = world or self.world(tiny)
            worker = self.worker_in(world, **options)
            started.append(worker)
            return start_driver(worker, world.config, warm_up=warm_up)

        yield begin
        for worker in started:
            worker.shutdown()

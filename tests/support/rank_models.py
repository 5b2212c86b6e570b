"""Tensor-parallel ranks of one model in one process: in threads, or one after another.

The latter is for what cannot be in two threads. A rank that comes to a collective whose result is not known yet leaves
its part and stops. When all have done so the result is known, and they begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from hardpoint.interfaces import Communicator
from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.model_source import WeightLoader
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint.interfaces.quantization import QuantizationMethod
from hardpoint.interfaces.worker import ParallelSlice, WorkerConfig
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_testing_torch import LocalDriver, StateDictLoader, worker_config
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_torch_runtime import LayerToolkit, load_weights

__all__ = ["RankAnswers", "ask_ranks", "rank_model"]

Factory = Callable[[ModelContext, NoOptions], Model]
MethodOf = Callable[[WorkerConfig], QuantizationMethod]
Answer = Mapping[str, torch.Tensor]
Prompts = Mapping[str, Sequence[int]]


def rank_model(
    factory: Factory,
    tiny: TinyModel,
    rank: int,
    size: int,
    communicator: Communicator,
    *,
    loader: WeightLoader | None = None,
    method: MethodOf | None = None,
) -> tuple[Model, LayerToolkit]:
    """One rank's share of ``tiny``, with its weights, and the toolkit it was built from.

    ``loader``: describes and reads the file of ``tiny``, in the place of what ``tiny`` knows itself; ``method`` makes
    what keeps the weights.
    """
    parallel = ParallelSlice(world_size=size, rank=rank, tensor_parallel_size=size)
    info = tiny.info if loader is None else loader.describe(tiny.info.artifact)
    config = msgspec.structs.replace(worker_config(info), parallel=parallel)
    toolkit = LayerToolkit.create(
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attention_backend=ReferenceBackend(),
        communicator=communicator,
        quantization=None if method is None else method(config),
    )
    roles, name = frozenset({ProcessRole.WORKER}), tiny.info.architecture
    model = factory(ModelContext(name=name, api_version=1, roles=roles, config=config, layers=toolkit), NoOptions())
    load_weights(model, loader or StateDictLoader(tiny.tensors()), info, show_progress=False, rank=rank)
    return model, toolkit


class _WaitsForOthers(Exception):
    """The result of a collective depends on ranks that have not contributed yet."""


@dataclass
class _Replay:
    results: list[torch.Tensor] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)
    turn: int = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._exchange(tensor, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return self._exchange(tensor, lambda parts: torch.cat(parts, dim))

    def _exchange(self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        self._combine = combine
        self.turn += 1
        if self.turn <= len(self.results):
            return self.results[self.turn - 1].clone()
        self.parts.append(tensor.clone())
        raise _WaitsForOthers

    def run(self, ranks: Sequence[Callable[[], Answer]]) -> list[Answer]:
        while True:
            answers, self.parts = [], []
            for rank in ranks:
                self.turn = 0
                try:
                    answers.append(rank())
                except _WaitsForOthers:
                    continue
            if not self.parts:
                return answers
            assert len(self.parts) == len(ranks), "ranks call different collectives"
            self.results.append(self._combine(self.parts))

    def close(self) -> None:
        """Nothing is held."""


@dataclass(frozen=True)
class RankAnswers:
    """``logits`` of each rank by prompt; ``num_exchanges``: how often the ranks exchanged something."""

    logits: Sequence[Answer]
    num_exchanges: int


def ask_ranks(
    factory: Factory,
    tiny: TinyModel,
    size: int,
    prompts: Prompts,
    *,
    chunks: Sequence[int] | None = None,
    loader: WeightLoader | None = None,
    method: MethodOf | None = None,
) -> RankAnswers:
    """Compute ``prompts`` on ``size`` ranks, in one step or in steps of so many tokens as ``chunks`` says."""
    replay = _Replay()

    def rank_of(rank: int) -> Callable[[], Answer]:
        model, toolkit = rank_model(factory, tiny, rank, size, replay, loader=loader, method=method)

        def answer() -> Answer:
            driver, begin = LocalDriver(model, toolkit), 0
            found: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
            for length in chunks or [max(map(len, prompts.values()))]:
                step = {name: list(prompt[begin : begin + length]) for name, prompt in prompts.items()}
                for name, part in driver.step({name: ids for name, ids in step.items() if ids}).items():
                    found[name].append(part)
                begin += length
            return {name: torch.cat(parts) for name, parts in found.items()}

        return answer

    return RankAnswers(replay.run([rank_of(rank) for rank in range(size)]), len(replay.results))

"""A model's tensor-parallel ranks one after another in one process, where a forward's context can be but one at a time.

A rank that comes to a collective whose result is not known yet leaves its part and stops. When all have done so the
result is known, and they begin again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec
import torch

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_testing_torch import LocalDriver, StateDictLoader, worker_config
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_torch_runtime import LayerToolkit, load_weights

__all__ = ["RankAnswers", "ask_ranks"]

Answer = Mapping[str, torch.Tensor]


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
    factory: Callable[[ModelContext, NoOptions], Model], tiny: TinyModel, size: int, prompts: Mapping[str, list[int]]
) -> RankAnswers:
    """Compute ``prompts`` in one step of ``size`` ranks."""
    replay = _Replay()

    def rank_of(rank: int) -> Callable[[], Answer]:
        parallel = ParallelSlice(world_size=size, rank=rank, tensor_parallel_size=size)
        config = msgspec.structs.replace(worker_config(tiny.info), parallel=parallel)
        toolkit = LayerToolkit.create(
            config,
            device=torch.device("cpu"),
            dtype=torch.float32,
            attention_backend=ReferenceBackend(),
            communicator=replay,
        )
        roles = frozenset({ProcessRole.WORKER})
        name = tiny.info.architecture
        model = factory(ModelContext(name=name, api_version=1, roles=roles, config=config, layers=toolkit), NoOptions())
        load_weights(model, StateDictLoader(tiny.tensors()), tiny.info, show_progress=False, rank=rank)
        return lambda: LocalDriver(model, toolkit).step(dict(prompts))

    return RankAnswers(replay.run([rank_of(rank) for rank in range(size)]), len(replay.results))

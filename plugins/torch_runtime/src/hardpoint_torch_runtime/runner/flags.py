"""What a runner is for, settled when it is made and never asked again (R4.21)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from hardpoint.interfaces.model import Model
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.forward_scope import StaticContext
from hardpoint_torch_runtime.runner.pooling import runner_type

__all__ = ["ExpertExchange", "RunnerFlags"]


class ExpertExchange(Protocol):
    """Moves tokens between the ranks that hold different experts."""

    @property
    def tolerates_faults(self) -> bool:
        """Whether it goes on without ranks that are gone, instead of waiting for them."""

    def check_ranks(self) -> None:
        """Raises ``RuntimeError`` naming ranks that are gone."""


@dataclass(frozen=True, slots=True)
class RunnerFlags:
    """Attributes:
    only_pools: the model cannot generate.
    takes_embeddings: prompts may be given as embeddings.
    checked_exchange: whose ranks are checked before each forward, where experts are divided among data-parallel ranks
        and can be without some; None otherwise.
    """

    only_pools: bool
    takes_embeddings: bool = True
    checked_exchange: ExpertExchange | None = None

    @classmethod
    def settle(
        cls,
        config: WorkerConfig,
        model: Model,
        *,
        takes_embeddings: bool = True,
        exchange: Callable[[], ExpertExchange] | None = None,
    ) -> RunnerFlags:
        """``exchange`` makes, or finds, what moves tokens between ranks; it is called only where there is any to ask:
        with data parallelism, and a model that has experts."""
        checked = None
        if exchange is not None and config.parallel.data_parallel_size > 1 and StaticContext.of(model).moe_layers:
            found = exchange()
            checked = found if found.tolerates_faults else None
        return cls(runner_type(model.info) == "pooling", takes_embeddings, checked)

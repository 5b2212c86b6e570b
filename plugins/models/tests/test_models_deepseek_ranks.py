"""DeepSeek V3 over two and four tensor-parallel ranks, one after another in one process, against the whole model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hardpoint.interfaces.model import ModelContext
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.deepseek import create_deepseek_v3
from hardpoint_testing_torch import StateDictLoader, make_tiny_model, relative_error, worker_config
from hardpoint_testing_torch.local_driver import LocalDriver
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_torch_runtime import LayerToolkit, load_weights

TINY: dict[str, Any] = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 10,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "attention_bias": True,
}
CHUNKS = ([3, 1, 4, 1, 5, 9], [2, 6], [5])


class _WaitsForOthers(Exception):
    """A rank cannot go on before all have contributed to the collective it is at."""


@dataclass
class Replay:
    """A communicator for ranks that run one after another.

    A rank that comes to a collective whose result is not known leaves its part and stops; when all have, the result is
    known, and they run again from the start.
    """

    results: list[torch.Tensor] = field(default_factory=list)
    parts: list[torch.Tensor] = field(default_factory=list)
    turn: int = 0

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return self._collective(tensor, lambda parts: torch.stack(parts).sum(0))

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return self._collective(tensor, lambda parts: torch.cat(parts, dim))

    def _collective(self, tensor: torch.Tensor, combine: Callable[[list[torch.Tensor]], torch.Tensor]) -> torch.Tensor:
        self.combine = combine
        self.turn += 1
        if self.turn <= len(self.results):
            return self.results[self.turn - 1].clone()
        self.parts.append(tensor.clone())
        raise _WaitsForOthers

    def run(self, ranks: list[Callable[[], torch.Tensor]]) -> list[torch.Tensor]:
        """What every rank returns, once all get through."""
        while True:
            outputs, self.parts = [], []
            for rank in ranks:
                self.turn = 0
                try:
                    outputs.append(rank())
                except _WaitsForOthers:
                    continue
            if not self.parts:
                return outputs
            assert len(self.parts) == len(ranks), "ranks call different collectives"
            self.results.append(self.combine(self.parts))

    def close(self) -> None:
        """Nothing is held."""


def rank_of(tiny: TinyModel, rank: int, size: int, communicator: Replay) -> Callable[[], torch.Tensor]:
    parallel = ParallelSlice(world_size=size, rank=rank, tensor_parallel_size=size)
    config = msgspec.structs.replace(worker_config(tiny.info), parallel=parallel)
    toolkit = LayerToolkit.create(
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attention_backend=ReferenceBackend(),
        communicator=communicator,
    )
    roles = frozenset({ProcessRole.WORKER})
    model = create_deepseek_v3(
        ModelContext(name="DeepseekV3ForCausalLM", api_version=1, roles=roles, config=config, layers=toolkit),
        NoOptions(),
    )
    load_weights(model, StateDictLoader(tiny.tensors()), tiny.info, show_progress=False)

    def answer() -> torch.Tensor:
        driver = LocalDriver(model, toolkit, num_blocks=8)
        return torch.cat([driver.step({"a": chunk})["a"] for chunk in CHUNKS])

    return answer


@pytest.mark.parametrize(
    ("size", "config"),
    [
        pytest.param(2, {}, id="two"),
        pytest.param(4, {"q_lora_rank": None}, id="four-plain-queries", marks=pytest.mark.slow),
    ],
)
def test_ranks_together_are_the_whole(size: int, config: dict[str, Any], tmp_path: Path) -> None:
    """Heads, experts and vocabulary are split, latents are not; every rank ends up with all logits."""
    tiny = make_tiny_model("DeepseekV3ForCausalLM", tmp_path, **{**TINY, "q_lora_rank": 14, **config})
    replay = Replay()
    outputs = replay.run([rank_of(tiny, rank, size, replay) for rank in range(size)])
    expected = tiny.logits([token for chunk in CHUNKS for token in chunk])
    for logits in outputs:
        assert relative_error(logits, expected) < 1e-4
    per_forward = 1 + 2 * TINY["num_hidden_layers"] + 1
    assert len(replay.results) == per_forward * len(CHUNKS), "embedding, two sums per layer, and the logits"

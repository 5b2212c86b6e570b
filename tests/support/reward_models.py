"""Tiny reward models that ``transformers`` has no class for: its decoder, and two layers on top."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_testing_torch import TinyModel, make_tiny_model
from hardpoint_testing_torch.tiny_models import model_info

__all__ = ["RewardOracle", "make_reward_model"]


@dataclass(frozen=True, slots=True)
class RewardOracle:
    """``base`` is the decoder alone; ``stored`` holds all tensors, of the head ``score.0.weight`` and the like."""

    base: TinyModel
    stored: dict[str, torch.Tensor]
    info: ModelInfo

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.stored

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """Hidden states float32 [tokens, hidden size]."""
        return self.base.logits(token_ids)

    def scores(self, token_ids: list[int]) -> torch.Tensor:
        """float32 [tokens, labels]."""
        head = self.stored
        inner = torch.relu(self.logits(token_ids) @ head["score.0.weight"].T + head["score.0.bias"])
        return inner @ head["score.2.weight"].T + head["score.2.bias"]


def make_reward_model(architecture: str, folder: Path, labels: int, **config: Any) -> RewardOracle:
    """Saved to ``folder`` as such models are."""
    base = make_tiny_model("Qwen2Model", folder, **config)
    size = base.info.config["hidden_size"]
    draw = torch.Generator().manual_seed(7)
    shapes = {
        "score.0.weight": (size, size),
        "score.0.bias": (size,),
        "score.2.weight": (labels, size),
        "score.2.bias": (labels,),
    }
    head = {name: torch.randn(shape, generator=draw) / size**0.5 for name, shape in shapes.items()}
    stored = {f"model.{name}": tensor.clone() for name, tensor in base.tensors().items()} | head
    save_file(stored, folder / "model.safetensors")
    stated = {**base.info.config, "architectures": [architecture]}
    (folder / "config.json").write_text(json.dumps(stated), encoding="utf-8")
    return RewardOracle(base, stored, model_info(folder, architecture, ("embed", "classify")))

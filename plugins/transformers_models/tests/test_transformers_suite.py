"""The model plugin ``transformers``, as it is installed, passes the conformance suite of its kind."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite
from hardpoint_testing_torch.tiny_models import ModelCheckpoint, make_tiny_model

pytestmark = pytest.mark.slow


class TestTransformers(ModelSuite):
    """Of an architecture that has no plugin of its own."""

    plugin: ClassVar[str | None] = "transformers"
    runs_others: ClassVar[bool] = True
    splits_into_stages: ClassVar[bool] = False

    def create_checkpoint(self, folder: Path) -> ModelCheckpoint:
        return make_tiny_model("ArceeForCausalLM", folder)

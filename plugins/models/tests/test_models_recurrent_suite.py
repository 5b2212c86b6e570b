"""Models with recurrent layers of other kinds, as they are installed, pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

import model_cases_recurrent as cases
from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow


class TestJamba(ModelSuite):
    plugin: ClassVar[str | None] = "JambaForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = cases.JAMBA


class TestMamba(ModelSuite):
    plugin: ClassVar[str | None] = "MambaForCausalLM"
    # It attends to nothing: what stands there in a tiny configuration is not looked at.
    size_names: ClassVar[Mapping[str, str]] = {"num_attention_heads": "heads of attention"}
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"intermediate_size": 96, "state_size": 8}


class TestMamba2(ModelSuite):
    plugin: ClassVar[str | None] = "Mamba2ForCausalLM"
    # It attends to nothing: what stands there in a tiny configuration is not looked at.
    size_names: ClassVar[Mapping[str, str]] = {"num_attention_heads": "heads of attention"}
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_heads": 6,
        "head_dim": 16,
        "n_groups": 2,
        "state_size": 8,
        "chunk_size": 16,
    }


class TestQwen3Next(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen3NextForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = cases.QWEN3_NEXT

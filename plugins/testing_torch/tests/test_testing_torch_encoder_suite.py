"""The installed BERT passes the suite of models, and each faulty relative of it fails the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.interfaces.attention import AttentionKind
from hardpoint.interfaces.model import Model, ModelContext, StageOutput
from hardpoint.interfaces.plugin import NoOptions
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import ModelCheckpoint, ModelSuite, TinyModel, installed_factory, make_tiny_model
from hardpoint_torch_runtime import LayerToolkit

pytestmark = pytest.mark.slow

ARCHITECTURE = "BertModel"
FOLDER = TemporaryDirectory(ignore_cleanup_errors=True)


@cache
def checkpoint() -> TinyModel:
    return make_tiny_model(ARCHITECTURE, Path(FOLDER.name) / "model")


def sound(ctx: ModelContext) -> Any:
    return installed_factory("model", ARCHITECTURE)(ctx, NoOptions())


class BertSuite(ModelSuite):
    max_bfloat16_error: ClassVar[float] = 0.5

    def create_checkpoint(self, folder: Path) -> ModelCheckpoint:
        return checkpoint()


def suite_of(create: Callable[[ModelContext], Any]) -> type[ModelSuite]:
    class Mutated(BertSuite):
        def create_model(self, ctx: ModelContext) -> Model:
            model: Model = create(ctx)
            return model

    return Mutated


class OneSided(LayerToolkit):
    """Its layers are a decoder's, whatever was asked for."""

    def attention(self, name: str, **fields: Any) -> Any:
        return super().attention(name, **{**fields, "kind": AttentionKind.DECODER})


def sees_the_past_only(ctx: ModelContext) -> Any:
    layers = OneSided(**{field: getattr(ctx.layers, field) for field in LayerToolkit.__dataclass_fields__})
    return sound(replace(ctx, layers=layers))


def changed(**methods: Callable[..., Any]) -> Callable[[ModelContext], Any]:
    """The sound model with methods replaced; each gets the sound one first, then the model."""

    def create(ctx: ModelContext) -> Any:
        model = sound(ctx)
        for name, method in methods.items():
            original = getattr(model, name)
            # A closure per method, or all would call the last one.
            setattr(
                model,
                name,
                lambda *given, _method=method, _original=original, **named: _method(_original, *given, **named),
            )
        return model

    return create


def starts_at_one(forward: Any, token_ids: Any, positions: torch.Tensor, *rest: Any, **named: Any) -> Any:
    return forward(token_ids, positions + 1, *rest, **named)


def mixes_the_batch(forward: Any, *given: Any, **named: Any) -> Any:
    output = forward(*given, **named)
    return output if isinstance(output, StageOutput) else output + 0.01 * output.mean(dim=0, keepdim=True)


def overwrites_embeddings(
    forward: Any, token_ids: Any, positions: Any, intermediates: Any = None, embeddings: Any = None
) -> Any:
    output = forward(token_ids, positions, intermediates, embeddings)
    if embeddings is not None:
        embeddings.zero_()
    return output


def overwrites_intermediates(
    forward: Any, token_ids: Any, positions: Any, intermediates: Any = None, embeddings: Any = None
) -> Any:
    output = forward(token_ids, positions, intermediates, embeddings)
    if intermediates is not None:
        intermediates["hidden"].zero_()
    return output


def answers_with_its_states(logits: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden


def forgets_the_pooler(weight_rules: Any) -> Any:
    return [rule for rule in weight_rules() if "pooler" not in rule.pattern]


FAULTS: dict[str, tuple[Callable[[ModelContext], Any], str]] = {
    "sees the past only": (sees_the_past_only, "test_logits_equal_the_oracles"),
    "starts at one": (changed(forward=starts_at_one), "test_logits_equal_the_oracles"),
    "mixes the batch": (changed(forward=mixes_the_batch), "test_logits_equal_the_oracles"),
    "answers with its states": (changed(logits=answers_with_its_states), "test_logits_of_any_rows"),
    "overwrites embeddings": (changed(forward=overwrites_embeddings), "test_embeddings_may_replace_ids"),
    "overwrites intermediates": (changed(forward=overwrites_intermediates), "test_stages_together_are_the_whole"),
    "forgets the pooler": (changed(weight_rules=forgets_the_pooler), "test_every_weight_is_loaded"),
}


def test_the_sound_one_passes_what_applies_to_it() -> None:
    """Chunks, greedy tokens and blocks do not."""
    outcome = run_suite(suite_of(sound))
    assert outcome.failed == {}
    assert {"test_logits_equal_the_oracles", "test_bfloat16", "test_logits_of_any_rows"} <= set(outcome.passed)
    assert {"test_greedy_tokens_equal_the_oracles", "test_block_sizes"} <= set(outcome.skipped)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_encoder_fails(fault: str) -> None:
    create, rule = FAULTS[fault]
    assert rule in run_suite(suite_of(create), only=rule, first_failure=True).failed

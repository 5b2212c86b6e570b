"""The installed Llama passes the suite of its kind, and each faulty relative of it fails the rule that it breaks."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model import Model, ModelContext, StageRange, WeightRule
from hardpoint.interfaces.plugin import NoOptions
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import ModelCheckpoint, ModelSuite, TinyModel, installed_factory, make_tiny_model

ARCHITECTURE = "LlamaForCausalLM"


FOLDER = TemporaryDirectory(ignore_cleanup_errors=True)


@cache
def checkpoint() -> TinyModel:
    return make_tiny_model(ARCHITECTURE, Path(FOLDER.name) / "model")


class LlamaSuite(ModelSuite):
    def create_checkpoint(self, folder: Path) -> ModelCheckpoint:
        return checkpoint()

    def create_model(self, ctx: ModelContext) -> Model:
        model: Model = installed_factory("model", ARCHITECTURE)(ctx, NoOptions())
        return model


class TestLlama(LlamaSuite):
    pass


class Changed(torch.nn.Module):
    """The sound model behind a surface that a mutant changes."""

    def __init__(self, ctx: ModelContext) -> None:
        super().__init__()
        assert ctx.config is not None
        inner = installed_factory("model", ARCHITECTURE)(self.context(ctx), NoOptions())
        self.ctx = ctx
        self.inner: tuple[Any] = (inner,)
        # Registered part by part, so that parameters keep their names.
        for name, child in inner.named_children():
            self.add_module(name, child)

    def context(self, ctx: ModelContext) -> ModelContext:
        return ctx

    @property
    def sound(self) -> Any:
        return self.inner[0]

    @property
    def info(self) -> Any:
        return self.sound.info

    def holds(self, parameter: str) -> bool:
        return bool(self.sound.holds(parameter))

    def weight_rules(self) -> Sequence[WeightRule]:
        return list(self.sound.weight_rules())

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self.sound.embed(token_ids)

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> Any:
        return self.sound(token_ids, positions, intermediates, embeddings)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.sound.logits(hidden)

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self.sound.kv_cache_specs()

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        return self.sound.named_layers()


class WithoutAFinalNorm(Changed):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx)
        if self.sound.model.norm is not None:
            self.sound.model.norm.forward = lambda hidden: hidden
            self.sound.model.norm.add = lambda hidden, residual: (hidden + residual, residual)


class StartsAgainWithEachChunk(Changed):
    def forward(self, token_ids: Any, positions: torch.Tensor, *rest: Any, **named: Any) -> Any:
        return super().forward(token_ids, positions - positions[:1], *rest, **named)


class MixesTheBatch(Changed):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden + 0.01 * hidden.mean(dim=0, keepdim=True))


class PadsItsVocabulary(Changed):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.pad(super().logits(hidden), (0, 3))


class ScalesInPlace(Changed):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden.mul_(1.0001))


class ForgetsARule(Changed):
    def weight_rules(self) -> Sequence[WeightRule]:
        return [rule for rule in super().weight_rules() if "o_proj" not in rule.pattern]


class IgnoresTheUnknown(Changed):
    def weight_rules(self) -> Sequence[WeightRule]:
        return [*super().weight_rules(), *(WeightRule(".".join("*" * count), None) for count in range(1, 8))]


class TakesAnyAbsence(Changed):
    def weight_rules(self) -> Sequence[WeightRule]:
        return [
            WeightRule(rule.pattern, rule.target, rule.shard, optional="o_proj" in rule.pattern)
            for rule in super().weight_rules()
        ]


class LoadsTheGateOverUp(Changed):
    """What was loaded last wins, and the gate stays empty."""

    def weight_rules(self) -> Sequence[WeightRule]:
        return [
            WeightRule(rule.pattern, rule.target, "up" if rule.shard == "gate" else rule.shard)
            for rule in super().weight_rules()
        ]


class ForgetsALayersCache(Changed):
    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return dict(list(super().kv_cache_specs().items())[:-1])


class NamesLayersByNumber(Changed):
    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        return [(name.rpartition(".")[2], layer) for name, layer in super().named_layers()]


class NamesNoLayers(Changed):
    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        return []


class BringsItsOwnLinear(Changed):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx)
        self.extra = torch.nn.Linear(4, 4, bias=False)


class NamesLinearsAtRandom(Changed):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx)
        ctx.layers.linear_method("model.layer.0.q", ctx.layers.column_linear("model.layer.0.q", 4, 4).shape)


class OverwritesEmbeddings(Changed):
    def forward(self, token_ids: Any, positions: torch.Tensor, *rest: Any, **named: Any) -> Any:
        output = super().forward(token_ids, positions, *rest, **named)
        for given in (*rest, *named.values()):
            if isinstance(given, torch.Tensor):
                given.zero_()
        return output


class OverwritesIntermediates(Changed):
    def forward(self, token_ids: Any, positions: torch.Tensor, *rest: Any, **named: Any) -> Any:
        output = super().forward(token_ids, positions, *rest, **named)
        for given in (*rest, *named.values()):
            if isinstance(given, Mapping):
                given["hidden"].zero_()
        return output


class StartsEachStageAtTheFirstLayer(Changed):
    def context(self, ctx: ModelContext) -> ModelContext:
        stage = ctx.stage
        if stage is None:
            return ctx
        moved = StageRange(0, stage.last - stage.first, stage.has_embedding, stage.has_head)
        return ModelContext(
            ctx.name, ctx.api_version, ctx.roles, rank=ctx.rank, config=ctx.config, stage=moved, layers=ctx.layers
        )


class AnswersForAMissingHead(Changed):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.sound.lm_head is None else super().logits(hidden)


def with_config(ctx: ModelContext, **changes: Any) -> ModelContext:
    assert ctx.config is not None
    info = ctx.config.model
    changed = msgspec.structs.replace(info, config={**info.config, **changes})
    config = msgspec.structs.replace(ctx.config, model=changed)
    return ModelContext(
        ctx.name, ctx.api_version, ctx.roles, rank=ctx.rank, config=config, stage=ctx.stage, layers=ctx.layers
    )


class PassesOverTheActivation(Changed):
    def context(self, ctx: ModelContext) -> ModelContext:
        return with_config(ctx, hidden_act="silu")

    @property
    def info(self) -> Any:
        assert self.ctx.config is not None
        return self.ctx.config.model


class GuessesSizes(PassesOverTheActivation):
    def context(self, ctx: ModelContext) -> ModelContext:
        assert ctx.config is not None
        return with_config(ctx, hidden_size=ctx.config.model.config.get("hidden_size", 48))


class TellsOtherThings(Changed):
    @property
    def info(self) -> Any:
        return msgspec.structs.replace(self.sound.info, vocab_size=7)


class DrawsLots(Changed):
    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().logits(hidden) * (1 + 1e-6 * torch.rand(()))


class StaysInFloat32(Changed):
    def __init__(self, ctx: ModelContext) -> None:
        super().__init__(ctx)
        self.float()


class NeedsACache(Changed):
    def forward(self, token_ids: Any, positions: torch.Tensor, *rest: Any, **named: Any) -> Any:
        output = super().forward(token_ids, positions, *rest, **named)
        if len(positions) == 64 and not int(token_ids.sum()):
            raise KeyError("model.layers.0.self_attn.attn")
        return output


FAULTS: dict[type[Changed], str] = {
    WithoutAFinalNorm: "test_logits_equal_the_oracles",
    StartsAgainWithEachChunk: "test_logits_equal_the_oracles",
    MixesTheBatch: "test_logits_equal_the_oracles",
    PadsItsVocabulary: "test_logits_of_any_rows",
    ScalesInPlace: "test_logits_of_any_rows",
    ForgetsARule: "test_every_weight_is_loaded",
    IgnoresTheUnknown: "test_unknown_and_ill_shaped_tensors_are_named",
    TakesAnyAbsence: "test_missing_tensors_are_named",
    LoadsTheGateOverUp: "test_every_weight_is_loaded",
    ForgetsALayersCache: "test_layers_can_be_found",
    NamesLayersByNumber: "test_layers_can_be_found",
    NamesNoLayers: "test_layers_can_be_found",
    BringsItsOwnLinear: "test_every_linear_can_be_quantized",
    NamesLinearsAtRandom: "test_every_linear_can_be_quantized",
    OverwritesEmbeddings: "test_embeddings_may_replace_ids",
    OverwritesIntermediates: "test_stages_together_are_the_whole",
    StartsEachStageAtTheFirstLayer: "test_stages_together_are_the_whole",
    AnswersForAMissingHead: "test_a_stage_says_what_it_lacks",
    PassesOverTheActivation: "test_what_it_cannot_compute_is_refused",
    GuessesSizes: "test_a_configuration_without_a_size_is_refused",
    TellsOtherThings: "test_it_is_a_model",
    DrawsLots: "test_equal_steps_give_equal_bits",
    StaysInFloat32: "test_bfloat16",
    NeedsACache: "test_it_can_be_profiled",
}


def suite_of(create: Callable[[ModelContext], Any]) -> type[ModelSuite]:
    class Mutated(LlamaSuite):
        max_bfloat16_error: ClassVar[float] = 0.5

        def create_model(self, ctx: ModelContext) -> Model:
            model: Model = create(ctx)
            return model

    return Mutated


@pytest.mark.slow
def test_the_surface_by_itself_changes_nothing() -> None:
    assert run_suite(suite_of(Changed)).failed == {}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_model_fails(mutant: type[Changed]) -> None:
    rule = FAULTS[mutant]
    assert rule in run_suite(suite_of(mutant), only=rule, first_failure=True).failed


def test_an_unknown_architecture_needs_its_authors_checkpoint(tmp_path: Path) -> None:
    class Unknown(ModelSuite):
        plugin: ClassVar[str | None] = "NobodyForCausalLM"

    with pytest.raises(TypeError, match="override create_checkpoint"):
        Unknown().create_checkpoint(tmp_path)

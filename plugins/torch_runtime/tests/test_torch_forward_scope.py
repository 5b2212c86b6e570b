"""What entering a forward adds to a step's facts, and mixtures of experts that take turns and skip padding."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_torch_runtime import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    has_forward_context,
    set_forward_context,
)
from hardpoint_torch_runtime.forward_context import DataParallelMetadata, GraphMode
from hardpoint_torch_runtime.forward_scope import ForwardScopes, StaticContext
from hardpoint_torch_runtime.layers import (
    LinearFactory,
    MixtureOfExperts,
    MixtureSizes,
    RoutingParameters,
    SiluAndMul,
    TensorParallel,
    UnquantizedLinearMethod,
)

CPU = torch.device("cpu")
ROUTING = RoutingParameters(5, 2)


def mixture(name: str, seed: int = 0, *, shared: int | None = None) -> MixtureOfExperts:
    factory = LinearFactory(
        lambda name, shape: UnquantizedLinearMethod(torch.float32, CPU), TensorParallel(), torch.float32, CPU
    )
    made = MixtureOfExperts(name, factory, MixtureSizes(8, 6, shared), ROUTING, SiluAndMul())
    generator = torch.Generator().manual_seed(seed)
    for parameter in made.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator))
    return made.requires_grad_(False)


class MixtureStack(torch.nn.Module):
    """As much of a model as a static context looks at; ``order`` is the order in which the layers run."""

    def __init__(self, names: Iterable[str], order: Iterable[int] | None = None) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(mixture(name, seed) for seed, name in enumerate(names))
        self.order = list(range(len(self.layers)) if order is None else order)

    def named_layers(self) -> list[tuple[str, torch.nn.Module]]:
        return [(f"layers.{index}", layer) for index, layer in enumerate(self.layers)]

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for index in self.order:
            hidden = hidden + self.layers[index](hidden)
        return hidden


def static(stack: MixtureStack) -> StaticContext:
    return StaticContext.of(stack)  # type: ignore[arg-type]


def facts(num_tokens: int = 3, **fields: Any) -> ForwardContext:
    return ForwardContext(attention_metadata=None, slot_mapping={}, kv_caches={}, num_tokens=num_tokens, **fields)


def test_layers_come_from_the_model_in_the_order_they_are_listed() -> None:
    """R4.60, R4.67: copied into each context, whose own entries come on top."""
    stack = MixtureStack(["a", "b"])
    known = static(stack)
    assert known.moe_layers == ("a", "b")
    with ForwardScopes(static=known).enter(facts(uncompiled_layers={"c": stack.layers[0]})) as active:
        assert dict(active.uncompiled_layers) == {"a": stack.layers[0], "b": stack.layers[1], "c": stack.layers[0]}
        stack(torch.ones(3, 8))
    assert list(known.layers) == ["a", "b"]


def test_attention_layers_are_among_them(world: Any) -> None:
    """R4.60."""
    model = world.start().loaded.model
    known = StaticContext.of(model)
    assert list(known.layers) == ["layers.0.attn", "layers.1.attn"]
    assert known.moe_layers == ()


def test_two_layers_of_one_name_are_refused() -> None:
    with pytest.raises(ValueError, match="two layers of the model are named 'a'"):
        static(MixtureStack(["a", "a"]))


def test_turns_start_anew_in_every_forward_also_after_an_aborted_one() -> None:
    """R4.67, P4.11, I4.5: a forward that fails midway shifts nobody's turn."""
    stack = MixtureStack(["a", "b", "c"])
    scopes = ForwardScopes(static=static(stack))
    hidden = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    expected = stack(hidden)
    for num_layers in (1, 2, 3):
        broken = torch.nn.Sequential(*stack.layers[:num_layers], torch.nn.Linear(7, 1))
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), scopes.enter(facts()):
            broken(hidden)
        assert not has_forward_context()
        with scopes.enter(facts()) as active:
            assert torch.equal(stack(hidden), expected)
            assert active.moe_turns is not None
            assert active.moe_turns.index == 3


@pytest.mark.parametrize(
    ("order", "message"),
    [([1, 0], "turn of layer 'a', but 'b' asks"), ([0], "only 1 of 2"), ([0, 1, 0], "all 2 listed ones")],
    ids=["reordered", "skipped", "repeated"],
)
def test_layers_that_run_in_another_order_stop_the_forward(order: list[int], message: str) -> None:
    """R4.67, P4.11, I4.5."""
    stack = MixtureStack(["a", "b"], order)
    with pytest.raises(RuntimeError, match=message), ForwardScopes(static=static(stack)).enter(facts()):
        stack(torch.ones(3, 8))
    assert not has_forward_context()


def test_a_replay_takes_no_turns() -> None:
    """R4.67: no layer's code runs."""
    with ForwardScopes(static=static(MixtureStack(["a"]))).enter(facts(), is_replay=True) as active:
        assert active.moe_turns is not None
    assert active.moe_turns.index == 0


def test_without_lists_of_layers_nobody_takes_turns() -> None:
    layer, hidden = mixture("lonely"), torch.ones(2, 8)
    for scope in (set_forward_context(facts()), ForwardScopes().enter(facts())):
        with scope as active:
            assert active.moe_turns is None
            inside = layer(hidden)
        assert torch.equal(inside, layer(hidden))


def test_a_descriptor_is_made_where_a_graph_mode_is_set_and_none_is_given() -> None:
    """R4.64."""
    scopes = ForwardScopes()
    assert scopes.complete(facts(5)).batch_descriptor is None
    captured = facts(5, graph_mode=GraphMode.PIECEWISE)
    assert scopes.complete(captured).batch_descriptor == BatchDescriptor(5)
    assert scopes.complete(captured, num_padded=8).batch_descriptor == BatchDescriptor(8)
    given = BatchDescriptor(8, 8, is_uniform=True)
    assert scopes.complete(dataclasses.replace(captured, batch_descriptor=given)).batch_descriptor is given


def test_ranks_are_counted_where_any_exchange_tokens() -> None:
    """R4.64: data parallelism asks all ranks, with padding; sequence parallelism shares out even one rank's tokens."""
    asked: list[int] = []

    def everybody(num_tokens: int) -> list[int]:
        asked.append(num_tokens)
        return [num_tokens, 2]

    assert ForwardScopes().complete(facts(5)).data_parallel is None
    scopes = ForwardScopes(rank_tokens=everybody, data_parallel_rank=1)
    assert scopes.complete(facts(5), num_padded=8).data_parallel == DataParallelMetadata(1, (8, 2))
    assert asked == [8]
    shared = ForwardScopes(sequence_parallel_size=2).complete(facts(5)).data_parallel
    assert shared is not None
    assert shared.local_tokens == (3, 2)


def test_the_platform_adds_entries_and_replaces_none() -> None:
    """R4.64."""

    def stream(context: ForwardContext) -> Mapping[str, Any]:
        return {"stream": f"for {context.num_tokens} tokens"}

    scopes = ForwardScopes(extras=stream)
    with scopes.enter(facts(4, extras={"mine": 1})):
        assert get_forward_context().extras == {"mine": 1, "stream": "for 4 tokens"}
    with pytest.raises(ValueError, match="exist already: stream"):
        scopes.complete(facts(extras={"stream": 2}))


@settings(max_examples=15, deadline=None)
@given(st.lists(st.booleans(), min_size=1, max_size=9), st.sampled_from([None, 4]))
def test_experts_that_skip_padding_change_no_real_row(is_padding: list[bool], shared: int | None) -> None:
    """R4.66: wherever padding stands, and whatever it holds; True marks padding."""
    layer = mixture("experts", shared=shared)
    mask = torch.tensor(is_padding)
    hidden = torch.randn(len(is_padding), 8, generator=torch.Generator().manual_seed(len(is_padding)))
    plain = layer(hidden)
    hidden[mask] = torch.nan
    with set_forward_context(facts(int((~mask).sum()), padding_mask=mask)):
        skipping = layer(hidden)
    torch.testing.assert_close(skipping[~mask], plain[~mask], rtol=1e-4, atol=3e-5)


def test_no_expert_computes_padding() -> None:
    """R4.66: work is saved, not only its result dropped."""
    layer = mixture("experts")
    seen: list[int] = []
    for expert in layer.experts:
        expert.register_forward_hook(lambda module, inputs, output: seen.append(len(inputs[0])))
    mask = torch.tensor([False, True, False, True, True])
    with set_forward_context(facts(2, padding_mask=mask)):
        layer(torch.ones(5, 8))
    assert sum(seen) == 2 * ROUTING.num_chosen
    with set_forward_context(facts(0, padding_mask=torch.ones(5, dtype=torch.bool))):
        assert not layer(torch.ones(5, 8)).any()


@pytest.mark.slow
def test_compiled_code_knows_no_layer_by_name() -> None:
    """R4.67: what is compiled for one mixture of experts serves all of them, each in its turn."""
    stack = MixtureStack(["a", "b", "c"])
    scopes = ForwardScopes(static=static(stack))
    hidden = torch.randn(4, 8, generator=torch.Generator().manual_seed(3))
    expected = stack(hidden)
    graphs: list[torch.fx.GraphModule] = []

    def keep(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Any:
        del inputs
        graphs.append(graph)
        return graph.forward

    @torch.compile(backend=keep, fullgraph=True)
    def block(layer: torch.nn.Module, given: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = given + layer(given)
        return result

    mask = torch.tensor([False, False, False, True])
    with scopes.enter(facts(3, padding_mask=mask)) as active:
        given = hidden
        for layer in stack.layers:
            given = block(layer, given)
        assert active.moe_turns is not None
        assert active.moe_turns.index == 3
    torch.testing.assert_close(given[:3], expected[:3], rtol=1e-4, atol=1e-4)
    assert len(graphs) == 1
    assert "next_mixture" in graphs[0].code
    with (
        pytest.raises(RuntimeError, match="lists none; enter forwards through ForwardScopes"),
        set_forward_context(facts(4)),
    ):
        block(stack.layers[0], hidden)
    torch.compiler.reset()

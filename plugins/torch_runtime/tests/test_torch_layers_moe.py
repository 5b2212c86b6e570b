"""Mixtures of experts against a plain float64 computation, over routing variants, shapes and tensor-parallel splits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime.layers import (
    ClampedSwiGLU,
    ExpertRouter,
    LinearFactory,
    MixtureOfExperts,
    MixtureSizes,
    RoutingParameters,
    ShardedModule,
    SiluAndMul,
    TensorParallel,
    UnquantizedLinearMethod,
)

CPU = torch.device("cpu")
SIZES = MixtureSizes(hidden_size=8, expert_size=6)
ROUTINGS = {
    "softmax": RoutingParameters(6, 2, renormalizes=False),
    "softmax-renormalized": RoutingParameters(6, 3),
    "softmax-all": RoutingParameters(4, 4, scale=2.0),
    "softmax-groups": RoutingParameters(
        8, 3, renormalizes=False, num_groups=4, num_kept_groups=2, group_score_size=1, scale=16.0
    ),
    "sigmoid": RoutingParameters(5, 1, scoring="sigmoid", renormalizes=False),
    "sigmoid-groups-bias": RoutingParameters(
        12, 4, scoring="sigmoid", num_groups=4, num_kept_groups=2, has_correction_bias=True, scale=2.5, in_float32=True
    ),
    "sigmoid-bias": RoutingParameters(7, 2, scoring="sigmoid", has_correction_bias=True),
    "softmax-gate-bias": RoutingParameters(6, 2, has_bias=True),
    "sigmoid-inputs": RoutingParameters(5, 2, scoring="sigmoid", renormalizes=False, weighs_inputs=True),
}


@dataclass
class Recorder:
    """A communicator that keeps what each rank contributed; the test adds it up."""

    reduced: list[torch.Tensor] = field(default_factory=list)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        self.reduced.append(tensor)
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        raise AssertionError(f"nothing to gather along {dim}: {tensor.shape}")

    def close(self) -> None: ...


def plain(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return UnquantizedLinearMethod(torch.float32, CPU)


def create(
    routing: RoutingParameters,
    sizes: MixtureSizes = SIZES,
    parallel: TensorParallel | None = None,
    choose: Callable[[str, LinearShape], LinearMethod] = plain,
) -> MixtureOfExperts:
    factory = LinearFactory(choose, parallel or TensorParallel(), torch.float32, CPU)
    return MixtureOfExperts("mlp", factory, sizes, routing, SiluAndMul())


def fill(layer: torch.nn.Module, seed: int = 0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in layer.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)


def array(parameter: Any) -> np.ndarray:
    values: np.ndarray = parameter.detach().double().numpy()
    return values


def chosen_by_hand(gate: ExpertRouter, token: np.ndarray) -> dict[int, float]:
    """Expert to weight for one token, by sorting."""
    how = gate.routing
    logits = array(gate.weight) @ token + (0.0 if gate.bias is None else array(gate.bias))
    scores = np.exp(logits) / np.exp(logits).sum() if how.scoring == "softmax" else 1 / (1 + np.exp(-logits))
    merits = scores if gate.e_score_correction_bias is None else scores + array(gate.e_score_correction_bias)
    groups = [range(g * how.group_size, (g + 1) * how.group_size) for g in range(how.num_groups)]
    if how.num_groups > 1:
        groups.sort(key=lambda group: -sum(sorted((merits[e] for e in group), reverse=True)[: how.group_score_size]))
    allowed = [expert for group in groups[: how.num_kept_groups] for expert in group]
    best = sorted(allowed, key=lambda expert: -merits[expert])[: how.num_chosen]
    total = sum(scores[expert] for expert in best) if how.renormalizes else 1.0
    return {expert: how.scale * scores[expert] / total for expert in best}


def block_by_hand(block: Any, token: np.ndarray) -> np.ndarray:
    gate, up = np.split(linear_by_hand(block.gate_up_proj, token), 2)
    return linear_by_hand(block.down_proj, gate / (1 + np.exp(-gate)) * up)


def linear_by_hand(linear: Any, x: np.ndarray) -> np.ndarray:
    product: np.ndarray = array(linear.weight) @ x
    return product if linear.bias is None else product + array(linear.bias)


def shared_by_hand(layer: MixtureOfExperts, token: np.ndarray) -> np.ndarray | float:
    if layer.shared_experts is None:
        return 0.0
    factor = 1.0
    if layer.shared_gate is not None:
        factor = 1 / (1 + np.exp(-(array(layer.shared_gate.weight)[0] @ token)))
    return factor * block_by_hand(layer.shared_experts, token)


def by_hand(layer: MixtureOfExperts, hidden: torch.Tensor) -> np.ndarray:
    """float64 [T, C], token by token and expert by expert."""
    rows = []
    for token in array(hidden):
        chosen = chosen_by_hand(layer.gate, token)
        weighs_inputs = layer.gate.routing.weighs_inputs
        row = sum(
            block_by_hand(layer.experts[expert], weight * token)
            if weighs_inputs
            else weight * block_by_hand(layer.experts[expert], token)
            for expert, weight in chosen.items()
        )
        rows.append(row + shared_by_hand(layer, token))
    return np.stack(rows)


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param(MixtureSizes(8, 6), id="routed"),
        pytest.param(MixtureSizes(8, 6, 10), id="shared"),
        pytest.param(MixtureSizes(8, 6, 10, weighs_shared=True), id="weighed-shared"),
        pytest.param(MixtureSizes(8, 6, 10, has_bias=True), id="biases"),
    ],
)
@pytest.mark.parametrize("routing", ROUTINGS.values(), ids=ROUTINGS)
def test_every_routing_equals_a_plain_computation(routing: RoutingParameters, sizes: MixtureSizes) -> None:
    layer = create(routing, sizes)
    fill(layer)
    hidden = torch.randn(23, 8, generator=torch.Generator().manual_seed(1))
    np.testing.assert_allclose(layer(hidden).numpy(), by_hand(layer, hidden), rtol=1e-4, atol=1e-5)
    weights, chosen = layer.gate(hidden)
    assert (weights.dtype, chosen.dtype) == (torch.float32, torch.int64)
    wanted = [chosen_by_hand(layer.gate, token) for token in array(hidden)]
    assert [set(row.tolist()) for row in chosen] == [set(row) for row in wanted]


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_any_sizes(data: st.DataObject) -> None:
    num_groups = data.draw(st.integers(1, 4))
    group_size = data.draw(st.integers(2, 4))
    kept = data.draw(st.integers(1, num_groups))
    routing = RoutingParameters(
        num_groups * group_size,
        data.draw(st.integers(1, kept * group_size)),
        scoring=data.draw(st.sampled_from(("softmax", "sigmoid"))),
        renormalizes=data.draw(st.booleans()),
        num_groups=num_groups,
        num_kept_groups=kept,
        group_score_size=data.draw(st.integers(1, group_size)),
        has_correction_bias=data.draw(st.booleans()),
        scale=data.draw(st.sampled_from((1.0, 0.5))),
    )
    layer = create(routing)
    seed = data.draw(st.integers(0, 99))
    fill(layer, seed)
    hidden = torch.randn(data.draw(st.integers(1, 9)), 8, generator=torch.Generator().manual_seed(seed))
    np.testing.assert_allclose(layer(hidden).numpy(), by_hand(layer, hidden), rtol=1e-3, atol=1e-4)


def test_a_step_without_tokens_and_tokens_of_one_expert() -> None:
    layer = create(ROUTINGS["sigmoid"])
    fill(layer)
    assert layer(torch.empty(0, 8)).shape == (0, 8)
    alike = torch.randn(1, 8).expand(5, 8)
    np.testing.assert_allclose(layer(alike).numpy(), by_hand(layer, alike), rtol=1e-4, atol=1e-5)


def test_neighbors_change_nothing_in_a_rows_choice() -> None:
    layer = create(ROUTINGS["sigmoid-groups-bias"])
    fill(layer)
    hidden = torch.randn(9, 8)
    whole, reverse = layer(hidden), layer(hidden.flip(0)).flip(0)
    torch.testing.assert_close(whole, reverse, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(whole[3:4], layer(hidden[3:4]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("routing", [ROUTINGS["softmax-renormalized"], ROUTINGS["sigmoid-inputs"]], ids=str)
@pytest.mark.parametrize("size", [2, 3])
def test_ranks_together_are_the_whole(size: int, routing: RoutingParameters) -> None:
    """Experts and shared experts are split along their intermediate size; one sum over the ranks for both, in which
    biases count once."""
    sizes = MixtureSizes(8, 6, 12, weighs_shared=True, has_bias=True)
    whole = create(routing, sizes)
    fill(whole)
    recorder = Recorder()
    hidden = torch.randn(11, 8)
    for rank in range(size):
        part = create(routing, sizes, TensorParallel(rank, size, recorder))
        share(whole, part)
        part(hidden)
    assert len(recorder.reduced) == size
    torch.testing.assert_close(sum(recorder.reduced), whole(hidden), rtol=1e-5, atol=1e-5)


def share(whole: torch.nn.Module, part: torch.nn.Module) -> None:
    """Load ``part`` from the parameters of ``whole``, as from a file with gate and up apart."""
    for name, module in part.named_modules():
        for parameter_name, parameter in module.named_parameters(recurse=False):
            stored = whole.get_parameter(f"{name}.{parameter_name}")
            if not isinstance(module, ShardedModule):
                parameter.data.copy_(stored)
                continue
            pieces = dict(zip(("gate", "up"), stored.chunk(2), strict=True)) if "gate_up" in name else {None: stored}
            for shard, piece in pieces.items():
                placement = module.place(parameter_name, shard)
                assert placement.stored_shape == tuple(piece.shape)
                placement.target(parameter.data).copy_(placement.source(piece))


def test_padding_passes_no_expert_with_a_bias() -> None:
    layer = create(ROUTINGS["softmax-gate-bias"], MixtureSizes(8, 6, has_bias=True))
    fill(layer)
    hidden = torch.randn(5, 8)
    padding = torch.tensor([False, True, False, True, True])
    mixed = layer.mix(hidden, padding)
    assert mixed[padding].abs().max() == 0
    torch.testing.assert_close(mixed[~padding], layer(hidden)[~padding])


@given(st.floats(0.5, 2.0), st.floats(0.1, 8.0))
@settings(max_examples=20, deadline=None)
def test_clamped_swiglu_equals_a_plain_computation(slope: float, limit: float) -> None:
    gate_up = torch.randn(7, 12, dtype=torch.float64) * 4
    gate, up = np.split(gate_up.numpy(), 2, axis=1)
    gate, up = np.minimum(gate, limit), np.clip(up, -limit, limit)
    expected = (up + 1) * gate / (1 + np.exp(-slope * gate))
    np.testing.assert_allclose(ClampedSwiGLU(slope, limit)(gate_up).numpy(), expected, rtol=1e-12, atol=1e-12)


def test_an_expert_that_cannot_be_split_names_itself() -> None:
    with pytest.raises(ConfigError, match=r"mlp\.experts\.0\.gate_up_proj: size of part 'gate' is 6 .*size=4"):
        create(ROUTINGS["sigmoid"], parallel=TensorParallel(0, 4, Recorder()))


def test_every_linear_of_every_expert_asks_for_a_method() -> None:
    asked: dict[str, LinearShape] = {}

    def choose(name: str, shape: LinearShape) -> LinearMethod:
        asked[name] = shape
        return plain(name, shape)

    create(RoutingParameters(2, 1), MixtureSizes(8, 6, 10), choose=choose)
    assert asked == {
        **{f"mlp.experts.{number}.gate_up_proj": LinearShape(8, (6, 6), "float32") for number in range(2)},
        **{f"mlp.experts.{number}.down_proj": LinearShape(6, (8,), "float32") for number in range(2)},
        "mlp.shared_experts.gate_up_proj": LinearShape(8, (10, 10), "float32"),
        "mlp.shared_experts.down_proj": LinearShape(10, (8,), "float32"),
    }


def test_bfloat16_keeps_choice_and_weights_in_float32() -> None:
    routing = ROUTINGS["sigmoid-groups-bias"]
    router = ExpertRouter(8, routing, torch.bfloat16, CPU)
    assert {name: parameter.dtype for name, parameter in router.named_parameters()} == {
        "weight": torch.float32,
        "e_score_correction_bias": torch.float32,
    }
    narrow = ExpertRouter(8, ROUTINGS["softmax"], torch.bfloat16, CPU)
    assert narrow.weight.dtype == torch.bfloat16
    fill(narrow)
    assert narrow(torch.randn(3, 8, dtype=torch.bfloat16))[0].dtype == torch.float32


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_chosen": 9}, "num_chosen=9 must be 1 to 8"),
        ({"num_chosen": 0}, "num_chosen=0"),
        ({"num_groups": 3}, "num_groups=3 must divide num_experts=8"),
        ({"num_groups": 4, "num_kept_groups": 5}, "num_kept_groups=5 must be 1 to num_groups=4"),
        ({"num_groups": 4, "num_kept_groups": 1, "num_chosen": 3}, "num_chosen=3 must be 1 to 2"),
        ({"num_groups": 4, "group_score_size": 3}, "group_score_size=3 must be 1 to 2"),
    ],
)
def test_a_routing_that_cannot_be_names_the_field(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        RoutingParameters(**{"num_experts": 8, "num_chosen": 1, **fields})

"""What a layer asks of attention, and what experts and tables compute, is judged by trying it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from hardpoint.errors import UnsupportedModelError
from hardpoint_torch_runtime.layers import TensorParallel
from hardpoint_transformers_models.division import Cut, Division
from hardpoint_transformers_models.experts import StackedExperts, require_parts_add_up
from hardpoint_transformers_models.interception import TrialRun

HEADS, KV_HEADS, SIZE, TOKENS = 4, 2, 8, 3


class Attention(torch.nn.Module):
    """A module as the library's are; ``fault`` says what its attention function does beside what is asked of it."""

    def __init__(self, fault: str = "", num_sinks: int | None = None) -> None:
        super().__init__()
        self.fault, self.num_key_value_groups, self.is_causal = fault, HEADS // KV_HEADS, True
        if num_sinks is not None:
            self.sinks = torch.nn.Parameter(torch.empty(num_sinks, device="meta"))


def eager_attention_forward(
    module: Attention,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor,
    scaling: float = 1.0,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    temperature: float | None = None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    """Where the plugin looks for what the library computes: beside the class of the module."""
    del temperature, given
    key, value = (states.repeat_interleave(module.num_key_value_groups, 1) for states in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if module.fault == "slopes":
        scores = scores + torch.arange(scores.shape[-1]) * torch.arange(1, HEADS + 1).view(-1, 1, 1)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + attention_mask
    if s_aux is not None and module.fault != "sinks":
        scores = torch.cat([scores, module.sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)], -1)
    weights = scores.sigmoid() if module.fault == "sigmoid" else scores.softmax(-1)
    weights = weights[..., : key.shape[2]]
    if module.fault == "first":
        weights = torch.cat([weights[..., :1] * 2, weights[..., 1:]], -1)
    return (weights @ value).transpose(1, 2), None


@pytest.fixture
def running() -> Iterator[tuple[TrialRun, torch.Tensor]]:
    run = TrialRun("SomeForCausalLM", {})
    mask = run.mask(TOKENS, TOKENS, lambda batch, head, query, key: key <= query, None)
    with run.active():
        yield run, mask


def attend(running: tuple[TrialRun, torch.Tensor], module: Attention, **given: Any) -> TrialRun:
    run, mask = running
    query, key = (torch.empty(1, heads, TOKENS, SIZE, device="meta") for heads in (HEADS, KV_HEADS))
    sinks = {"s_aux": module.sinks} if "sinks" in dict(module.named_parameters()) else {}
    run.attend(module, query, key, key, mask, {"scaling": 0.3, **sinks, **given})
    return run


@pytest.mark.parametrize(
    ("module", "given", "soft_cap", "has_sinks"),
    [
        (Attention(), {}, None, False),
        (Attention(), {"softcap": 5.0}, 5.0, False),
        (Attention(num_sinks=HEADS), {}, None, True),
    ],
)
def test_calls_are_taken_down(running: Any, module: Attention, given: Any, soft_cap: Any, has_sinks: bool) -> None:
    (call,) = attend(running, module, **given).calls
    assert (call.num_heads, call.num_kv_heads, call.key_size, call.scale) == (HEADS, KV_HEADS, SIZE, 0.3)
    assert (call.soft_cap, call.has_sinks, call.sliding_window) == (soft_cap, has_sinks, None)


@pytest.mark.parametrize(
    ("module", "given", "reason"),
    [
        (Attention("slopes"), {}, "more in its attention"),
        (Attention("sigmoid"), {}, "more in its attention"),
        (Attention("first"), {}, "more in its attention"),
        (Attention("sinks", num_sinks=HEADS), {}, "more in its attention"),
        (Attention(num_sinks=1), {}, "sinks that are not one weight of its own for each head"),
        (Attention(), {"s_aux": torch.zeros(HEADS)}, "sinks that are not one weight"),
        (Attention(), {"temperature": 2.0}, "'temperature', which the call cannot express"),
        (Attention(), {"position_bias": torch.zeros(1)}, "'position_bias', a tensor"),
        (Attention(), {"is_causal": False}, "tokens behind"),
    ],
    ids=["slopes", "sigmoid", "first", "sinks", "few sinks", "foreign sinks", "argument", "bias", "both sides"],
)
def test_calls_that_ask_for_more_are_refused(running: Any, module: Attention, given: Any, reason: str) -> None:
    with pytest.raises(UnsupportedModelError, match=reason):
        attend(running, module, **given)


def test_heads_with_masks_of_their_own_are_refused() -> None:
    run = TrialRun("SomeForCausalLM", {})
    mask = run.mask(TOKENS, TOKENS, lambda batch, head, query, key: key <= query - head, None)
    with run.active(), pytest.raises(UnsupportedModelError, match="heads have masks of their own"):
        attend((run, mask), Attention())


class Experts(torch.nn.Module):
    """As the library's: stacks of all experts, of which each token goes to those chosen for it."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault = fault
        self.gate_up_proj = torch.nn.Parameter(torch.empty(5, 32, 12, device="meta"))
        self.down_proj = torch.nn.Parameter(torch.empty(5, 12, 16, device="meta"))

    def forward(self, hidden: torch.Tensor, chosen: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        inner = torch.einsum("tc,tkoc->tko", hidden, self.gate_up_proj[chosen])
        gate, up = (inner[..., ::2], inner[..., 1::2]) if self.fault == "alternates" else inner.chunk(2, -1)
        inner = torch.nn.functional.silu(gate) * up
        if self.fault == "norm":
            inner = torch.nn.functional.rms_norm(inner, inner.shape[-1:])
        output = torch.einsum("tki,tkoi,tk->to", inner, self.down_proj[chosen], scores)
        return output + hidden if self.fault == "residual" else output


PACKED = {"gate_up_proj": Cut.PACKED_OUTPUTS, "down_proj": Cut.INPUTS}


@pytest.mark.parametrize(
    ("fault", "cuts"),
    [
        ("norm", PACKED),
        ("residual", PACKED),
        ("alternates", PACKED),
        ("", {**PACKED, "gate_up_proj": Cut.OUTPUTS}),
        ("", {"gate_up_proj": Cut.PACKED_OUTPUTS}),
    ],
)
def test_experts_that_do_not_add_up_are_not_divided(fault: str, cuts: dict[str, Cut]) -> None:
    division = Division("SomeForCausalLM", 2)
    require_parts_add_up(division, "mlp.experts", Experts(), PACKED)
    with pytest.raises(UnsupportedModelError, match="mlp.experts .* --tensor-parallel-size 1"):
        require_parts_add_up(division, "mlp.experts", Experts(fault), cuts)


def test_alternating_outputs_may_be_cut_in_a_row() -> None:
    cuts = {"gate_up_proj": Cut.OUTPUTS, "down_proj": Cut.INPUTS}
    require_parts_add_up(Division("SomeForCausalLM", 2), "mlp.experts", Experts("alternates"), cuts)


@pytest.mark.parametrize("rank", [0, 1])
def test_matrices_stored_apart_and_in_one_fill_the_same_share(rank: int) -> None:
    shapes: dict[str, tuple[int, ...]] = {"gate_up_proj": (3, 8, 5), "down_proj": (3, 5, 4)}
    stack = StackedExperts(shapes, {"gate_up_proj": 2, "down_proj": 1}, PACKED, TensorParallel(rank, 2))
    for name, shape in shapes.items():
        whole = torch.randn(shape)
        share = PACKED[name].share(whole, rank, 2)
        found, at_once = torch.zeros_like(share), torch.zeros_like(share)
        num_parts = stack.num_parts[name]
        for expert in range(shape[0]):
            for part, stored in enumerate(whole[expert].chunk(num_parts)):
                placement = stack.place(name, f"{expert}/{part}")
                assert placement.stored_shape == tuple(stored.shape)
                placement.target(found).copy_(placement.source(stored))
        placement = stack.place(name, None)
        placement.target(at_once).copy_(placement.source(whole))
        assert torch.equal(found, share)
        assert torch.equal(at_once, share)

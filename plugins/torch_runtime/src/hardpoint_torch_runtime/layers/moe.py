"""Mixture of experts: each token through a few of many feed-forward blocks, grouped by expert.

Legend: T tokens, C hidden size, M intermediate size of an expert, E experts, K experts per token.

Every linear of every expert is an ordinary parallel linear, with its own linear method and adapter: quantization
methods are asked for ``<name>.experts.<number>.gate_up_proj`` and ``<name>.experts.<number>.down_proj``. Ranks hold a
share of M of all experts and sum their partial results once, shared experts included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOperator, CustomOps
from hardpoint_torch_runtime.forward_context import get_forward_context, has_forward_context
from hardpoint_torch_runtime.layers.linear import LinearFactory, MergedColumnParallelLinear, RowParallelLinear
from hardpoint_torch_runtime.layers.routing import ExpertRouter, RoutingParameters
from hardpoint_torch_runtime.layers.uncompiled import UncompiledLayer
from hardpoint_torch_runtime.ops.registry import OPERATORS

__all__ = ["ExpertMLP", "MixtureOfExperts", "MixtureSizes", "RoutedExperts", "SharedGate"]


@dataclass(frozen=True, slots=True)
class MixtureSizes:
    """Sizes over all ranks.

    Attributes:
        shared_size: M of the experts every token passes, taken together, or None for none.
        weighs_shared: what shared experts yield is weighted, token by token, by the sigmoid of a gate of their own.
        has_bias: linears of routed experts have one; those of shared experts never do.
    """

    hidden_size: int
    expert_size: int
    shared_size: int | None = None
    weighs_shared: bool = False
    has_bias: bool = False


class ExpertMLP(torch.nn.Module):
    """One gated block, [T, C] to this rank's part of [T, C]: the ranks' results are still to be summed."""

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        hidden_size: int,
        size: int,
        activation: Callable[[torch.Tensor], torch.Tensor],
        *,
        bias: bool = False,
    ) -> None:
        super().__init__()
        parts = {"gate": size, "up": size}
        self.gate_up_proj = MergedColumnParallelLinear(f"{name}.gate_up_proj", factory, hidden_size, parts, bias=bias)
        self.down_proj = RowParallelLinear(f"{name}.down_proj", factory, size, hidden_size, bias=bias, reduce=False)
        self._activation = activation

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self._activation(self.gate_up_proj(hidden)))


class SharedGate(torch.nn.Module):
    """[T, C] to factors [T, 1] between zero and one. Every rank holds all of it; like a router's gate it is small, and
    no method quantizes it."""

    def __init__(self, hidden_size: int, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        empty = torch.empty(1, hidden_size, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.weight).sigmoid()


class RoutedExperts(torch.nn.ModuleList):
    """(hidden [T, C], weights float32 [T, K], chosen int64 [T, K]) to the weighted sum [T, C], on this rank's part.

    The plain implementation: each block once for every expert that any token chose, over all of its tokens. A token's
    results are put side by side before they are summed, so that the order of the sum is the token's own. Tokens in
    ``skipped`` (bool [T]) pass no expert and yield zeros. ``weighs_inputs``: weights are factors on what experts are
    given, and what they yield is summed as it is.
    """

    def __init__(self, experts: Iterable[ExpertMLP], *, weighs_inputs: bool = False) -> None:
        super().__init__(experts)
        self._weighs_inputs = weighs_inputs

    def forward(
        self, hidden: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, skipped: torch.Tensor | None = None
    ) -> torch.Tensor:
        num_tokens, num_chosen = chosen.shape
        if skipped is not None:
            # Sorted behind all experts, where nobody computes them.
            chosen = chosen.masked_fill(skipped.unsqueeze(1), len(self))
        by_expert = chosen.flatten()
        order = by_expert.argsort(stable=True)
        counts = torch.bincount(by_expert, minlength=len(self)).tolist()[: len(self)]
        # Neighbors in ``order`` share an expert; pair number p belongs to token p // K.
        grouped = hidden[order // num_chosen]
        if self._weighs_inputs:
            grouped = grouped * weights.flatten()[order].unsqueeze(1).to(grouped.dtype)
            weights = torch.ones_like(weights)
        outputs = torch.empty_like(grouped)
        begin = 0
        for expert, count in zip(self, counts, strict=True):
            if count:
                outputs[begin : begin + count] = expert(grouped[begin : begin + count])
            begin += count
        outputs[begin:] = 0
        per_choice = torch.empty_like(outputs)
        per_choice[order] = outputs
        # In the weights' float32: K results of a narrow dtype are rounded once, after they are summed.
        combined = torch.bmm(weights.unsqueeze(1), per_choice.unflatten(0, (num_tokens, num_chosen)).float())
        return combined.squeeze(1).to(hidden.dtype)


class MixtureOfExperts(UncompiledLayer):
    """[T, C] to [T, C]: a router, its experts, and perhaps shared experts that every token passes too.

    Routed experts skip tokens that the forward context marks as padding; what padding yields is undefined.
    """

    def __init__(
        self,
        name: str,
        factory: LinearFactory,
        sizes: MixtureSizes,
        routing: RoutingParameters,
        activation: Callable[[torch.Tensor], torch.Tensor],
    ) -> None:
        super().__init__()
        self.name = name
        self.parallel = factory.parallel
        self.gate = ExpertRouter(sizes.hidden_size, routing, factory.dtype, factory.device)
        self.experts = RoutedExperts(
            (
                ExpertMLP(
                    f"{name}.experts.{number}",
                    factory,
                    sizes.hidden_size,
                    sizes.expert_size,
                    activation,
                    bias=sizes.has_bias,
                )
                for number in range(routing.num_experts)
            ),
            weighs_inputs=routing.weighs_inputs,
        )
        self.shared_experts: ExpertMLP | None = None
        self.shared_gate: SharedGate | None = None
        if sizes.shared_size is not None:
            self.shared_experts = ExpertMLP(
                f"{name}.shared_experts", factory, sizes.hidden_size, sizes.shared_size, activation
            )
            if sizes.weighs_shared:
                self.shared_gate = SharedGate(sizes.hidden_size, factory.dtype, factory.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        if torch.compiler.is_compiling():
            # Neither this layer nor its name is part of what is compiled, which so serves every layer (R4.67).
            mixed: torch.Tensor = next_mixture(hidden)
            return mixed
        if not has_forward_context():
            return self.mix(hidden)
        context = get_forward_context()
        if context.moe_turns is not None:
            context.moe_turns.take(self.name)
        return self.mix(hidden, context.padding_mask)

    def mix(self, hidden: torch.Tensor, padding: torch.Tensor | None = None) -> torch.Tensor:
        """The layer itself, without asking whose turn it is; ``padding`` bool [T]."""
        weights, chosen = self.gate(hidden)
        output = self.experts(hidden, weights, chosen, padding)
        if self.shared_experts is not None:
            shared = self.shared_experts(hidden)
            output = output + (shared if self.shared_gate is None else self.shared_gate(hidden) * shared)
        return self.parallel.all_reduce(output) if self.parallel.size > 1 else output


def _mix_next(hidden: torch.Tensor) -> torch.Tensor:
    """The mixture whose turn it is. Raises ``RuntimeError`` where the forward context lists none."""
    context = get_forward_context()
    if context.moe_turns is None:
        raise RuntimeError(
            "compiled code runs a mixture of experts, but the forward context lists none; enter forwards through "
            "ForwardScopes(static=StaticContext.of(model))"
        )
    layer = context.uncompiled_layers[context.moe_turns.take()]
    if not isinstance(layer, MixtureOfExperts):
        raise TypeError(f"it is the turn of a {type(layer).__name__}, which is no mixture of experts")
    return layer.mix(hidden, context.padding_mask)


_OPERATOR = CustomOperator(
    "next_mixture",
    {ANY_DEVICE: _mix_next},
    fake=torch.empty_like,
    samples=lambda device: (),
    schema="(Tensor hidden) -> Tensor",
)
next_mixture = OPERATORS.register(CustomOps((_OPERATOR,)), "hardpoint-torch-runtime")[_OPERATOR.name]
"""[T, C] to [T, C] by the mixture of experts whose turn it is."""

"""A decoder's layers as native calls: one per step, or two per layer around attention that is computed elsewhere.

Legend: T tokens of the step, C hidden size.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from hardpoint_cpu.attention_backend import CpuPagedImpl
from hardpoint_cpu.linear_method import NativeLinearMethod
from hardpoint_cpu.native.attention import LayerFacts
from hardpoint_cpu.native.library import NativeLibrary, NativeLinear
from hardpoint_cpu.native.stack import GATES, BlockParts, NativeStack, NormWeight, RotationTable, StepGroup
from hardpoint_torch_runtime import ForwardContext, GraphMode, get_forward_context
from hardpoint_torch_runtime.layers import AttentionLayer, ParallelLinear, RMSNorm, RotaryEmbedding
from hardpoint_torch_runtime.lowering import StandardBlock, StandardStack

__all__ = ["LoweredStack", "StackRefusedError", "lower_stack"]


class StackRefusedError(ValueError):
    """The layers cannot run as native calls; the message is the reason."""


def lower_stack(library: NativeLibrary, stack: StandardStack, logger: logging.Logger) -> LoweredStack:
    """What takes the place of ``stack``, whose linears must compute with kernels already.

    Raises ``StackRefusedError``.
    """
    if not stack.blocks:
        raise StackRefusedError("there are no layers")
    reason = next((reason for block in stack.blocks for reason in _faults(block)), None)
    if reason is not None:
        raise StackRefusedError(reason)
    for block in stack.blocks:
        impl = block.attention.impl
        if isinstance(impl, CpuPagedImpl) and all(_rounds_inputs(linear) for linear in _linears(block)):
            impl.accept_rounded_products()
    try:
        parts = [_parts(block) for block in stack.blocks]
        native = NativeStack(library, parts, None if stack.final_norm is None else _norm(stack.final_norm))
    except ValueError as error:
        raise StackRefusedError(str(error)) from error
    return LoweredStack(native, stack, logger)


class LoweredStack:
    """Called with (hidden [T, C], positions) in the place of the layers; None where these must run themselves.

    Attributes:
        attends: attention is part of the native call.
    """

    def __init__(self, native: NativeStack, stack: StandardStack, logger: logging.Logger) -> None:
        self._native = native
        self._layers = tuple(block.attention for block in stack.blocks)
        impls = (layer.impl for layer in self._layers)
        self._impls = tuple(impl for impl in impls if isinstance(impl, CpuPagedImpl))
        self.attends = len(self._impls) == len(self._layers)
        self._linears = tuple(linear for block in stack.blocks for linear in _linears(block))
        self._is_adapted = False
        for linear in self._linears:
            linear.on_adapter = self._look_for_adapters
        self._logger = logger
        self._told: set[str] = set()
        # Whose views the native stack is bound to; held, so that no other can have its address.
        self._bound: Any = None
        self._leaders: tuple[str, ...] = ()
        self._groups: tuple[StepGroup, ...] = ()

    def __call__(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor | None:
        context = get_forward_context()
        if context.attention_metadata is None:
            return None  # memory is profiled: attention must touch no cache
        reason = self._refuse(hidden, positions, context)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                self._logger.info("steps are not run as native calls where %s", reason)
            return None
        if self.attends:
            self._run_whole(hidden, positions, context)
        else:
            self._run_in_parts(hidden, positions)
        return hidden

    def _refuse(self, hidden: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> str | None:
        if context.half_metadata is not None:
            return "a batch is computed in two halves"
        if context.graph_mode is not GraphMode.NONE or len(hidden) != context.num_tokens:
            return "they are captured as graphs or padded"
        if positions.dim() != 1:
            return "tokens have several positions"
        if self._is_adapted:
            return "an adapter is set on a layer"
        return None

    def _look_for_adapters(self) -> None:
        self._is_adapted = any(linear.adapter is not None for linear in self._linears)

    def _run_whole(self, hidden: torch.Tensor, positions: torch.Tensor, context: ForwardContext) -> None:
        metadata, slots = context.attention_metadata or {}, context.slot_mapping
        if self._bound is not context.kv_caches:
            self._bind(context.kv_caches, metadata, slots)
        self._native.run(hidden, positions, self._groups_of(metadata, slots))

    def _groups_of(self, metadata: Mapping[str, Any], slots: Mapping[str, torch.Tensor]) -> tuple[StepGroup, ...]:
        """The same ones as in the step before, where it had the same rows and slots."""
        groups, leaders = self._groups, self._leaders
        if len(groups) != len(leaders) or not all(
            group.rows is metadata[name].rows.struct and group.slots is slots[name]
            for group, name in zip(groups, leaders, strict=True)
        ):
            self._groups = tuple(StepGroup(metadata[name].rows.struct, slots[name]) for name in leaders)
        return self._groups

    def _bind(
        self, caches: Mapping[str, torch.Tensor], metadata: Mapping[str, Any], slots: Mapping[str, torch.Tensor]
    ) -> None:
        """Which layers share rows and slots is the cache's plan, and shows in that they get the same objects."""
        numbers: dict[tuple[int, int], int] = {}
        leaders: list[str] = []
        groups: list[int] = []
        for name in (layer.name for layer in self._layers):
            number = numbers.setdefault((id(metadata[name]), id(slots[name])), len(numbers))
            if number == len(leaders):
                leaders.append(name)
            groups.append(number)
        views = [impl.view(caches[layer.name]) for layer, impl in zip(self._layers, self._impls, strict=True)]
        self._native.bind(views, groups)
        self._leaders = tuple(leaders)
        self._bound = caches

    def _run_in_parts(self, hidden: torch.Tensor, positions: torch.Tensor) -> None:
        for index, layer in enumerate(self._layers):
            params = layer.params
            queries, keys = params.num_heads * params.head_size, params.num_kv_heads * params.head_size
            qkv = torch.empty((len(hidden), queries + 2 * keys), dtype=torch.float32)
            self._native.before_attention(index, hidden, positions, qkv)
            heads = qkv.view(len(hidden), -1, params.head_size).split(
                (params.num_heads, params.num_kv_heads, params.num_kv_heads), dim=1
            )
            self._native.after_attention(index, hidden, positions, layer(*heads))


def _faults(block: StandardBlock) -> Iterator[str]:
    """Why ``block`` cannot run natively."""
    for linear in _linears(block):
        if linear.parallel.size > 1:
            yield f"layers are divided among {linear.parallel.size} ranks, which exchange between the calls"
        elif not isinstance(linear.method, NativeLinearMethod):
            yield f"{linear.name} has no kernel"
        elif linear.adapter is not None:
            yield f"an adapter is set on {linear.name}"
    if block.rotary.axes is not None:
        yield f"heads of {block.name} turn by several positions"
    if block.activation not in GATES:
        yield f"the activation {block.activation!r} has no kernel"
    if block.attention.value_size != block.attention.params.head_size:
        yield f"values of {block.name} are not as long as its keys"


def _linears(block: StandardBlock) -> tuple[ParallelLinear, ...]:
    return block.qkv_proj, block.o_proj, block.gate_up_proj, block.down_proj


def _parts(block: StandardBlock) -> BlockParts:
    return BlockParts(
        qkv=_native(block.qkv_proj),
        o=_native(block.o_proj),
        gate_up=_native(block.gate_up_proj),
        down=_native(block.down_proj),
        attention=_facts(block.attention),
        rotation=_rotation(block.rotary),
        input_norm=_norm(block.input_norm),
        query_norm=None if block.q_norm is None else _norm(block.q_norm),
        key_norm=None if block.k_norm is None else _norm(block.k_norm),
        attention_output_norm=None if block.attention_output_norm is None else _norm(block.attention_output_norm),
        feed_forward_norm=_norm(block.feed_forward_norm),
        feed_forward_output_norm=(
            None if block.feed_forward_output_norm is None else _norm(block.feed_forward_output_norm)
        ),
        activation=block.activation,
    )


def _rounds_inputs(linear: ParallelLinear) -> bool:
    method: object = linear.method
    return isinstance(method, NativeLinearMethod) and method.rounds_inputs


def _native(linear: ParallelLinear) -> NativeLinear:
    method: object = linear.method
    if not isinstance(method, NativeLinearMethod):
        raise StackRefusedError(f"{linear.name} has no kernel")
    return method.native


def _facts(layer: AttentionLayer) -> LayerFacts:
    """Only sizes count where attention is computed elsewhere."""
    if isinstance(layer.impl, CpuPagedImpl):
        return layer.impl.facts
    params = layer.params
    return LayerFacts.make(params.num_heads, params.num_kv_heads, params.head_size, params.scale)


def _norm(norm: RMSNorm) -> NormWeight:
    return NormWeight(norm.weight, norm.eps)


def _rotation(rotary: RotaryEmbedding) -> RotationTable:
    return RotationTable(rotary.cos, rotary.sin, rotary.pairs_are_neighbors)

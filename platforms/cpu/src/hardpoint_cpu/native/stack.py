"""Bindings of the decoder stack: the structures that kernels read, and calls for whole stacks and halves of layers.

Legend: T tokens, C hidden size, L layers.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hardpoint_cpu.native.attention import AttentionRows, KVCache, LayerFacts
from hardpoint_cpu.native.library import INT64, POINTER, NativeLibrary, NativeLinear, freed_with

__all__ = ["GATES", "BlockParts", "NativeStack", "NormWeight", "RotationTable", "StepGroup"]

GATES = {"silu": 0, "gelu_tanh": 1}


class _Norm(ctypes.Structure):
    _fields_ = (("weight", POINTER), ("eps", ctypes.c_float))


class _Rotation(ctypes.Structure):
    _fields_ = (
        ("cos", POINTER),
        ("sin", POINTER),
        ("positions", INT64),
        ("rotary_size", INT64),
        ("pairs_are_neighbors", ctypes.c_int32),
    )


class _Block(ctypes.Structure):
    _fields_ = (
        *((name, POINTER) for name in ("qkv", "o", "gate_up", "down", "attention")),
        ("rotation", _Rotation),
        *(
            (name, _Norm)
            for name in ("input", "query", "key", "attention_output", "feed_forward", "feed_forward_output")
        ),
        ("gate", ctypes.c_int32),
    )


class _StepGroup(ctypes.Structure):
    _fields_ = (("rows", POINTER), ("slots", POINTER), ("num_slots", INT64))


class _Step(ctypes.Structure):
    _fields_ = (
        ("hidden", POINTER),
        ("positions", POINTER),
        ("tokens", INT64),
        ("groups", POINTER),
        ("num_groups", INT64),
        ("group_of_block", POINTER),
        ("caches", POINTER),
    )


@dataclass(frozen=True, slots=True)
class NormWeight:
    """``weight`` float32 [size], contiguous."""

    weight: torch.Tensor
    eps: float

    def struct(self) -> _Norm:
        _demand_flat("a norm's weight", self.weight, torch.float32)
        return _Norm(self.weight.data_ptr(), self.eps)


@dataclass(frozen=True, slots=True)
class RotationTable:
    """``cos`` and ``sin`` float32 [positions, rotary size / 2], contiguous."""

    cos: torch.Tensor
    sin: torch.Tensor
    pairs_are_neighbors: bool

    def struct(self) -> _Rotation:
        for table in (self.cos, self.sin):
            if table.dtype is not torch.float32 or table.dim() != 2 or not table.is_contiguous():
                raise ValueError(f"a rotation is float32 [positions, pairs], not {table.dtype} {list(table.shape)}")
        if self.cos.shape != self.sin.shape:
            raise ValueError(f"cosines {list(self.cos.shape)} and sines {list(self.sin.shape)} differ in shape")
        positions, pairs = self.cos.shape
        return _Rotation(self.cos.data_ptr(), self.sin.data_ptr(), positions, 2 * pairs, int(self.pairs_are_neighbors))


@dataclass(frozen=True, slots=True)
class BlockParts:
    """One layer; norms that are None do not exist."""

    qkv: NativeLinear
    o: NativeLinear
    gate_up: NativeLinear
    down: NativeLinear
    attention: LayerFacts
    rotation: RotationTable
    input_norm: NormWeight
    query_norm: NormWeight | None
    key_norm: NormWeight | None
    attention_output_norm: NormWeight | None
    feed_forward_norm: NormWeight
    feed_forward_output_norm: NormWeight | None
    activation: str

    def struct(self) -> _Block:
        size = self.attention.struct.head_size
        hidden = self.qkv.inputs
        norms = (
            (self.input_norm, hidden),
            (self.query_norm, size),
            (self.key_norm, size),
            (self.attention_output_norm, hidden),
            (self.feed_forward_norm, hidden),
            (self.feed_forward_output_norm, hidden),
        )
        for norm, length in norms:
            if norm is not None and norm.weight.shape != (length,):
                raise ValueError(f"a norm over {length} values has a weight {list(norm.weight.shape)}")
        return _Block(
            *(linear.handle for linear in (self.qkv, self.o, self.gate_up, self.down)),
            self.attention.address,
            self.rotation.struct(),
            *(_Norm() if norm is None else norm.struct() for norm, _ in norms),
            GATES[self.activation],
        )


@dataclass(frozen=True, slots=True)
class StepGroup:
    """What layers whose caches have the same blocks share in a step; ``slots`` int64 [at most T], contiguous."""

    rows: AttentionRows
    slots: torch.Tensor


class NativeStack:
    """Layers that run as one call. Raises ``ValueError`` for parts that do not fit together."""

    def __init__(self, library: NativeLibrary, blocks: Sequence[BlockParts], final_norm: NormWeight | None) -> None:
        self._library = library
        self.blocks = tuple(blocks)
        self._final_norm = final_norm
        self._handle = POINTER()
        structs = (_Block * len(self.blocks))(*(block.struct() for block in self.blocks))
        norm = _Norm() if final_norm is None else final_norm.struct()
        self.hidden_size = self.blocks[0].qkv.inputs if self.blocks else 0
        if final_norm is not None and final_norm.weight.shape != (self.hidden_size,):
            raise ValueError(f"the final norm has a weight {list(final_norm.weight.shape)}, not [{self.hidden_size}]")
        create = library.function("hp_stack_create", POINTER, INT64, POINTER, POINTER)
        library.check(create(structs, len(self.blocks), ctypes.addressof(norm), ctypes.byref(self._handle)))
        freed_with(self, library.function("hp_stack_destroy", POINTER, returns=None), self._handle)
        self._run = library.function("hp_stack_run", POINTER, POINTER, POINTER)
        piece = (POINTER, POINTER, INT64, POINTER, POINTER)
        self._before = library.function("hp_stack_before_attention", *piece)
        self._after = library.function("hp_stack_after_attention", *piece)
        self._groups: tuple[StepGroup, ...] = ()
        self._group_structs: ctypes.Array[_StepGroup] = (_StepGroup * 0)()
        self._caches: ctypes.Array[KVCache] | None = None
        self._group_of_block: ctypes.Array[ctypes.c_int32] | None = None

    def bind(self, caches: Sequence[KVCache], groups: Sequence[int]) -> None:
        """The caches of all layers, whose memory the caller keeps, and the number of each layer's group in later steps.

        Raises ``ValueError`` for another number of either.
        """
        count = len(self.blocks)
        if (len(caches), len(groups)) != (count, count):
            raise ValueError(f"{count} layers have {len(caches)} caches and {len(groups)} groups")
        self._caches = (KVCache * count)(*caches)
        self._group_of_block = (ctypes.c_int32 * count)(*groups)

    def run(self, hidden: torch.Tensor, positions: torch.Tensor, groups: tuple[StepGroup, ...]) -> None:
        """``hidden`` float32 [T, C] in place, for tokens at ``positions`` int64 [T]. Caches must be bound.

        Nothing is checked again in ``groups`` that were given to the run before: steps of one shape follow each other.
        """
        if self._caches is None or self._group_of_block is None:
            raise RuntimeError("no caches are bound; call bind() first")
        if groups is not self._groups:
            self._group_structs = (_StepGroup * len(groups))(*map(self._group, groups))
            self._groups = groups
        step = self._step(hidden, positions)
        step.groups, step.num_groups = ctypes.addressof(self._group_structs), len(groups)
        step.group_of_block = ctypes.addressof(self._group_of_block)
        step.caches = ctypes.addressof(self._caches)
        self._library.check(self._run(self._library.runtime, self._handle, ctypes.addressof(step)))

    def before_attention(self, index: int, hidden: torch.Tensor, positions: torch.Tensor, qkv: torch.Tensor) -> None:
        """Norm, projection and rotation of layer ``index``: rotated queries, keys, and values into ``qkv``
        float32 [T, all heads * head size]."""
        block, step = self.blocks[index], self._step(hidden, positions)
        _demand_rows("qkv", qkv, len(hidden), block.qkv.outputs)
        library = self._library
        library.check(self._before(library.runtime, self._handle, index, ctypes.addressof(step), qkv.data_ptr()))

    def after_attention(
        self, index: int, hidden: torch.Tensor, positions: torch.Tensor, attended: torch.Tensor
    ) -> None:
        """The rest of layer ``index``, after its heads ``attended`` float32 [T, heads * head size]; after the last
        layer the final norm, too."""
        block, step = self.blocks[index], self._step(hidden, positions)
        _demand_rows("attended", attended, len(hidden), block.o.inputs)
        library = self._library
        library.check(self._after(library.runtime, self._handle, index, ctypes.addressof(step), attended.data_ptr()))

    def _step(self, hidden: torch.Tensor, positions: torch.Tensor) -> _Step:
        tokens = hidden.shape[0]
        _demand_rows("hidden", hidden, tokens, self.hidden_size)
        _demand_flat("positions", positions, torch.int64)
        if positions.shape[0] < tokens:
            raise ValueError(f"{tokens} tokens have {positions.shape[0]} positions")
        return _Step(hidden=hidden.data_ptr(), positions=positions.data_ptr(), tokens=tokens)

    @staticmethod
    def _group(group: StepGroup) -> _StepGroup:
        _demand_flat("slots", group.slots, torch.int64)
        return _StepGroup(ctypes.addressof(group.rows), group.slots.data_ptr(), group.slots.shape[0])


def _demand_rows(name: str, tensor: torch.Tensor, rows: int, columns: int) -> None:
    fits = tensor.dtype is torch.float32 and tuple(tensor.shape) == (rows, columns) and tensor.is_contiguous()
    if not fits or tensor.device.type != "cpu":
        given = f"{tensor.dtype} {list(tensor.shape)}"
        raise ValueError(f"{name} must be a contiguous float32 CPU tensor [{rows}, {columns}], not {given}")


def _demand_flat(name: str, tensor: torch.Tensor, dtype: torch.dtype) -> None:
    if tensor.dtype is not dtype or tensor.dim() != 1 or not tensor.is_contiguous() or tensor.device.type != "cpu":
        raise ValueError(f"{name} must be a contiguous {dtype} CPU tensor, not {tensor.dtype} {list(tensor.shape)}")

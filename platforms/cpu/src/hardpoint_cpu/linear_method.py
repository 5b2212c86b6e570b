"""Linear layers that compute with compiled kernels, on a packed weight in place of the stored one.

Legend: T tokens, I input size, O output size.
"""

from __future__ import annotations

import torch

from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_cpu.native.grouped import GGUF_TYPES, Activations, gguf_rows, linear_gguf, linear_int4
from hardpoint_cpu.native.int8 import linear_int8
from hardpoint_cpu.native.library import NativeLibrary, NativeLinear
from hardpoint_torch_runtime.layers import (
    ChannelInt8Weight,
    DenseWeight,
    GGUFWeight,
    GroupedInt4Weight,
    LMHead,
    ParallelLinear,
    StoredWeight,
    VocabEmbedding,
)

__all__ = ["NativeLinearMethod", "PackRefusedError", "pack", "take_over", "take_over_head", "take_over_rows"]


class PackRefusedError(ValueError):
    """No kernel computes with a weight as it is stored; the message is the reason."""


def pack(
    library: NativeLibrary, stored: StoredWeight, bias: torch.Tensor | None, *, invariant: bool = False
) -> NativeLinear:
    """A kernel's own copy of ``stored`` and of ``bias`` float32 [O], which may go afterwards.

    ``invariant``: rows must have the same bits whatever comes with them. Raises ``PackRefusedError``.
    """
    try:
        made = _pack(library, stored, bias, invariant)
    except ValueError as error:
        raise PackRefusedError(str(error)) from error
    if invariant and not made.is_batch_invariant:
        raise PackRefusedError("the kernel of this weight rounds by the number of rows, and --batch-invariant is set")
    return made


def _pack(library: NativeLibrary, stored: StoredWeight, bias: torch.Tensor | None, invariant: bool) -> NativeLinear:
    if isinstance(stored, DenseWeight):
        return library.linear_f32(stored.weight, bias, invariant=invariant)
    activations: Activations = "int8" if stored.int8_activations else "float"
    if isinstance(stored, ChannelInt8Weight):
        return linear_int8(library, stored.values, stored.scales, bias, activations)
    if isinstance(stored, GroupedInt4Weight):
        groups = (stored.values, stored.scales, stored.mins, stored.group_size)
        return linear_int4(library, *groups, bias, activations=activations, invariant=invariant)
    parts = [(part.type_name, part.data) for part in stored.parts]
    return linear_gguf(library, parts, bias, activations=activations, invariant=invariant)


class NativeLinearMethod(LinearMethod):
    """Computes with ``native``, whose bias is the layer's where ``has_bias``.

    ``rounds_inputs``: activations are rounded to eight bits first.
    """

    def __init__(self, native: NativeLinear, *, has_bias: bool, rounds_inputs: bool = False) -> None:
        self.native = native
        self.has_bias = has_bias
        self.rounds_inputs = rounds_inputs

    @property
    def is_batch_invariant(self) -> bool:
        """Whether a row has the same bits whatever rows come with it."""
        return self.native.is_batch_invariant

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        raise RuntimeError("weights are loaded by the method that stores them; this one takes over afterwards")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        output = _product(self.native, x)
        return output if bias is None or self.has_bias else output.add_(bias)


def _product(native: NativeLinear, x: torch.Tensor) -> torch.Tensor:
    """[..., I] to [..., O]."""
    if x.dim() == 2 and x.is_contiguous():
        return native(x)
    rows = x.reshape(-1, native.inputs)
    return native(rows if rows.stride(-1) == 1 else rows.contiguous()).view(*x.shape[:-1], native.outputs)


def take_over(layer: ParallelLinear, library: NativeLibrary, *, invariant: bool) -> None:
    """Let ``layer`` compute with a kernel, and drop what was stored. Raises ``PackRefusedError`` and changes nothing.

    A bias is packed where every rank adds it; ranks that share out the inputs add it once, after the product.
    """
    stored = layer.stored()
    if stored is None:
        raise PackRefusedError(f"{type(layer.method).__name__} does not tell how the weight is stored")
    bias = layer.bias if layer.parallel.size == 1 else None
    native = pack(library, stored, bias, invariant=invariant)
    layer.release()
    rounds = not isinstance(stored, DenseWeight) and stored.int8_activations
    layer.method = NativeLinearMethod(native, has_bias=bias is not None, rounds_inputs=rounds)


def take_over_head(head: LMHead, library: NativeLibrary, *, invariant: bool) -> None:
    """The same for a head that is tied to an embedding, which keeps its rows to look them up."""
    stored = head.stored()
    if stored is None:
        raise PackRefusedError("the embedding that it is tied to does not tell how its weight is stored")
    native = pack(library, stored, None, invariant=invariant)
    head.product = lambda hidden: _product(native, hidden)


def take_over_rows(embedding: VocabEmbedding, library: NativeLibrary) -> None:
    """Let ``embedding`` look rows of blocks up with a kernel, which decodes them to the same bits as torch does.

    Rows that are stored otherwise take one operator, or few, and stay with the embedding.
    """
    stored = embedding.stored()
    if not isinstance(stored, GGUFWeight) or len(stored.parts) != 1 or stored.parts[0].type_name not in GGUF_TYPES:
        return
    (part,) = stored.parts
    embedding.rows = lambda ids: gguf_rows(library, part.type_name, part.data, ids)

"""A linear, or a vocabulary, whose weight is rows of GGUF blocks.

Legend: O output size, I input size of the layer, R rows of a part.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch

from hardpoint.errors import ConfigError, ModelFormatError
from hardpoint.interfaces.model_source import WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_quantization.gguf_blocks import BLOCK_TYPES, BlockType, decode_rows
from hardpoint_quantization.grouped import product_of_pieces
from hardpoint_quantization.rounding import CHUNK_WEIGHTS
from hardpoint_torch_runtime.layers import DenseWeight, GGUFPart, GGUFWeight, Placement
from hardpoint_torch_runtime.weights import shared_tensor

__all__ = ["GGUFLinear", "block_name"]

_PREFIX = "gguf."


def block_name(dtype: str) -> str | None:
    """``Q4_1`` for the storage format ``gguf.q4_1``; None for other formats."""
    return dtype.removeprefix(_PREFIX).upper() if dtype.startswith(_PREFIX) else None


class GGUFLinear(LinearMethod):
    """Parts of O in the order of their rows: buffers ``packed_0``, ``packed_1`` ... uint8 [R, bytes of a row].

    A layer with a part that no block type here describes is unpacked when loading ends: ``weight`` is then dense, and
    ``on_dense`` is told why.
    """

    def __init__(self, device: torch.device, on_dense: Callable[[str], None], *, int8_activations: bool) -> None:
        self._device = device
        self._on_dense = on_dense
        self._int8_activations = int8_activations
        self._loaded: dict[int, tuple[str, torch.Tensor]] = {}
        self._kinds: list[BlockType] = []
        self._is_dense = False

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        self._shape = shape
        self._dtype: torch.dtype = getattr(torch, shape.dtype)
        # What the file's tensors are loaded under; blocks have no place in a matrix.
        self._set_weight(layer, torch.empty(0, dtype=torch.uint8))

    def load_packed(self, layer: torch.nn.Module, parameter: str, placement: Placement, tensor: WeightTensor) -> None:
        """See ``PackedLinearMethod``. Raises ``ModelFormatError`` where the blocks are not as many as the shape says,
        ``ConfigError`` where ranks would cut through a block."""
        del parameter
        name = block_name(tensor.dtype)
        if name is None or name not in BLOCK_TYPES:
            if tensor.dequantize is None:
                raise ModelFormatError(f"tensor {tensor.name!r} is stored as {tensor.dtype!r}, which nothing unpacks")
            dense = shared_tensor(tensor.dequantize()).reshape(tensor.shape)
            self._keep(placement, name or tensor.dtype, placement.source(dense).to(self._dtype))
            return
        kind = BLOCK_TYPES[name]
        _check(tensor, kind)
        self._keep(placement, name, _share(placement, kind, shared_tensor(tensor.data), tensor.name))

    def load_dense(self, layer: torch.nn.Module, placement: Placement, values: torch.Tensor) -> None:
        """See ``StreamingLinearMethod``."""
        del layer
        self._keep(placement, str(values.dtype).removeprefix("torch."), values.to(self._dtype))

    def _keep(self, placement: Placement, kind: str, rows: torch.Tensor) -> None:
        first = placement.target_start if placement.dim == 0 else 0
        self._loaded[first] = (kind, rows.to(self._device))

    def process_after_loading(self, layer: torch.nn.Module) -> None:
        if not self._loaded:
            return
        parts = [self._loaded[first] for first in sorted(self._loaded)]
        self._loaded = {}
        unknown = sorted({kind for kind, _ in parts if kind not in BLOCK_TYPES})
        self._is_dense = bool(unknown)
        if unknown:
            self._on_dense(f"stored as {', '.join(unknown)}, which no packed form is kept of")
            dense = [data if kind in unknown else decode_rows(BLOCK_TYPES[kind], data) for kind, data in parts]
            self._set_weight(layer, self._filled_up([rows.to(self._dtype) for rows in dense]))
            return
        self._kinds = [BLOCK_TYPES[kind] for kind, _ in parts]
        rows = [data for _, data in parts]
        if sum(map(len, rows)) < self._shape.output_size:
            rows[-1] = self._filled_up([rows[-1]], self._shape.output_size - sum(map(len, rows[:-1])))
        for index, data in enumerate(rows):
            layer.register_buffer(f"packed_{index}", data, persistent=False)

    def _filled_up(self, parts: list[torch.Tensor], num_rows: int | None = None) -> torch.Tensor:
        """One tensor of ``parts`` with zeros behind, which mean zeros in every block type: the rows that only fill up
        a rank's share of a vocabulary."""
        missing = (num_rows or self._shape.output_size) - sum(map(len, parts))
        return torch.cat((*parts, parts[0].new_zeros(missing, parts[0].shape[1])))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        if self._is_dense:
            return torch.nn.functional.linear(x, layer.get_parameter("weight"), bias)
        size = self._shape.output_size
        return product_of_pieces(x, self._pieces(layer), bias, size, int8_activations=self._int8_activations)

    def _pieces(self, layer: torch.nn.Module) -> Iterator[torch.Tensor]:
        step = max(1, CHUNK_WEIGHTS // self._shape.input_size)
        for part in self.parts(layer):
            for first in range(0, len(part.data), step):
                yield decode_rows(BLOCK_TYPES[part.type_name], part.data[first : first + step])

    def look_up(self, layer: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """See ``TableLinearMethod``."""
        if self._is_dense:
            return torch.embedding(layer.get_parameter("weight"), rows)
        (part,) = self.parts(layer)
        return decode_rows(BLOCK_TYPES[part.type_name], part.data[rows]).to(self._dtype)

    def parts(self, layer: torch.nn.Module) -> tuple[GGUFPart, ...]:
        """What is kept, in the order of the outputs. Raises ``RuntimeError`` when nothing is."""
        if not self._kinds:
            raise RuntimeError("the layer keeps no blocks: it is not loaded yet, or was released to a kernel")
        return tuple(GGUFPart(kind.name, layer.get_buffer(f"packed_{index}")) for index, kind in enumerate(self._kinds))

    def stored(self, layer: torch.nn.Module) -> GGUFWeight | DenseWeight:
        """See ``StoredLinearMethod``."""
        if self._is_dense and layer.get_parameter("weight").numel():
            return DenseWeight(layer.get_parameter("weight"))
        return GGUFWeight(self.parts(layer), self._shape.input_size, self._int8_activations)

    def release(self, layer: torch.nn.Module) -> None:
        """See ``StoredLinearMethod``."""
        for index in range(len(self._kinds)):
            layer.register_buffer(f"packed_{index}", None)
        self._kinds = []
        self._set_weight(layer, torch.empty(0, dtype=torch.uint8))

    def _set_weight(self, layer: torch.nn.Module, weight: torch.Tensor) -> None:
        layer.register_parameter("weight", torch.nn.Parameter(weight.to(self._device), requires_grad=False))


def _check(tensor: WeightTensor, kind: BlockType) -> None:
    """Loaders check files; this keeps a wrong one from being read beyond its end."""
    expected = (tensor.shape[0], kind.row_bytes(tensor.shape[-1]))
    given = tuple(tensor.data.shape)
    is_whole = len(tensor.shape) == 2 and tensor.shape[1] % kind.num_weights == 0
    if not is_whole or given != expected or tensor.data.dtype != "uint8":
        raise ModelFormatError(
            f"tensor {tensor.name!r} of shape {list(tensor.shape)} in {kind.name} should come as bytes "
            f"{list(expected)}, but came as {tensor.data.dtype} {list(given)}; download the file again"
        )


def _share(placement: Placement, kind: BlockType, data: torch.Tensor, name: str) -> torch.Tensor:
    """This rank's part of the rows, or of every row. Whole rows stay where they are."""
    if placement.dim == 0:
        return placement.source(data)
    if placement.source_start % kind.num_weights or placement.length % kind.num_weights:
        raise ConfigError(
            f"tensor {name!r} has rows of {placement.stored_shape[1]} weights in blocks of {kind.num_weights} "
            f"({kind.name}), which cannot be divided into shares of {placement.length}; choose a smaller "
            "--tensor-parallel-size, or leave --quantization unset"
        )
    first, length = kind.row_bytes(placement.source_start), kind.row_bytes(placement.length)
    return data[:, first : first + length].contiguous()

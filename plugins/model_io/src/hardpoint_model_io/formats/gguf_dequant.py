"""Packed GGUF blocks to float32, a bounded piece at a time."""

from __future__ import annotations

import numpy as np

from hardpoint_model_io.formats.gguf_types import TensorType

CHUNK_ELEMENTS = 1 << 16
"""Elements unpacked at once; temporaries take a few times four bytes of each, and all of them should stay in a core's
cache: with pieces that do not, unpacking takes twice as long."""


def dequantize(raw: np.ndarray, kind: TensorType, shape: tuple[int, ...]) -> np.ndarray:
    """float32 array of ``shape`` from ``raw``, uint8 ``[..., bytes per row]``, C-contiguous."""
    # Slow to import, and unneeded in processes that never touch packed weights.
    from gguf.constants import GGMLQuantizationType
    from gguf.quants import dequantize as unpack

    quant_type = GGMLQuantizationType(kind.number)
    flat = raw.reshape(-1)
    out = np.empty(shape, dtype=np.float32)
    target = out.reshape(-1)
    chunk = CHUNK_ELEMENTS // kind.block_size
    num_blocks = target.size // kind.block_size
    # Scales in corrupt files may be infinite or NaN; what they give is still well defined.
    with np.errstate(all="ignore"):
        for first in range(0, num_blocks, chunk):
            last = min(first + chunk, num_blocks)
            # One row per call: the library would otherwise split the work into groups of sixteen rows.
            piece = flat[first * kind.block_bytes : last * kind.block_bytes].reshape(1, -1)
            target[first * kind.block_size : last * kind.block_size] = unpack(piece, quant_type).reshape(-1)
    return out

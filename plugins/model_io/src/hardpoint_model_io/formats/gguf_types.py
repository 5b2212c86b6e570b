"""Tensor storage types of GGUF files: block geometry and names."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.errors import UnsupportedModelError


@dataclass(frozen=True, slots=True)
class TensorType:
    """``block_size`` elements of a row are stored together in ``block_bytes`` bytes.

    ``is_packed`` types need dequantization; the others are plain arrays.
    """

    number: int
    name: str
    block_size: int
    block_bytes: int

    @property
    def is_packed(self) -> bool:
        return self.block_size > 1

    @property
    def storage_name(self) -> str:
        """Open-set dtype name used in ``WeightTensor.dtype`` and ``ModelInfo.dtype``."""
        return _PLAIN_NAMES.get(self.name, f"gguf.{self.name.lower()}")


_PLAIN_NAMES = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}

SUPPORTED_TYPES = (
    TensorType(0, "F32", 1, 4),
    TensorType(1, "F16", 1, 2),
    TensorType(2, "Q4_0", 32, 18),
    TensorType(3, "Q4_1", 32, 20),
    TensorType(6, "Q5_0", 32, 22),
    TensorType(7, "Q5_1", 32, 24),
    TensorType(8, "Q8_0", 32, 34),
    TensorType(12, "Q4_K", 256, 144),
    TensorType(13, "Q5_K", 256, 176),
    TensorType(14, "Q6_K", 256, 210),
    TensorType(30, "BF16", 1, 2),
)
_BY_NUMBER = {kind.number: kind for kind in SUPPORTED_TYPES}

# Only for messages: types that exist and are not read here.
_OTHER_NAMES = {
    9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S",
    20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64",
    29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


def tensor_type(number: int, tensor: str, path: str) -> TensorType:
    """The type with this number. Raises ``UnsupportedModelError`` naming tensor and type."""
    kind = _BY_NUMBER.get(number)
    if kind is None:
        given = _OTHER_NAMES.get(number, f"number {number}")
        allowed = ", ".join(kind.name for kind in SUPPORTED_TYPES)
        raise UnsupportedModelError(
            f"{path}: tensor {tensor!r} is stored as GGUF type {given}, which is not supported; "
            f"use a file with one of {allowed}"
        )
    return kind

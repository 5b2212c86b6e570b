"""Blocks of GGUF files in torch: what their bytes mean, bit for bit as other readers of the format have it.

Legend: N blocks, B weights of a block, R rows, I input size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

__all__ = ["BLOCK_TYPES", "BlockType", "decode_rows"]


@dataclass(frozen=True, slots=True)
class BlockType:
    """``num_weights`` weights of a row in ``num_bytes`` bytes; ``decode`` takes uint8 [N, bytes] to float32 [N, B]."""

    name: str
    num_weights: int
    num_bytes: int
    decode: Callable[[torch.Tensor], torch.Tensor]

    def row_bytes(self, num_inputs: int) -> int:
        """Bytes of a row of ``num_inputs`` weights, whole blocks."""
        return num_inputs // self.num_weights * self.num_bytes


def decode_rows(kind: BlockType, data: torch.Tensor) -> torch.Tensor:
    """float32 [R, I] of rows of blocks, uint8 [R, bytes of a row]."""
    return kind.decode(data.reshape(-1, kind.num_bytes)).reshape(len(data), -1)


def _half(blocks: torch.Tensor, at: int) -> torch.Tensor:
    """float32 [N, 1] of the half at byte ``at``."""
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: torch.Tensor) -> torch.Tensor:
    """[..., n] bytes to [..., 2 n]: all low four bits before all high ones."""
    return torch.cat((packed & 15, packed >> 4), dim=-1)


def _q4_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 2:]).to(torch.int8) - 8)


def _q4_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * _nibbles(blocks[:, 4:]) + _half(blocks, 2)


def _fifth_bits(packed: torch.Tensor) -> torch.Tensor:
    """[N, n] bytes to [N, 8 n], each bit as 16: what a number has above its nibble."""
    bits = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return (packed.unsqueeze(2).bitwise_right_shift(bits) & 1).flatten(1) << 4


def _q5_0(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _half(blocks, 0) * (numbers.to(torch.int8) - 16)


def _q5_1(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * (_nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])) + _half(blocks, 2)


def _q8_0(blocks: torch.Tensor) -> torch.Tensor:
    return _half(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8)


def _eight_groups(blocks: torch.Tensor, numbers: torch.Tensor) -> torch.Tensor:
    """float32 [N, 256] of numbers [N, 8, 32]. Scales and minimums of the groups have six bits each, spread over twelve
    bytes."""
    low, middle, high = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((low & 63, (high & 15) | (low >> 6) << 4), dim=1)
    minimums = torch.cat((middle & 63, (high >> 4) | (middle >> 6) << 4), dim=1)
    steps, offsets = _half(blocks, 0) * scales, _half(blocks, 2) * minimums
    return (steps.unsqueeze(2) * numbers - offsets.unsqueeze(2)).flatten(1)


def _q4_k(blocks: torch.Tensor) -> torch.Tensor:
    numbers = _nibbles(blocks[:, 16:].unflatten(1, (4, 32))).unflatten(2, (2, 32)).flatten(1, 2)
    return _eight_groups(blocks, numbers)


def _q5_k(blocks: torch.Tensor) -> torch.Tensor:
    """Bit g of the byte i of 32 belongs to number i of group g."""
    numbers = _nibbles(blocks[:, 48:].unflatten(1, (4, 32))).unflatten(2, (2, 32)).flatten(1, 2)
    shifts = torch.arange(8, dtype=torch.uint8, device=blocks.device).view(1, 8, 1)
    fifth = (blocks[:, 16:48].unsqueeze(1).bitwise_right_shift(shifts) & 1) << 4
    return _eight_groups(blocks, numbers | fifth)


def _q6_k(blocks: torch.Tensor) -> torch.Tensor:
    """Sixteen groups of 16 with a signed byte as scale; of each number four bits and two bits lie apart."""
    low = _nibbles(blocks[:, :128].unflatten(1, (2, 64))).unflatten(2, (4, 32))
    shifts = torch.tensor([0, 2, 4, 6], dtype=torch.uint8, device=blocks.device).view(1, 1, 4, 1)
    high = blocks[:, 128:192].unflatten(1, (2, 1, 32)).bitwise_right_shift(shifts) & 3
    numbers = (low | high << 4).to(torch.int8).flatten(1) - 32
    scales = _half(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8)
    return (scales.unsqueeze(2) * numbers.unflatten(1, (16, 16))).flatten(1)


BLOCK_TYPES: Mapping[str, BlockType] = MappingProxyType(
    {
        kind.name: kind
        for kind in (
            BlockType("Q4_0", 32, 18, _q4_0),
            BlockType("Q4_1", 32, 20, _q4_1),
            BlockType("Q5_0", 32, 22, _q5_0),
            BlockType("Q5_1", 32, 24, _q5_1),
            BlockType("Q8_0", 32, 34, _q8_0),
            BlockType("Q4_K", 256, 144, _q4_k),
            BlockType("Q5_K", 256, 176, _q5_k),
            BlockType("Q6_K", 256, 210, _q6_k),
        )
    }
)
"""What is kept as it is, by name."""

"""8-bit floats by integer arithmetic, for Triton kernels on devices without the conversion, and for its interpreter.

Importing this module imports Triton, which is the dependency of those who write kernels.

An element has a sign, ``7 - MANTISSA`` bits of exponent and MANTISSA bits behind the leading one: 3 are float8_e4m3fn,
2 are float8_e5m2. Formats: Micikevicius et al., "FP8 Formats for Deep Learning" (2022).
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["decode_e4m3", "encode_float8"]

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_INFINITY = tl.constexpr(0x7F800000)
_WHOLE = tl.constexpr(12582912.0)
_WHOLE_BITS = tl.constexpr(0x4B400000)
"""1.5 * 2 ** 23: between it and 2 ** 24 float32 holds whole numbers only, so that adding to it rounds to one."""


@triton.jit
def encode_float8(values: tl.tensor, MANTISSA: tl.constexpr) -> tl.tensor:
    """uint8 codes of float32 ``values``, rounded to nearest, halves to even. What is too large becomes the largest
    finite value of its sign, infinity too; what is no number stays none."""
    SHIFT: tl.constexpr = 23 - MANTISSA
    BIAS: tl.constexpr = (1 << (6 - MANTISSA)) - 1
    # 1.75 * 2 ** 8, beyond which there is only the code that is no number; 1.75 * 2 ** 15, beyond which is infinity.
    LARGEST: tl.constexpr = 0x43E00000 if MANTISSA == 3 else 0x47600000
    bits = values.to(tl.float32).to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE
    is_number = magnitude <= _INFINITY
    magnitude = tl.minimum(magnitude, LARGEST)
    carried = magnitude + ((1 << (SHIFT - 1)) - 1) + ((magnitude >> SHIFT) & 1)
    normal = (carried >> SHIFT) - ((127 - BIAS) << MANTISSA)
    # Below the least exponent the steps are all of its size.
    steps = magnitude.to(tl.float32, bitcast=True) * (1 << (BIAS - 1 + MANTISSA))
    subnormal = (steps + _WHOLE).to(tl.int32, bitcast=True) - _WHOLE_BITS
    code = tl.where(magnitude < ((128 - BIAS) << 23), subnormal, normal)
    return (tl.where(is_number, code, 0x7F) | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def decode_e4m3(codes: tl.tensor) -> tl.tensor:
    """float16 values of uint8 codes of float8_e4m3fn, all of them exact.

    Moved into place the code is a float16 that is too small by the difference of the exponents' biases.
    """
    bits = codes.to(tl.int16)
    moved = ((bits & 0x80) << 8) | ((bits & 0x7F) << 7)
    values = moved.to(tl.float16, bitcast=True) * 256.0
    return tl.where((bits & 0x7F) == 0x7F, float("nan"), values).to(tl.float16)

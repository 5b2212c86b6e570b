"""8-bit floats by integer arithmetic are torch's, bit for bit. Interpreted; the tables of kernels show it compiled."""

from __future__ import annotations

import os

# Before anything imports Triton.
os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from hardpoint_torch_runtime.float8_kernels import decode_e4m3, encode_float8
from hardpoint_torch_runtime.float8_support import converts_e4m3

# The interpreter computes with numpy, which remarks on what devices just round to infinity.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

FORMATS = pytest.mark.parametrize(
    ("dtype", "mantissa"), [(torch.float8_e4m3fn, 3), (torch.float8_e5m2, 2)], ids=["e4m3", "e5m2"]
)


@triton.jit
def encode_kernel(
    source: tl.tensor, target: tl.tensor, size: tl.tensor, MANTISSA: tl.constexpr, N: tl.constexpr
) -> None:
    place = tl.program_id(0) * N + tl.arange(0, N)
    values = tl.load(source + place, mask=place < size, other=0.0)
    tl.store(target + place, encode_float8(values, MANTISSA), mask=place < size)


@triton.jit
def decode_kernel(source: tl.tensor, target: tl.tensor, N: tl.constexpr) -> None:
    place = tl.arange(0, N)
    tl.store(target + place, decode_e4m3(tl.load(source + place)))


def encoded(values: torch.Tensor, mantissa: int) -> torch.Tensor:
    target = torch.full(values.shape, 0xAA, dtype=torch.uint8)
    block = triton.next_power_of_2(len(values))
    encode_kernel[(1,)](values, target, len(values), MANTISSA=mantissa, N=block)
    return target


def check(values: torch.Tensor, dtype: torch.dtype, mantissa: int) -> None:
    """torch makes too large numbers into none, or infinite; here they become the largest, as a cache wants."""
    largest = torch.finfo(dtype).max
    expected = values.float().clamp(-largest, largest).to(dtype).view(torch.uint8)
    found = encoded(values, mantissa)
    wrong = (found != expected).nonzero().flatten()
    assert not len(wrong), [(float(values[at]), int(found[at]), int(expected[at])) for at in wrong[:9]]


@FORMATS
@pytest.mark.parametrize("source", [torch.float16, torch.bfloat16])
def test_all_values_of_16_bits(source: torch.dtype, dtype: torch.dtype, mantissa: int) -> None:
    """Infinities, numbers that are none, both zeros and subnormal ones of the source among them."""
    check(torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(source), dtype, mantissa)


@FORMATS
def test_values_of_32_bits(dtype: torch.dtype, mantissa: int) -> None:
    """Any bits; and around each value of the format, and around each middle of two, where rounding turns."""
    generator = torch.Generator().manual_seed(0)
    anything = torch.randint(-(1 << 31), 1 << 31, (1 << 17,), generator=generator).to(torch.int32).view(torch.float32)
    check(anything, dtype, mantissa)
    check(
        torch.randn(1 << 16, generator=generator) * 2.0 ** torch.randint(-18, 18, (1 << 16,), generator=generator),
        dtype,
        mantissa,
    )
    codes = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    known = codes[codes.isfinite()].sort().values
    turns = torch.cat((known, (known[1:] + known[:-1]) / 2))
    near = torch.cat([turns.nextafter(torch.tensor(way)) for way in (torch.inf, -torch.inf)])
    check(torch.cat((turns, near, 1.0625 * known[[0, -1]])), dtype, mantissa)


@FORMATS
def test_what_is_written_out(dtype: torch.dtype, mantissa: int) -> None:
    """Not by torch's word alone: the largest value, a tie to the even, the least value and half of it, and none."""
    written = {3: [448.0, 464.0, 1e9, 17.0, 19.0, 2**-9, 2**-10], 2: [57344.0, 61440.0, 1e9, 9.0, 11.0, 2**-16, 2**-17]}
    codes = {3: [0x7E, 0x7E, 0x7E, 0x58, 0x5A, 0x01, 0x00], 2: [0x7B, 0x7B, 0x7B, 0x48, 0x4A, 0x01, 0x00]}
    values = torch.tensor(written[mantissa])
    assert encoded(values, mantissa).tolist() == codes[mantissa]
    assert encoded(-values, mantissa).tolist() == [code | 0x80 for code in codes[mantissa]]
    assert encoded(torch.tensor([torch.nan, torch.inf, -torch.inf]), mantissa).tolist() == [
        0x7F,
        codes[mantissa][0],
        codes[mantissa][0] | 0x80,
    ]


def test_all_codes_are_read() -> None:
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    found = torch.zeros(256, dtype=torch.float16)
    decode_kernel[(1,)](codes, found, N=256)
    expected = codes.view(torch.float8_e4m3fn).to(torch.float16)
    assert torch.equal(found.isnan(), expected.isnan())
    assert int(found.isnan().sum()) == 2
    kept = ~expected.isnan()
    assert torch.equal(found[kept].view(torch.int16), expected[kept].view(torch.int16)), "both zeros among them"


@pytest.mark.parametrize(
    ("capability", "is_hip", "answer"),
    [
        ((8, 0), False, False),
        ((8, 6), False, False),
        ((8, 9), False, True),
        ((9, 0), False, True),
        ((12, 0), False, True),
        ((9, 4), True, True),
        (None, False, False),
    ],
)
def test_which_devices_convert(capability: tuple[int, int] | None, is_hip: bool, answer: bool) -> None:
    assert converts_e4m3(capability, is_hip=is_hip) is answer

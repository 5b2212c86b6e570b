"""Kernels that compute row by row against plain float64, over shapes, layouts and dtypes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

pytest.importorskip("triton")

from hardpoint_triton_kernels.kernels.activation import ACTIVATIONS, act_and_mul
from hardpoint_triton_kernels.kernels.common import RowTile, ceil_div, flat_rows, next_power_of_two, row_tile
from hardpoint_triton_kernels.kernels.norm import add_rms_norm, rms_norm
from hardpoint_triton_kernels.kernels.quantize import quantize_fp8, quantize_int8
from hardpoint_triton_kernels.kernels.rotary import rotary_embedding, rotate_neighbors

# The interpreter computes with numpy, which remarks on what devices just round to infinity or to no number.
pytestmark = pytest.mark.filterwarnings("ignore:(overflow|invalid value) encountered:RuntimeWarning")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""Of values of order one: half a unit in the last place, and a whole one where the interpreter truncates."""

EACH_DTYPE = pytest.mark.parametrize("dtype", TOLERANCE, ids=lambda dtype: str(dtype).removeprefix("torch."))


def normal(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + sum(shape))).to(dtype)


def close(found: torch.Tensor, exact: torch.Tensor, dtype: torch.dtype, scale: float = 1.0) -> None:
    assert found.dtype == dtype
    tolerance = TOLERANCE[dtype]
    torch.testing.assert_close(found.double(), exact, rtol=tolerance * scale, atol=tolerance * scale)


GATED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@pytest.mark.slow
@EACH_DTYPE
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_gated_activations(name: str, dtype: torch.dtype) -> None:
    for shape in ((0, 8), (1, 2), (3, 38), (2, 3, 130), (2, 2100)):
        gate_up = normal(*shape, dtype=dtype) * 3
        gate, up = gate_up.double().chunk(2, dim=-1)
        close(act_and_mul(gate_up, name), GATED[name](gate) * up, dtype, scale=2)
    wide = normal(5, 4, 24, dtype=dtype)
    gate, up = wide[:, 1].double().chunk(2, dim=-1)
    close(act_and_mul(wide[:, 1], name), GATED[name](gate) * up, dtype, scale=2)


def test_an_unknown_activation_is_named_with_those_there_are() -> None:
    with pytest.raises(ValueError, match="'relu' has no kernel; there are: silu, gelu_tanh, gelu"):
        act_and_mul(torch.zeros(1, 2), "relu")


def exact_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    x = x.double()
    return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()


@pytest.mark.slow
@EACH_DTYPE
def test_norms(dtype: torch.dtype) -> None:
    """One pass and several, heads of a fused projection, rows of a wider tensor."""
    for shape in ((0, 16), (1, 1), (7, 33), (2, 3, 4, 64), (2, 9000)):
        x, weight = normal(*shape, dtype=dtype), normal(shape[-1], dtype=dtype)
        close(rms_norm(x, weight, 1e-6), exact_norm(x, weight, 1e-6), dtype, scale=4)
    fused = normal(5, 7, 48, dtype=dtype)
    for view in (fused[:, 2:5], fused[..., 8:40], fused.transpose(0, 1), fused[..., ::2]):
        weight = normal(view.shape[-1], dtype=dtype)
        close(rms_norm(view, weight, 1e-5), exact_norm(view, weight, 1e-5), dtype, scale=4)


@pytest.mark.slow
@EACH_DTYPE
def test_norms_of_a_sum_keep_the_sum(dtype: torch.dtype) -> None:
    for rows, size in ((0, 16), (1, 5), (6, 96), (2, 9000)):
        wide = normal(rows, size + 3, dtype=dtype)
        x, residual, weight = wide[:, :size], normal(rows, size, dtype=dtype, seed=1), normal(size, dtype=dtype)
        exact = x.double() + residual.double()
        normed, total = add_rms_norm(x, residual, weight, 1e-6)
        assert total is residual
        close(total, exact, dtype, scale=4)
        close(normed, exact_norm(total, weight, 1e-6), dtype, scale=4)


def test_a_residual_in_another_layout_is_refused() -> None:
    with pytest.raises(ValueError, match="residual's rows must be contiguous"):
        add_rms_norm(torch.zeros(2, 4), torch.zeros(4, 2).T, torch.ones(4), 1e-6)


@pytest.mark.slow
@EACH_DTYPE
@pytest.mark.parametrize("neighbors", [False, True], ids=["halves", "neighbors"])
def test_rotations(neighbors: bool, dtype: torch.dtype) -> None:
    """Whole heads and parts of them, in both pairings, in place and nowhere else."""
    for tokens, heads, size, rotated in ((0, 2, 8, 8), (1, 1, 2, 2), (3, 5, 24, 10), (2, 40, 64, 64)):
        angles = normal(tokens, rotated // 2).double() * 10
        wide = normal(tokens, heads + 2, size, dtype=dtype)
        before = wide.clone()
        if neighbors:
            cos, sin = angles.cos().repeat_interleave(2, -1), torch.stack((-angles.sin(), angles.sin()), -1).flatten(1)
        else:
            cos, sin = angles.cos().repeat(1, 2), torch.cat((-angles.sin(), angles.sin()), -1)
        factors = (cos.float().unsqueeze(1), sin.float().unsqueeze(1))
        (rotate_neighbors if neighbors else rotary_embedding)(wide[:, 1 : heads + 1], *factors, rotated)
        x, y = _paired(before[:, 1 : heads + 1, :rotated].double(), neighbors).unbind(-1)
        c, s = angles.cos().unsqueeze(1), angles.sin().unsqueeze(1)
        turned = torch.stack((x * c - y * s, x * s + y * c), -1)
        close(_paired(wide[:, 1 : heads + 1, :rotated], neighbors), turned, dtype, scale=4)
        wide[:, 1 : heads + 1, :rotated] = before[:, 1 : heads + 1, :rotated]
        assert torch.equal(wide, before), "only the rotated part of the heads changes"


def _paired(values: torch.Tensor, neighbors: bool) -> torch.Tensor:
    """[..., R] as pairs [..., R/2, 2]."""
    return values.unflatten(-1, (-1, 2)) if neighbors else values.unflatten(-1, (2, -1)).transpose(-1, -2)


def expected_rows(x: torch.Tensor, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Scaled values before rounding, and scales, by the rule that quantization methods use."""
    exact = x.float()
    scales = exact.abs().amax(-1) / largest
    return exact / torch.where(scales > 0, scales, 1.0).unsqueeze(-1), scales


@pytest.mark.slow
@EACH_DTYPE
def test_int8_rows(dtype: torch.dtype) -> None:
    """Bit by bit what the quantization method rounds to, zeros and ties included."""
    for shape in ((0, 8), (1, 1), (5, 33), (2, 3, 40), (2, 9000)):
        x = normal(*shape, dtype=dtype)
        scaled, scales = expected_rows(x, 127)
        values, found = quantize_int8(x)
        assert torch.equal(found, scales)
        assert torch.equal(values, scaled.round().clamp(-127, 127).to(torch.int8))
    halves = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5], [0.0] * 6], dtype=dtype)
    values, found = quantize_int8(halves)
    assert values.tolist() == [[127, 0, 2, 2, 0, -2], [0] * 6]
    assert found.tolist() == [1.0, 0.0]


@pytest.mark.slow
@EACH_DTYPE
def test_fp8_rows(dtype: torch.dtype) -> None:
    for shape in ((0, 8), (1, 1), (5, 33), (2, 9000)):
        x = normal(*shape, dtype=dtype)
        scaled, scales = expected_rows(x, 448)
        values, found = quantize_fp8(x)
        assert values.dtype == torch.float8_e4m3fn
        assert torch.equal(found, scales)
        assert torch.equal(values.float(), scaled.clamp(-448, 448).to(torch.float8_e4m3fn).float())


def test_tiles_follow_from_the_width_alone() -> None:
    """What makes rows independent of their batch: no size of a tile asks how many rows there are."""
    assert row_tile(1) == RowTile(1024, 1, 2)
    assert row_tile(128) == RowTile(8, 128, 2)
    assert row_tile(4096) == RowTile(1, 4096, 8)
    assert row_tile(100_000) == RowTile(1, 8192, 16)
    assert [next_power_of_two(size) for size in (0, 1, 2, 3, 1025)] == [1, 1, 2, 4, 2048]
    assert [ceil_div(*pair) for pair in ((0, 3), (3, 3), (4, 3))] == [0, 1, 2]


def test_rows_stay_where_they_are_if_they_can() -> None:
    x = torch.zeros(4, 3, 8)
    assert flat_rows(x).data_ptr() == x.data_ptr()
    assert flat_rows(x[:, 0]).stride() == (24, 1)
    assert flat_rows(x.transpose(1, 2)).is_contiguous()
    assert flat_rows(torch.zeros(8)).shape == (1, 8)
    assert flat_rows(torch.zeros(0, 5)).shape == (0, 5)

"""The edge between Python and the kernels: what is refused, pools of several sizes, and callers at once."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch

from hardpoint_cpu.native.levels import LEVELS
from hardpoint_cpu.native.library import NativeLibrary


def test_tensors_that_do_not_fit_are_refused(best_native: NativeLibrary) -> None:
    weight = torch.randn(5, 7)
    for wrong in (weight.double(), weight[0], weight.t(), weight.to("meta")):
        with pytest.raises(ValueError, match=r"weight must (be a torch.float32 CPU tensor|have contiguous rows)"):
            best_native.linear_f32(wrong)
    with pytest.raises(ValueError, match=r"bias must be a torch.float32 CPU tensor \[5\], not torch.float32 \[4\]"):
        best_native.linear_f32(weight, torch.zeros(4))
    with pytest.raises(ValueError, match="a linear layer of 7 inputs and 0 outputs is empty"):
        best_native.linear_f32(torch.empty(0, 7))

    layer = best_native.linear_f32(weight)
    for bad in (torch.zeros(2, 6), torch.zeros(7), torch.zeros(2, 7, dtype=torch.bfloat16), torch.zeros(7, 2).t()):
        with pytest.raises(ValueError, match="x must"):
            layer(bad)
    for out in (torch.zeros(2, 4), torch.zeros(2, 5).double(), torch.zeros(5, 2).t()):
        with pytest.raises(ValueError, match="out must"):
            layer(torch.zeros(2, 7), out)
    with pytest.raises(ValueError, match="out has 3 rows, x has 2"):
        layer(torch.zeros(2, 7), torch.zeros(3, 5))
    with pytest.raises(ValueError, match="rows 2 of strides 0 and 5 do not fit a layer of 7 inputs"):
        layer(torch.zeros(1, 7).expand(2, 7))


def test_no_rows_are_no_work(best_native: NativeLibrary) -> None:
    assert best_native.linear_f32(torch.randn(5, 7))(torch.empty(0, 7)).shape == (0, 5)


def test_a_library_knows_its_level_and_refuses_bad_pools(load_native: Callable[..., NativeLibrary]) -> None:
    assert load_native().isa in {level.name for level in LEVELS}
    with pytest.raises(ValueError, match="a pool of 0 threads"):
        load_native(threads=0)


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_pools_of_any_size_give_the_same_bits(load_native: Callable[..., NativeLibrary], threads: int) -> None:
    generator = torch.Generator().manual_seed(0)
    weight, x = torch.randn(100, 33, generator=generator), torch.randn(29, 33, generator=generator)
    expected = load_native()  # two threads
    assert torch.equal(load_native(threads=threads).linear_f32(weight)(x), expected.linear_f32(weight)(x))


def test_callers_at_once_take_turns(best_native: NativeLibrary) -> None:
    layers = [best_native.linear_f32(torch.randn(70 + n, 40)) for n in range(4)]
    inputs = [torch.randn(20, 40) for _ in layers]
    expected = [layer(x) for layer, x in zip(layers, inputs, strict=True)]
    wrong: list[int] = []

    def work(index: int) -> None:
        for _ in range(50):
            if not torch.equal(layers[index](inputs[index]), expected[index]):
                wrong.append(index)

    workers = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert not wrong


def test_a_pool_that_sleeps_between_calls_wakes_up_for_each(load_native: Callable[..., NativeLibrary]) -> None:
    sleepy = load_native(threads=3, spin_us=0)
    layer = sleepy.linear_f32(torch.randn(300, 8))
    x = torch.randn(2, 8)
    expected = layer(x)
    for _ in range(300):
        assert torch.equal(layer(x), expected)

"""The small benchmark of kernels runs, and measures what it says."""

from __future__ import annotations

import pytest
import torch

from hardpoint_cpu.native.bench import KINDS, Measurement, main, measure
from hardpoint_cpu.native.library import NativeLibrary


def test_both_sides_compute_the_same(best_native: NativeLibrary) -> None:
    weight, x = torch.randn(50, 40), torch.randn(3, 40)
    for kind in KINDS:
        ours, theirs = kind.prepare(best_native, weight)
        torch.testing.assert_close(ours(x), theirs(x), rtol=0.05, atol=0.5)


def test_every_combination_is_measured(best_native: NativeLibrary) -> None:
    found = list(measure(best_native, shapes=[(8, 4), (6, 2)], rows=[1, 3], repeats=2, rotated_bytes=1000))
    assert [(one.kind, one.outputs, one.rows) for one in found] == [
        (kind.name, outputs, rows) for kind in KINDS for outputs in (8, 6) for rows in (1, 3)
    ]
    assert all(one.ours > 0 and one.theirs > 0 for one in found)


def test_figures_follow_from_times() -> None:
    one = Measurement("f32", 1000, 500, 10, ours=1e-3, theirs=2e-3, weight_bytes=2e6)
    assert (one.ratio, one.operations) == (2.0, 1e7)
    assert one.line().split() == ["f32", "1000x500", "10", "1000", "2000", "2.00", "10", "2.0"]


@pytest.mark.slow
def test_the_command_prints_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    threads = torch.get_num_threads()
    try:
        assert main(["--repeats", "1", "--rows", "1", "--kinds", "f32", "--rotated-mib", "1", "--threads", "1"]) == 0
    finally:
        torch.set_num_threads(threads)
    lines = capsys.readouterr().out.splitlines()
    assert "1 threads" in lines[0]
    assert len(lines) == 2 + 5

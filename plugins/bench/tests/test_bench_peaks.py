"""What a machine reaches counts only where it computes the right thing."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from hardpoint_bench.sides import PROGRAMS

SPEC = importlib.util.spec_from_file_location("peaks_program", PROGRAMS / "peaks.py")
assert SPEC is not None
assert SPEC.loader is not None
peaks = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(peaks)


@pytest.mark.parametrize("wrong", [torch.zeros(8), torch.full((8,), float("nan")), torch.arange(8.0) * 1.2])
def test_wrong_results_are_no_rate(wrong: torch.Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    exact = torch.arange(8.0)
    with pytest.raises(RuntimeError, match="wrong results"):
        peaks.require_close(wrong, exact, 0.05)
    peaks.require_close(exact * 1.01, exact, 0.05)
    monkeypatch.setattr(peaks, "_SECONDS", 0.0)
    assert peaks.product(lambda size: peaks.require_close(wrong, exact, 0.05)) is None


def test_exact_integers_have_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peaks, "_SECONDS", 0.01)
    monkeypatch.setattr(peaks, "_SIZES", (64,))
    rate = peaks.product(peaks.int8_onednn)
    assert rate is None or rate > 0

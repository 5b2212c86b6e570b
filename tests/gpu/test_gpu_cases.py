"""The tier for real devices, tried on a processor: its cases can be computed, and its page is of its result."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from gpu_cases import BATCHES, SHAPES, installed, problems
from hardpoint_testing_torch.gpu_bench.__main__ import write_page
from hardpoint_testing_torch.gpu_bench.attention import create_backend, largest_error
from workspace import ROOT

CPU = torch.device("cpu")


def test_the_page_is_of_the_result_that_is_kept(tmp_path: Path) -> None:
    write_page(ROOT / "docs/performance/gpu-result.json", tmp_path / "page.md")
    kept = (ROOT / "docs/performance-gpu.md").read_text(encoding="utf-8")
    assert kept == (tmp_path / "page.md").read_text(encoding="utf-8"), "write it again with `make bench-gpu-page`"


def test_the_tier_goes_through_what_is_installed() -> None:
    assert {"torch_reference", "triton", "flash_attn", "flashinfer"} <= set(installed("attention_backend"))
    assert {"triton_rms_norm", "triton_top_k_top_p"} <= set(installed("kernel_override"))


@pytest.mark.slow
@pytest.mark.parametrize("title", SHAPES)
def test_the_reference_answers_every_case(title: str) -> None:
    """R5.47: each case is one that the oracle and a backend agree on; what the reference refuses it would say."""
    backend = create_backend("torch_reference", CPU)
    assert backend.objection(SHAPES[title].need()) is None
    found = problems(SHAPES[title], torch.float32)[:-1]
    assert len(found) == len(BATCHES) - 1
    tolerance = 1e-3 if SHAPES[title].kv_cache_dtype else 2e-5
    assert max(largest_error(backend, problem, CPU) for problem in found) < tolerance

"""The committed table of registers, shared memory and spills is that of the kernels as they are."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from hardpoint_testing_torch.triton_aot import TARGETS, load_cases
from hardpoint_testing_torch.triton_aot_suite import KernelResourceSuite, stale_cases
from hardpoint_testing_torch.triton_aot_table import ResourceTable

pytest.importorskip("triton")

HERE = Path(__file__).parent
CASES = f"{HERE / 'triton_kernels_cases.py'}:kernel_cases"
TABLE = HERE.parent / "kernel_resources.json"


def test_the_table_is_in_step() -> None:
    """Without compiling: hashes only."""
    assert stale_cases(CASES, TABLE) == [], (
        "run python -m hardpoint_testing_torch.triton_aot plugins/triton_kernels/tests/triton_kernels_cases.py:"
        "kernel_cases --write plugins/triton_kernels/kernel_resources.json"
    )


def test_nothing_spills_on_any_target() -> None:
    """The budget is zero for every kernel here, and all but 8-bit floats are compiled for all targets."""
    assert all(case.spill_budget == 0 for case in load_cases(CASES))
    rows = ResourceTable.read(TABLE).rows
    assert all(row.spill_bytes == 0 for targets in rows.values() for row in targets.values())
    without_some = {name for name, targets in rows.items() if set(targets) != set(TARGETS)}
    assert without_some == {name for name in rows if name.startswith("quantize_fp8")}


@pytest.mark.slow
class TestResources(KernelResourceSuite):
    provider: ClassVar[str] = CASES
    table: ClassVar[Path] = TABLE

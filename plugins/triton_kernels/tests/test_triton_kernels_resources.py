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
    """The budget is zero for every kernel here, and all are compiled for all targets: where there are no 8-bit floats,
    for their codes."""
    assert all(case.spill_budget == 0 for case in load_cases(CASES))
    rows = ResourceTable.read(TABLE).rows
    assert all(row.spill_bytes == 0 for targets in rows.values() for row in targets.values())
    for name, targets in rows.items():
        compiled = set(targets)
        if name.startswith("quantize_fp8"):
            assert ("sm_80" in compiled) == name.startswith("quantize_fp8_codes")
            compiled |= set(rows[name.replace("fp8_codes[", "fp8[")]) | set(rows[name.replace("fp8[", "fp8_codes[")])
        assert compiled == set(TARGETS), name


@pytest.mark.slow
class TestResources(KernelResourceSuite):
    provider: ClassVar[str] = CASES
    table: ClassVar[Path] = TABLE

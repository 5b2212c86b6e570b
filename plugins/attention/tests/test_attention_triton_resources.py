"""All of attention's Triton kernels compile for all targets, and use what the committed table says."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from hardpoint_testing_torch.triton_aot import TARGETS, load_cases
from hardpoint_testing_torch.triton_aot_suite import KernelResourceSuite, stale_cases
from hardpoint_testing_torch.triton_aot_table import ResourceTable

pytest.importorskip("triton")

HERE = Path(__file__).parent
CASES = f"{HERE / 'attention_kernel_cases.py'}:kernel_cases"
TABLE = HERE / "attention_kernel_resources.json"


def test_the_table_is_in_step() -> None:
    """Without compiling: hashes only."""
    assert stale_cases(CASES, TABLE) == [], (
        "run python -m hardpoint_testing_torch.triton_aot plugins/attention/tests/attention_kernel_cases.py:"
        "kernel_cases --write plugins/attention/tests/attention_kernel_resources.json"
    )


def test_no_row_of_the_table_exceeds_its_budget_or_its_device() -> None:
    """Plain attention, which most layers ask for, keeps next to nothing in memory."""
    rows = ResourceTable.read(TABLE).rows
    for case in load_cases(CASES):
        for name, row in rows[case.name].items():
            assert row.spill_bytes <= case.spill_budget <= 48, (case.name, name)
            assert row.shared_bytes <= TARGETS[name].shared_limit, (case.name, name)
            if case.name.startswith("attend[plain"):
                assert case.spill_budget <= 16


# Twenty processor minutes where nothing is in the cache; other tests may have one of two cores meanwhile.
@pytest.mark.slow
@pytest.mark.timeout(1800)
class TestResources(KernelResourceSuite):
    provider: ClassVar[str] = CASES
    table: ClassVar[Path] = TABLE

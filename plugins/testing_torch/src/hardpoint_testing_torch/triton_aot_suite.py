"""Holds a distribution's Triton kernels to its committed table: derive from :class:`KernelResourceSuite`."""

from __future__ import annotations

from pathlib import Path
from typing import ClassVar

import pytest

from hardpoint_testing_torch.triton_aot import load_cases
from hardpoint_testing_torch.triton_aot_check import compile_all
from hardpoint_testing_torch.triton_aot_table import ResourceTable, stale_rows

__all__ = ["KernelResourceSuite", "stale_cases"]


def stale_cases(provider: str, table: Path) -> list[str]:
    """Cases of ``provider`` that are not those of the committed ``table``, found without compiling anything."""
    import triton

    from hardpoint_testing_torch.triton_aot_hash import case_hashes

    return stale_rows(ResourceTable.read(table), triton.__version__, case_hashes(load_cases(provider)))


class KernelResourceSuite:
    """Skipped where Triton is not installed. Compiling takes about a second for each case and target, once: results
    are kept in the user's cache folder by what they depend on."""

    provider: ClassVar[str]
    """``package.module:function`` or ``folder/file.py:function`` that returns the cases."""

    table: ClassVar[Path]
    """The committed file, written by ``python -m hardpoint_testing_torch.triton_aot PROVIDER --write FILE``."""

    jobs: ClassVar[int] = 2

    @pytest.fixture(autouse=True)
    def _has_triton(self) -> None:
        pytest.importorskip("triton")

    def test_the_table_is_of_these_kernels(self) -> None:
        """Every row's hash is that of the sources as they are."""
        assert not (stale := stale_cases(self.provider, self.table)), self._said(stale)

    def test_every_kernel_compiles_within_its_budget_and_as_the_table_says(self) -> None:
        """For all targets: registers, shared memory and spills."""
        outcome = compile_all(self.provider, jobs=self.jobs)
        assert not outcome.faults, "\n".join(outcome.faults)
        assert not (found := outcome.table.differences(ResourceTable.read(self.table))), self._said(found)

    def _said(self, differences: list[str]) -> str:
        """pytest shows no values of assertions in installed modules, so the message has to."""
        command = f"python -m hardpoint_testing_torch.triton_aot {self.provider} --write {self.table}"
        return "\n".join([*differences, f"if that is as intended, write the table again: {command}"])

"""Conformance of the plugin kind ``kernel_override``: derive from :class:`KernelOverrideSuite` and name yours.

Every case an override accepts must be computed as the plain kernel does; what it refuses is skipped, and the skip says
why.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._pytree import tree_leaves

from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.module_guard import ModuleGuard
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.kernel_problems import KernelProblem, kernel_problems
from hardpoint_torch_runtime.ops import SEAMS, KernelSeam, check_signature

__all__ = ["KernelOverrideSuite"]

DTYPES = ("float32", "bfloat16", "float16")
EACH_DTYPE = pytest.mark.parametrize("dtype", DTYPES)


class KernelOverrideSuite(PluginSuite):
    """Tolerances are relative to outputs of order one and to the plain kernel computed in float64."""

    kind: ClassVar[str] = "kernel_override"
    device: ClassVar[str] = "cpu"
    tolerance: ClassVar[Mapping[str, float]] = {"float32": 2e-5, "bfloat16": 2e-2, "float16": 3e-3}

    def create_override(self, ctx: WorkerContext) -> KernelOverride:
        """The override under test, as its factory makes it."""
        made: KernelOverride = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def worker_context(self) -> WorkerContext:
        return self.context(WorkerContext, device=torch.device(self.device))

    @pytest.fixture
    def override(self, worker_context: WorkerContext) -> KernelOverride:
        return self.create_override(worker_context)

    @pytest.fixture
    def seam(self, override: KernelOverride) -> KernelSeam:
        return SEAMS[override.seam]

    def _problems(self, override: KernelOverride, dtype: str, *, batch_invariant: bool = False) -> list[KernelProblem]:
        """What the override accepts, in ``dtype``; skips if it refuses."""
        fixed = SEAMS[override.seam].dtype
        if fixed not in (None, dtype):
            pytest.skip(f"the seam {override.seam} is always {fixed}")
        reason = override.refusal(KernelCase(override.seam, self.device, dtype, batch_invariant))
        if reason is not None:
            pytest.skip(reason)
        return list(kernel_problems(override.seam, getattr(torch, dtype), torch.device(self.device)))

    def test_it_fits_a_seam(self, override: KernelOverride) -> None:
        """R10.49: parameters are compared where the kernel is chosen."""
        assert override.seam in SEAMS, f"there is no seam {override.seam!r}; there are: {', '.join(SEAMS)}"
        check_signature(SEAMS[override.seam], override.function)

    def test_what_it_declares_can_be_used(self, override: KernelOverride) -> None:
        """A device type or dtype that nobody spells like this would make the override one that never applies."""
        assert override.device_types, "it runs on no device type"
        assert override.dtypes, "it computes no dtype"
        unknown = [name for name in override.dtypes if not isinstance(getattr(torch, name, None), torch.dtype)]
        assert unknown == [], f"no dtype of torch: {', '.join(unknown)}"
        for device_type in override.device_types:
            torch.device(device_type)

    def test_something_is_checked(self, override: KernelOverride) -> None:
        """At least one dtype is accepted on the device that the suite runs on."""
        fixed = SEAMS[override.seam].dtype
        cases = [KernelCase(override.seam, self.device, dtype) for dtype in (DTYPES if fixed is None else (fixed,))]
        refused = {case.dtype: override.refusal(case) for case in cases}
        assert None in refused.values(), f"it accepts nothing on {self.device}: {refused}; set the suite's 'device'"

    def test_refusals_are_reasons(self, override: KernelOverride) -> None:
        """What is not declared is refused, with words; equal cases get equal answers."""
        for case in (
            KernelCase(override.seam, "abacus", next(iter(override.dtypes), "float32")),
            KernelCase(override.seam, self.device, "float3_of_nobody"),
            KernelCase("no_such_seam", self.device, "float32"),
        ):
            assert override.refusal(case), f"it accepts {case}"
        for dtype in DTYPES:
            case = KernelCase(override.seam, self.device, dtype)
            first = override.refusal(case)
            assert first == override.refusal(case)
            assert first is None or first.strip(), "an empty reason"

    @EACH_DTYPE
    def test_it_computes_what_the_plain_kernel_does(self, override: KernelOverride, dtype: str) -> None:
        """Results and arguments written in place, from no token to many, in every layout of the seam's contract."""
        for problem in self._problems(override, dtype):
            expected, arguments_after = problem.expected()
            arguments = problem.copies()
            result = override.function(*arguments)
            for name, wanted, found in (
                ("the result", expected, result),
                *zip(SEAMS[override.seam].parameters, arguments_after, arguments, strict=True),
            ):
                self._compare(f"{problem.title}: {name}", wanted, found, dtype)

    def _compare(self, title: str, expected: Any, found: Any, dtype: str) -> None:
        wanted, given = tree_leaves(expected), tree_leaves(found)
        assert len(wanted) == len(given), f"{title}: {len(given)} values instead of {len(wanted)}"
        for one, other in zip(wanted, given, strict=True):
            if not torch.is_tensor(one):
                assert one == other, title
                continue
            assert torch.is_tensor(other), f"{title} is a {type(other).__name__}"
            torch.testing.assert_close(
                other.double(),
                one.double(),
                rtol=self.tolerance[dtype],
                atol=self.tolerance[dtype],
                msg=lambda text: f"{title} differs from the plain kernel: {text}",
            )

    @EACH_DTYPE
    def test_results_are_of_the_plain_kernels_kind(self, override: KernelOverride, dtype: str) -> None:
        """Dtype, device and shape are the contract's: the next layer relies on them."""
        for problem in self._problems(override, dtype):
            wanted = tree_leaves(SEAMS[override.seam].reference(*problem.copies()))
            given = tree_leaves(override.function(*problem.copies()))
            for one, other in zip(wanted, given, strict=True):
                assert (one.dtype, one.device, one.shape) == (other.dtype, other.device, other.shape), problem.title

    @EACH_DTYPE
    def test_it_writes_where_the_seam_says_and_nowhere_else(self, override: KernelOverride, dtype: str) -> None:
        """R10.40: arguments that are not declared as mutated keep every bit, and no result is a view of one."""
        row = SEAMS[override.seam]
        for problem in self._problems(override, dtype):
            arguments = problem.copies()
            result = tree_leaves(override.function(*arguments))
            for name, before, after in zip(row.parameters, problem.arguments, arguments, strict=True):
                if not torch.is_tensor(after) or name in row.mutates:
                    continue
                assert torch.equal(before, after), f"{problem.title}: it writes to {name!r}"
                shared = [leaf for leaf in result if leaf.numel() and _shares_memory(leaf, after)]
                assert not shared, f"{problem.title}: a result shares memory with {name!r}"

    def test_what_is_updated_in_place_is_returned_itself(self, override: KernelOverride, seam: KernelSeam) -> None:
        """Callers keep working with the tensor they passed."""
        if not seam.mutates:
            pytest.skip(f"the seam {seam.name} updates nothing in place")
        for problem in self._problems(override, seam.dtype or self._a_dtype(override)):
            arguments = problem.copies()
            result = tree_leaves(override.function(*arguments))
            for name in seam.mutates:
                updated = arguments[seam.parameters.index(name)]
                assert any(leaf is updated or (_shares_memory(leaf, updated)) for leaf in result if leaf.numel()) or (
                    not updated.numel()
                ), f"{problem.title}: {name!r} is not among the results"

    @EACH_DTYPE
    def test_equal_calls_give_equal_results(self, override: KernelOverride, dtype: str) -> None:
        """No state is left by an earlier call, of another size in particular."""
        problems = self._problems(override, dtype)
        first = [tree_leaves(override.function(*problem.copies())) for problem in problems]
        for problem, before in reversed(list(zip(problems, first, strict=True))):
            for one, other in zip(before, tree_leaves(override.function(*problem.copies())), strict=True):
                assert torch.equal(one, other), problem.title

    @EACH_DTYPE
    def test_batch_invariance_where_declared(self, override: KernelOverride, dtype: str) -> None:
        """A row alone gives the same bits as among others."""
        if not override.is_batch_invariant:
            pytest.skip("it declares no batch invariance")
        for problem in self._problems(override, dtype, batch_invariant=True):
            together = tree_leaves(override.function(*problem.copies()))
            for row in range(len(problem.arguments[0])):
                alone = tree_leaves(override.function(*problem.rows(row, row + 1).copies()))
                for one, other in zip(together, alone, strict=True):
                    assert torch.equal(one[row : row + 1], other), f"{problem.title}: row {row} depends on its batch"

    def test_creating_and_calling_it_patches_nothing(self, worker_context: WorkerContext) -> None:
        """Replacing happens at the seam only: no function or class of core, runtime or framework changes."""
        guard = ModuleGuard(("hardpoint", "hardpoint_torch_runtime"), self_changing=("torch",))
        override = self.create_override(worker_context)
        for problem in self._problems(override, SEAMS[override.seam].dtype or self._a_dtype(override)):
            override.function(*problem.copies())
        changed = guard.changes()
        assert changed == [], f"it replaced {', '.join(changed)}"

    def _a_dtype(self, override: KernelOverride) -> str:
        return next((dtype for dtype in DTYPES if dtype in override.dtypes), DTYPES[0])


def _shares_memory(first: torch.Tensor, second: torch.Tensor) -> bool:
    return first.untyped_storage().data_ptr() == second.untyped_storage().data_ptr()

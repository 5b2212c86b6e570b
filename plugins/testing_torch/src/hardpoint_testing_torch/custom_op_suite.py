"""Conformance of the plugin kind ``custom_op``: derive from :class:`CustomOpSuite` and name yours.

Optionally say what the operators compute: override :meth:`CustomOpSuite.reference`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from torch.utils._pytree import tree_leaves, tree_map

from hardpoint.errors import PluginConflictError, PluginError
from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOperator, CustomOps
from hardpoint.interfaces.plugin import PluginDeclaration, ProbeResult, ProbeStatus
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.module_guard import ModuleGuard
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_torch_runtime.ops import OPERATORS, OperatorSet, check_operator, namespace_of

__all__ = ["CustomOpSuite"]


class CustomOpSuite(PluginSuite):
    """Operators are registered in this process, under the plugin's distribution or ``distribution``."""

    kind: ClassVar[str] = "custom_op"
    device: ClassVar[str] = "cpu"
    distribution: ClassVar[str] = "under-test"
    """Owner of operators that are not an installed plugin's; give every class its own."""

    tolerance: ClassVar[float] = 1e-5

    def create_ops(self, ctx: WorkerContext) -> CustomOps:
        """The description under test, as its factory makes it."""
        made: CustomOps = self.create_plugin(ctx)
        return made

    def reference(self, operator: str) -> Callable[..., Any] | None:
        """A plain function that computes what ``operator`` should, in place where that does; None: nothing is known."""
        del operator
        return None

    @pytest.fixture
    def owner(self) -> str:
        if self.plugin is None:
            return self.distribution
        return self.runtime().plan.find(self.kind, self.plugin).distribution

    @pytest.fixture
    def worker_context(self, owner: str) -> WorkerContext:
        return self.context(WorkerContext, device=torch.device(self.device), distribution=owner)

    @pytest.fixture
    def ops(self, worker_context: WorkerContext) -> CustomOps:
        return self.create_ops(worker_context)

    @pytest.fixture
    def registered(self, ops: CustomOps, owner: str) -> OperatorSet:
        return OPERATORS.register(ops, owner)

    def _here(self, ops: CustomOps, registered: OperatorSet) -> list[CustomOperator]:
        """Operators that can be called on this device; skips when there are none."""
        usable = [
            operator
            for operator in ops.operators
            if operator.name in registered.operators and {self.device, ANY_DEVICE} & set(operator.implementations)
        ]
        if not usable:
            missing = dict(registered.missing) or "they are for other devices"
            pytest.skip(f"none of its operators runs on {self.device} here: {missing}")
        return usable

    def test_the_factory_registers_nothing_itself(self, worker_context: WorkerContext, owner: str) -> None:
        """The worker registers, once, with the namespace's owner at hand; a factory that does so comes in between."""
        guard = ModuleGuard(("hardpoint", "hardpoint_torch_runtime"), self_changing=("torch",))
        ops = self.create_ops(worker_context)
        assert isinstance(ops, CustomOps), f"the factory returned a {type(ops).__name__}, not CustomOps"
        namespace = namespace_of(owner, ops.namespace)
        if OPERATORS.owner(namespace) is None:
            packets = getattr(torch.ops, namespace)
            defined = [operator.name for operator in ops.operators if hasattr(packets, operator.name)]
            assert defined == [], f"the factory defined operators itself: {', '.join(defined)}"
        changed = guard.changes()
        assert changed == [], f"the factory replaced {', '.join(changed)}"

    def test_it_has_operators_with_samples(self, ops: CustomOps) -> None:
        """Without samples of several sizes nothing shows that a fake is right."""
        assert ops.operators, "it defines no operator"
        for operator in ops.operators:
            if {self.device, ANY_DEVICE} & set(operator.implementations):
                shapes = {
                    tuple(tuple(leaf.shape) for leaf in tree_leaves(sample) if torch.is_tensor(leaf))
                    for sample in operator.samples(self.device)
                }
                assert len(shapes) > 1, f"{operator.name}: give samples of at least two sizes"

    def test_it_registers_under_its_own_namespace(self, registered: OperatorSet, owner: str) -> None:
        assert OPERATORS.owner(registered.namespace) == owner

    def test_registering_again_changes_nothing(
        self, registered: OperatorSet, worker_context: WorkerContext, owner: str
    ) -> None:
        """R12.13: the factory describes the same operators whenever it is called."""
        again = OPERATORS.register(self.create_ops(worker_context), owner)
        assert again.operators == registered.operators
        assert again.missing == registered.missing

    def test_nobody_else_may_define_them(self, registered: OperatorSet, ops: CustomOps, owner: str) -> None:
        """A second distribution in the namespace is refused, by the owner's name."""
        with pytest.raises((PluginConflictError, PluginError), match=f"{owner}|wants the operator namespace"):
            OPERATORS.register(CustomOps(ops.operators, namespace=registered.namespace), f"x-{owner}")

    def test_real_and_fake_agree(self, ops: CustomOps, registered: OperatorSet) -> None:
        """R10.32, R10.33, R10.40, I10.3: shapes, dtypes, strides, aliases and mutated arguments, on every sample."""
        for operator in self._here(ops, registered):
            faults = check_operator(registered[operator.name], operator.samples(self.device), operator.mutates)
            assert faults == [], f"{operator.name}: " + "\n".join(faults)

    def test_declared_mutations_happen(self, ops: CustomOps, registered: OperatorSet) -> None:
        """R10.40: the declared set equals the real one; an argument that never changes is not an output."""
        for operator in self._here(ops, registered):
            names = [argument.name for argument in _schema(registered[operator.name]).arguments]
            unchanged = set(operator.mutates)
            for sample in operator.samples(self.device):
                arguments = _cloned(sample)
                registered[operator.name](*arguments)
                changed = {
                    name
                    for name, before, after in zip(names, sample, arguments, strict=False)
                    if torch.is_tensor(after) and not torch.equal(before, after)
                }
                unchanged -= changed
            assert not unchanged, f"{operator.name} declares to write to {', '.join(sorted(unchanged))}, but never does"

    def test_it_computes_what_it_should(self, ops: CustomOps, registered: OperatorSet) -> None:
        known = [(operator, self.reference(operator.name)) for operator in self._here(ops, registered)]
        if not any(plain for _, plain in known):
            pytest.skip("nobody says what its operators compute: override 'reference'")
        for operator, plain in known:
            if plain is None:
                continue
            for sample in operator.samples(self.device):
                wanted_arguments, arguments = _cloned(sample), _cloned(sample)
                wanted = plain(*wanted_arguments), wanted_arguments
                found = registered[operator.name](*arguments), arguments
                for one, other in zip(tree_leaves(wanted), tree_leaves(found), strict=True):
                    if not torch.is_tensor(one):
                        assert one == other, operator.name
                        continue
                    assert one.dtype == other.dtype, f"{operator.name} gives {other.dtype} instead of {one.dtype}"
                    torch.testing.assert_close(_wide(other), _wide(one), rtol=self.tolerance, atol=self.tolerance)

    def test_its_probe_answers(self, declaration: PluginDeclaration) -> None:
        """Available, absent or broken, with a reason; asking twice changes nothing."""
        if declaration.probe is None:
            pytest.skip("the plugin as a whole declares no probe: it is taken to be available")
        answer = declaration.probe()
        assert isinstance(answer, ProbeResult), f"probe() answers {answer!r}"
        assert answer.reason.strip(), "a probe gives a reason, also for being available"
        assert declaration.probe().status is answer.status
        assert answer.status is not ProbeStatus.BROKEN, answer.reason

    def test_missing_operators_say_so(self, ops: CustomOps, registered: OperatorSet) -> None:
        """R10.30, R10.31: probes answer, and what is absent is there by name and refuses with a reason."""
        for operator in ops.operators:
            if operator.probe is not None:
                answer = operator.probe()
                assert isinstance(answer, ProbeResult), f"{operator.name}: the probe returned {answer!r}"
                assert answer.status is ProbeStatus.AVAILABLE or answer.reason, f"{operator.name}: no reason"
        for name in registered.missing:
            call: Callable[..., Any] = registered[name]
            with pytest.raises(PluginError, match=f"{name} is not available on this platform"):
                call()


def _schema(operator: Callable[..., Any]) -> Any:
    return operator._schema  # type: ignore[attr-defined]


def _cloned(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    copied: tuple[Any, ...] = tree_map(lambda leaf: leaf.clone() if torch.is_tensor(leaf) else leaf, sample)
    return copied


def _wide(values: torch.Tensor) -> torch.Tensor:
    """8-bit floats as float32: the framework compares their bits only."""
    return values.float() if values.dtype.is_floating_point and values.element_size() == 1 else values

"""Operators of plugins in the framework's dispatcher: a namespace per distribution, each operator with its fake."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hardpoint.errors import PluginConflictError, PluginError, PluginNotFoundError
from hardpoint.interfaces.custom_op import CustomOperator, CustomOps
from hardpoint.interfaces.plugin import ProbeStatus
from hardpoint_torch_runtime.ops.definition import OperatorDefinition, define, origin_of, replaced_by

__all__ = ["OPERATORS", "OperatorRegistry", "OperatorSet", "namespace_of"]

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")


@dataclass(frozen=True, slots=True)
class OperatorSet:
    """The operators of one plugin. ``missing`` maps those that this platform lacks to the reason.

    Both kinds are there by name on every platform (R10.30, I10.8).
    """

    namespace: str
    operators: Mapping[str, Callable[..., Any]]
    missing: Mapping[str, str] = field(default_factory=dict)

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """The callable operator. Raises ``PluginNotFoundError`` for a name that the plugin does not define.

        Calling one that is missing here raises ``PluginError`` (R10.31).
        """
        if name in self.operators:
            return self.operators[name]
        if name in self.missing:
            return self._refuse(name)
        known = ", ".join(sorted({*self.operators, *self.missing})) or "none"
        raise PluginNotFoundError(f"the namespace {self.namespace!r} has no operator {name!r}; it has: {known}")

    def _refuse(self, name: str) -> Callable[..., Any]:
        text = f"operator {self.namespace}::{name} is not available on this platform: {self.missing[name]}"

        def refuse(*arguments: Any, **named: Any) -> Any:
            del arguments, named
            raise PluginError(text)

        return refuse


@dataclass(slots=True)
class _Namespace:
    """``libraries`` keep the registrations alive."""

    owner: str
    definitions: dict[str, OperatorDefinition] = field(default_factory=dict)
    libraries: list[torch.library.Library] = field(default_factory=list)


class OperatorRegistry:
    """Owner of namespaces. One a process, as the framework's dispatcher is; a forked child inherits both alike."""

    def __init__(self) -> None:
        self._namespaces: dict[str, _Namespace] = {}

    def owner(self, namespace: str) -> str | None:
        """The distribution that defines operators in ``namespace``."""
        space = self._namespaces.get(namespace)
        return space.owner if space is not None else None

    def register(self, ops: CustomOps, distribution: str) -> OperatorSet:
        """Define all operators of ``ops``, or none. What the distribution defined before, and equally, stays as it is.

        Raises ``PluginConflictError`` naming the owner of a namespace or operator that is another's, or both
        definitions where they differ; ``PluginError`` for an operator that breaks the contract, or whose native part
        is broken.
        """
        if not isinstance(ops, CustomOps):
            raise PluginError(f"{distribution} returned a {type(ops).__name__} for its operators, not CustomOps")
        namespace = namespace_of(distribution, ops.namespace)
        space = self._space(namespace, distribution)
        fresh, missing = self._examine(space, namespace, ops.operators)
        if fresh:
            space.libraries.append(define(namespace, fresh))
            space.definitions.update({definition.name: definition for definition in fresh})
        self._namespaces[namespace] = space
        names = [operator.name for operator in ops.operators if operator.name not in missing]
        packets = getattr(torch.ops, namespace)
        return OperatorSet(namespace, {name: getattr(packets, name).default for name in names}, missing)

    def verify(self) -> None:
        """Raises ``PluginConflictError`` when code outside the registry replaced an implementation: for each such
        operator its owner, and where the other one comes from."""
        faults = []
        for space in self._namespaces.values():
            for definition in space.definitions.values():
                other = replaced_by(definition.qualified_name)
                if other is not None:
                    faults.append(f"{definition.qualified_name} belongs to {space.owner}, but {other} replaced it")
        if faults:
            raise PluginConflictError("; ".join(faults))

    def _space(self, namespace: str, distribution: str) -> _Namespace:
        space = self._namespaces.get(namespace) or _Namespace(distribution)
        if space.owner != distribution:
            raise PluginConflictError(
                f"{distribution} defines operators in {namespace!r}, which is the namespace of {space.owner}; "
                "choose another one, or leave 'namespace' unset"
            )
        return space

    def _examine(
        self, space: _Namespace, namespace: str, operators: tuple[CustomOperator, ...]
    ) -> tuple[list[OperatorDefinition], dict[str, str]]:
        """Definitions that are new, and why some are missing here; raises before anything is defined."""
        fresh: dict[str, OperatorDefinition] = {}
        missing: dict[str, str] = {}
        for operator in operators:
            definition = OperatorDefinition.of(namespace, operator)
            known = space.definitions.get(operator.name) or fresh.get(operator.name)
            if known is not None:
                _require_equal(definition, known, space.owner)
                continue
            reason = _probe(namespace, operator)
            if reason is not None:
                missing[operator.name] = reason
                continue
            foreign = origin_of(definition.qualified_name)
            if foreign is not None:
                raise PluginConflictError(
                    f"{space.owner} defines {definition.qualified_name}, which exists already: {foreign}"
                )
            fresh[operator.name] = definition
        return list(fresh.values()), missing


OPERATORS = OperatorRegistry()


def namespace_of(distribution: str, given: str | None = None) -> str:
    """The operators' namespace of a distribution, or ``given`` after checking that it begins with it.

    Raises ``PluginError``.
    """
    own = re.sub(r"[-_.]+", "_", distribution).lower()
    if not _IDENTIFIER.fullmatch(own):
        raise PluginError(
            f"operators need an installed distribution as their owner, and no namespace can be made of {distribution!r}"
        )
    if given is None or given == own:
        return own
    if not _IDENTIFIER.fullmatch(given) or not given.startswith(f"{own}_"):
        raise PluginError(
            f"{distribution} wants the operator namespace {given!r}; allowed: {own!r}, or a name that begins with "
            f"'{own}_'"
        )
    return given


def _probe(namespace: str, operator: CustomOperator) -> str | None:
    """Why the operator is missing here, or None. A native part that is there and does not work is an error."""
    if operator.probe is None:
        return None
    result = operator.probe()
    if result.status is ProbeStatus.BROKEN:
        raise PluginError(f"the native part of operator {namespace}::{operator.name} is broken: {result.reason}")
    return None if result.status is ProbeStatus.AVAILABLE else result.reason


def _require_equal(new: OperatorDefinition, known: OperatorDefinition, owner: str) -> None:
    difference = new.difference(known)
    if difference is not None:
        raise PluginConflictError(
            f"{owner} defines {new.qualified_name} again, and differently: {difference}; give one of them another name"
        )

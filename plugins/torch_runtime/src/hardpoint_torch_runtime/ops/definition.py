"""One operator, examined: what has to hold before the framework is told of it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.errors import PluginError
from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOperator

__all__ = ["OperatorDefinition", "define", "origin_of", "replaced_by"]

_IDENTIFIER = re.compile(r"[a-z_][a-z0-9_]*")
_FOR_ANY_DEVICE = "default"
"""The framework's word for :data:`ANY_DEVICE`."""


@dataclass(frozen=True, slots=True)
class OperatorDefinition:
    """``schema`` is in the framework's own spelling, without name and namespace."""

    namespace: str
    name: str
    schema: str
    implementations: Mapping[str, Callable[..., Any]]
    fake: Callable[..., Any]

    @classmethod
    def of(cls, namespace: str, operator: CustomOperator) -> OperatorDefinition:
        """Raises ``PluginError`` for whatever breaks the contract of ``CustomOperator``."""
        label = f"operator {namespace}::{operator.name}"
        if not _IDENTIFIER.fullmatch(operator.name):
            raise PluginError(f"{label}: the name must be lower-case letters, digits and underscores")
        if not callable(operator.fake):
            raise PluginError(
                f"{label} has no fake implementation; give it 'fake', a function that returns empty tensors of the "
                "real shapes and dtypes"
            )
        for device, implementation in operator.implementations.items():
            if not callable(implementation):
                raise PluginError(f"{label}: the implementation for {device} is a {type(implementation).__name__}")
        if not operator.implementations:
            raise PluginError(f"{label} has no implementation; name at least one device type, or {ANY_DEVICE!r}")
        schema = _schema(label, operator)
        return cls(namespace, operator.name, schema, dict(operator.implementations), operator.fake)

    @property
    def qualified_name(self) -> str:
        return f"{self.namespace}::{self.name}"

    def difference(self, other: OperatorDefinition) -> str | None:
        """What keeps the two from being one operator defined twice, or None.

        Functions are compared by their code, since every call of a factory makes new ones.
        """
        if self.schema != other.schema:
            return f"{self.schema} instead of {other.schema}"
        if set(self.implementations) != set(other.implementations):
            return f"for {_listed(self.implementations)} instead of {_listed(other.implementations)}"
        pairs = [("the fake", self.fake, other.fake)]
        pairs += [(f"for {key}", self.implementations[key], other.implementations[key]) for key in self.implementations]
        for what, mine, theirs in pairs:
            if _identity(mine) != _identity(theirs):
                return f"{what}, {_place(mine)} instead of {_place(theirs)}"
        return None


def define(namespace: str, definitions: Iterable[OperatorDefinition]) -> torch.library.Library:
    """Tell the framework. The operators exist as long as the returned object does."""
    library = torch.library.Library(namespace, "FRAGMENT")
    for definition in definitions:
        name = definition.qualified_name
        torch.library.define(name, definition.schema, lib=library)
        for device, implementation in definition.implementations.items():
            key = _FOR_ANY_DEVICE if device == ANY_DEVICE else device
            torch.library.impl(name, key, implementation, lib=library)
        torch.library.register_fake(name, definition.fake, lib=library)
    return library


def origin_of(qualified_name: str) -> str | None:
    """Where an operator was defined that the framework knows, or None for one that it does not know."""
    namespace, _, name = qualified_name.partition("::")
    if not hasattr(getattr(torch.ops, namespace), name):
        return None
    found = re.search(r"^debug: (.+)$", torch._C._dispatch_dump(qualified_name), re.MULTILINE)
    return found.group(1) if found is not None else "the framework does not say where"


def replaced_by(qualified_name: str) -> str | None:
    """Where somebody else gave the operator another implementation or fake, or None while all are the first ones."""
    # The framework lets a later registration win, and keeps the earlier one as inactive.
    dump = torch._C._dispatch_dump(qualified_name)
    for key in re.findall(r"^(\w+) \(inactive\):", dump, re.MULTILINE):
        found = re.search(rf"^{key}: (.+?) :: ", dump, re.MULTILINE)
        return f"{key} {found.group(1)}" if found is not None else key
    return None


def _schema(label: str, operator: CustomOperator) -> str:
    text = operator.schema
    try:
        if text is None:
            function = next(iter(operator.implementations.values()))
            text = torch.library.infer_schema(function, mutates_args=operator.mutates)
        parsed = torch._C.parse_schema(f"{operator.name}{text}")
    except (RuntimeError, ValueError) as error:
        raise PluginError(f"{label}: the schema cannot be read: {str(error).strip().splitlines()[0]}") from error
    aliases = [(argument.name, argument.alias_info) for argument in parsed.arguments]
    written = {name for name, alias in aliases if alias is not None and alias.is_write}
    if written != set(operator.mutates):
        raise PluginError(
            f"{label}: the schema says that {_listed(written)} is written, 'mutates' says {_listed(operator.mutates)}"
        )
    if any(value.alias_info is not None for value in parsed.returns):
        raise PluginError(f"{label}: outputs may not alias arguments; return new tensors, or write to an argument")
    return str(parsed).removeprefix(operator.name)


def _identity(function: Callable[..., Any]) -> tuple[Any, ...]:
    code = getattr(function, "__code__", None)
    if code is None:
        return (type(function), function)
    return (getattr(function, "__module__", None), function.__qualname__, code, function.__defaults__)


def _place(function: Callable[..., Any]) -> str:
    code = getattr(function, "__code__", None)
    return repr(function) if code is None else f"{code.co_filename}:{code.co_firstlineno}"


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names)) or "nothing"

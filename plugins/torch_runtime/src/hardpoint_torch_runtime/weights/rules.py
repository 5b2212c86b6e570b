"""Declared name mapping, applied in both directions: stored name to parameter, parameter to the names it expects.

Patterns are dotted names in which ``*`` stands for exactly one segment; a target's ``*`` take the pattern's matches in
order. A rule may thus map whole modules (``...q_proj.*`` to ``...qkv_proj.*``), including parameters that only a
quantization method creates.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from hardpoint.interfaces.model import WeightRule
from hardpoint_torch_runtime.weights.stacks import StackLayout, StackRule

__all__ = ["Destination", "Expected", "RuleBook", "WeightPlan"]


@dataclass(frozen=True, slots=True)
class Destination:
    """``parameter`` None: the tensor is ignored on purpose. ``is_optional``: and so it does not matter if absent."""

    parameter: str | None
    shard: str | None
    is_optional: bool


@dataclass(frozen=True, slots=True)
class Expected:
    """A stored tensor that a parameter waits for."""

    stored_name: str
    shard: str | None
    is_optional: bool


class _CompiledRule:
    def __init__(self, rule: WeightRule) -> None:
        if rule.target is not None and rule.target.count("*") != rule.pattern.count("*"):
            raise ValueError(
                f"weight rule {rule.pattern!r} -> {rule.target!r}: pattern and target must have equally many '*'"
            )
        one_more = [name for name in rule.unstacked if name.count("*") != rule.pattern.count("*") + 1]
        if one_more or (rule.unstacked and rule.target is not None):
            raise ValueError(
                f"weight rule {rule.pattern!r} -> {rule.unstacked!r}: the names of what a stack holds must have one "
                f"'*' more than the pattern, and the rule no target, but it has {rule.target!r}"
            )
        self.rule = rule
        self._stored = _matcher(rule.pattern)
        self._target = None if rule.target is None else _matcher(rule.target)
        self._entries = [_matcher(name) for name in rule.unstacked]

    def destination(self, stored_name: str) -> Destination | None:
        match = self._stored.fullmatch(stored_name)
        if match is None or self.rule.unstacked:
            return None
        target = None if self.rule.target is None else _fill(self.rule.target, match.groups())
        return Destination(target, self.rule.shard, self.rule.optional or target is None)

    def expected(self, parameter: str) -> Expected | None:
        match = None if self._target is None else self._target.fullmatch(parameter)
        if match is None:
            return None
        return Expected(_fill(self.rule.pattern, match.groups()), self.rule.shard, self.rule.optional)

    def stack(self, stored_name: str) -> StackLayout | None:
        match = self._stored.fullmatch(stored_name) if self.rule.unstacked else None
        if match is None:
            return None
        names = tuple(_fill(name, (*match.groups(), "*")) for name in self.rule.unstacked)
        if isinstance(self.rule, StackRule):
            return StackLayout(names, self.rule.is_transposed, self.rule.alternates)
        return StackLayout(names)

    def stack_of(self, stored_name: str) -> str | None:
        matches = (entry.fullmatch(stored_name) for entry in self._entries)
        return next((_fill(self.rule.pattern, match.groups()[:-1]) for match in matches if match is not None), None)


def _matcher(pattern: str) -> re.Pattern[str]:
    return re.compile(r"([^.]+)".join(re.escape(piece) for piece in pattern.split("*")))


def _fill(pattern: str, values: Sequence[str]) -> str:
    pieces = pattern.split("*")
    return pieces[0] + "".join(value + piece for value, piece in zip(values, pieces[1:], strict=True))


class RuleBook:
    """A model's rules. For a stored name the first matching rule counts."""

    def __init__(self, rules: Iterable[WeightRule]) -> None:
        self._rules = [_CompiledRule(rule) for rule in rules]

    def destination(self, stored_name: str) -> Destination | None:
        """Where ``stored_name`` goes; None if no rule knows it."""
        for rule in self._rules:
            found = rule.destination(stored_name)
            if found is not None:
                return found
        return None

    def stack(self, stored_name: str) -> StackLayout | None:
        """What ``stored_name`` is a stack of, if it is one."""
        return next((found for rule in self._rules if (found := rule.stack(stored_name)) is not None), None)

    def stacks_of(self, stored_name: str) -> tuple[str, ...]:
        """The stacks that may hold ``stored_name``."""
        found = (rule.stack_of(stored_name) for rule in self._rules)
        return tuple(stack for stack in found if stack is not None)

    def expected(self, parameter: str) -> tuple[Expected, ...]:
        """The stored tensors that together fill ``parameter``."""
        found = (rule.expected(parameter) for rule in self._rules)
        return tuple(expected for expected in found if expected is not None)


class WeightPlan:
    """What is still to come for a given set of parameters. Of alternatives for one part the first to come is taken.

    One tensor may hold all parts of a parameter: then it is an alternative to all of them together.
    """

    def __init__(self, book: RuleBook, parameters: Iterable[str]) -> None:
        self.book = book
        self.without_rule: list[str] = []
        self._awaited: dict[tuple[str, str | None], list[Expected]] = {}
        self._parts: dict[str, tuple[str, str | None]] = {}
        self._shards: dict[str, list[str]] = {}
        for parameter in parameters:
            expected = book.expected(parameter)
            if not expected:
                self.without_rule.append(parameter)
            for one in expected:
                part = (parameter, one.shard)
                self._awaited.setdefault(part, []).append(one)
                self._parts[one.stored_name] = part
            self._shards[parameter] = list(dict.fromkeys(one.shard for one in expected if one.shard is not None))

    def wanted(self) -> tuple[tuple[str, Expected], ...]:
        """Each parameter with a stored tensor that it waits for, in model order; of alternatives the first one."""
        return tuple((parameter, names[0]) for parameter, names in self._open())

    def arrived(self, stored_name: str) -> bool:
        """False if the part it fills has arrived before."""
        part = self._parts.get(stored_name)
        if part is None:
            return True
        if self._awaited.pop(part, None) is None:
            return False
        parameter, shard = part
        # Whoever comes first settles whether the parameter is stored whole or in parts.
        for other in (None,) if shard is not None else self._shards[parameter]:
            self._awaited.pop((parameter, other), None)
        return True

    def missing(self) -> tuple[str, ...]:
        """Required stored tensors that have not arrived, in model order; alternatives, stacks among them, joined by
        ``or``."""
        required = (names for _, names in self._open() if not all(name.is_optional for name in names))
        found = []
        for names in required:
            stored = [name.stored_name for name in names]
            stacks = [stack for name in stored for stack in self.book.stacks_of(name)]
            found.append(" or ".join(dict.fromkeys((*stored, *stacks))))
        return tuple(found)

    def _open(self) -> Iterator[tuple[str, list[Expected]]]:
        """Each parameter with what could fill a part of it; behind the part's own names those of all parts in one."""
        for (parameter, shard), names in self._awaited.items():
            if shard is not None:
                yield parameter, [*names, *self._awaited.get((parameter, None), ())]
            elif not self._shards[parameter]:
                yield parameter, names

"""A sandbox for chat templates, which come with models and are untrusted: bounded in steps, time and memory.

The rendering thread checks the bounds itself, so a template that exceeds them ends and nothing keeps running. Every
value is weighed where it comes into being (literals, calls, filters, operators); what could outgrow its operands by
more than a constant factor is estimated before it runs, or not available.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import wraps
from itertools import chain
from typing import Any

from jinja2 import Environment, TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.nodes import EvalContext
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

DEADLINE_S = 2.0
MAX_STEPS = 500_000
MAX_WEIGHT = 2 << 20
"""Characters and elements of one value, nested ones included; four times the caller's data come on top."""
_FILTERS = frozenset(
    {"abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape", "first", "float", "indent", "int"}
    | {"items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"}
    | {"reverse", "round", "safe", "select", "selectattr", "sort", "string", "title", "trim", "unique", "upper"}
)
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
_UNAVAILABLE = frozenset({"format", "format_map", "translate", "expandtabs", "encode"})


class TemplateLimitError(TemplateError):
    """A rendering went beyond what any honest template needs."""

    def __init__(self, message: str = "it exceeds the limits of time, steps or size") -> None:
        super().__init__(message)


class Budget:
    """What one rendering may still do. ``variables`` are the caller's data, which count as input."""

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._deadline = time.monotonic() + DEADLINE_S
        self._steps = MAX_STEPS
        self._limit = 1 << 62
        # Containers by identity; holding them keeps identities unique.
        self._weights: dict[int, tuple[int, Any]] = {}
        given = self.weigh(dict(variables))
        self._limit = MAX_WEIGHT + 4 * given
        self._total = 8 * self._limit

    def spend(self, size: int = 0) -> None:
        """One step, after which ``size`` characters or elements will have been created."""
        self._steps -= 1
        self._total -= size
        if size > self._limit or self._total < 0 or self._steps < 0 or time.monotonic() > self._deadline:
            raise TemplateLimitError

    def admit(self, value: Any) -> Any:
        """``value``, which an operation has just made."""
        self.spend(len(value) if isinstance(value, str | list | tuple | dict) else 0)
        self.weigh(value)
        if isinstance(value, int) and value.bit_length() > 4096:
            raise TemplateLimitError
        return value

    def weigh(self, value: Any) -> int:
        """Characters and elements in ``value``; parts already weighed cost nothing, so nesting cannot explode."""
        if not isinstance(value, list | tuple | dict):
            return len(value) + 1 if isinstance(value, str) else 1
        if (known := self._weights.get(id(value))) is not None:
            return known[0]
        parts = chain(value.keys(), value.values()) if isinstance(value, dict) else value
        weight = 1 + sum(map(self.weigh, parts))
        if weight > self._limit:
            raise TemplateLimitError
        self._weights[id(value)] = (weight, value)
        return weight


current_budget: ContextVar[Budget] = ContextVar("template_budget")


class _Meter(NodeTransformer):
    """Puts a check into each loop round and macro, and makes containers and joined text (``~``) checked calls."""

    def _metered(self, node: Any) -> nodes.Node:
        literal = sum(len(data.data) for data in node.find_all(nodes.TemplateData))
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_call("check", [nodes.Const(literal)]), lineno=node.lineno))
        metered: nodes.Node = node
        return metered

    def _built(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        return node if getattr(node, "ctx", "load") != "load" else _call("admit", [node])

    visit_For = visit_Macro = visit_CallBlock = visit_FilterBlock = _metered
    visit_List = visit_Tuple = visit_Dict = _built

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _call("concat_texts", node.nodes)


def _call(name: str, arguments: list[Any]) -> nodes.Call:
    return nodes.Call(nodes.EnvironmentAttribute(name), arguments, [], None, None)


class _GenerationTag(Extension):
    """``{% generation %}`` marks training targets; here it only passes its body through."""

    tags = {"generation"}  # noqa: RUF012 (declared so by the library)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatSandbox(ImmutableSandboxedEnvironment):
    """Renders only while :data:`current_budget` is set."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            optimized=False,
            extensions=[loopcontrols, _GenerationTag],
            finalize=self.admit,
        )
        self.filters = {name: _metered_filter(name, self.filters[name]) for name in _FILTERS} | {"tojson": _to_json}
        self.globals = {name: self.globals[name] for name in ("range", "dict", "namespace")}
        self.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        metered: nodes.Template = _Meter().visit(super()._parse(source, name, filename))
        return metered

    def check(self, size: int) -> None:
        current_budget.get().spend(size)

    def admit(self, value: Any) -> Any:
        return current_budget.get().admit(value)

    def concat_texts(self, *parts: Any) -> str:
        texts = [str(part) for part in parts]
        current_budget.get().spend(sum(map(len, texts)))
        return "".join(texts)

    def call(self, context: Context, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        owner, name = getattr(obj, "__self__", None), getattr(obj, "__name__", "")
        if isinstance(owner, int | bytes) or name in _UNAVAILABLE:
            raise TemplateLimitError(f"the method {name!r} is not available")
        if isinstance(owner, str):
            joined = name == "join" and bool(args)
            current_budget.get().spend(_expansion(name, args[0] if joined else owner, [owner] if joined else [*args]))
        return self.admit(super().call(context, obj, *args, **kwargs))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = current_budget.get()
        if operator == "%" and isinstance(left, str | bytes):
            raise TemplateLimitError("formatting with % is not available")
        if operator == "**" and not (isinstance(right, int | float) and abs(right) <= 64):
            raise TemplateLimitError("an exponent is too large")
        if operator == "*":
            for value, count in ((left, right), (right, left)):
                if not isinstance(value, int | float) and isinstance(count, int):
                    budget.spend(budget.weigh(value) * max(count, 0))
        return budget.admit(super().call_binop(context, operator, left, right))


def _expansion(name: str, subject: Any, rest: list[Any]) -> int:
    """Characters an operation may add to ``subject`` beyond a constant factor."""
    texts = [value for value in rest if isinstance(value, str)]
    if name in _PADDING and rest:
        return int(rest[0])
    if name == "replace" and len(texts) > 1:
        return str(subject).count(texts[0]) * len(texts[1])
    if name == "join":
        return len(subject) * max(map(len, texts), default=0)
    if name == "indent":
        return (str(subject).count("\n") + 1) * max((value for value in rest if isinstance(value, int)), default=4)
    return 0


def _metered_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def metered(*args: Any, **kwargs: Any) -> Any:
        budget = current_budget.get()
        first = next((i for i, a in enumerate(args) if not isinstance(a, EvalContext | Context | Environment)), 0)
        subject = list(args[first]) if name == "join" else args[first]
        rest = [len(value) if name == "indent" and isinstance(value, str) else value for value in args[first + 1 :]]
        budget.spend(_expansion(name, subject, [*rest, *kwargs.values()]))
        return budget.admit(function(*args[:first], subject, *args[first + 1 :], **kwargs))

    return metered


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    width = None if indent is None else min(int(indent), 16)
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=width, separators=separators, sort_keys=sort_keys)
    if width is None:
        return str(current_budget.get().admit(encoder.encode(value)))
    chunks = []
    # Indentation grows with depth, so it is checked as it comes.
    for chunk in encoder.iterencode(value):
        current_budget.get().spend(len(chunk))
        chunks.append(chunk)
    return "".join(chunks)


def _raise_exception(message: Any) -> None:
    raise TemplateError(str(message)[:500])


def _strftime_now(pattern: str) -> str:
    return datetime.now().astimezone().strftime(pattern[:200])

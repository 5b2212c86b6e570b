"""Compiled chat templates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError, nodes

from hardpoint.errors import InvalidRequestError, ModelFormatError
from hardpoint_model_io.chat.sandbox import Budget, ChatSandbox, TemplateLimitError, current_budget

MAX_TEMPLATE_CHARS = 1 << 20


class ChatTemplate:
    """One compiled template. ``is_structured``: it expects content as a list of parts, not as text.

    Raises ``ModelFormatError`` for a template that cannot be compiled.
    """

    def __init__(self, source: str) -> None:
        if len(source) > MAX_TEMPLATE_CHARS:
            raise ModelFormatError(f"the chat template has {len(source)} characters; {MAX_TEMPLATE_CHARS} are allowed")
        sandbox = ChatSandbox()
        try:
            self.is_structured = _expects_parts(sandbox.parse(source))
            self._template = sandbox.from_string(source)
        except (TemplateError, SyntaxError, RecursionError, MemoryError, ValueError) as error:
            advice = "set --chat-template-file to another one"
            raise ModelFormatError(f"the chat template cannot be compiled: {error}; {advice}") from error

    def render(self, variables: Mapping[str, Any]) -> str:
        """Takes up to two seconds: asynchronous callers run it in a thread.

        Raises ``InvalidRequestError`` when the template refuses the messages or exceeds its limits.
        """
        token = current_budget.set(Budget(variables))
        try:
            return self._template.render(variables)
        except Exception as error:
            # The model's code meets the client's data: whichever is wrong, the engine is not.
            reason = "it does not fit these messages"
            if isinstance(error, RecursionError | MemoryError | OverflowError):
                reason = str(TemplateLimitError())
            elif isinstance(error, TemplateError):
                reason = str(error)[:500]
            raise InvalidRequestError(f"the chat template failed: {reason}", param="messages") from error
        finally:
            current_budget.reset(token)


def _expects_parts(tree: nodes.Template) -> bool:
    """True if the template loops over a message's content and never asks whether it is a text."""
    if any(test.name == "string" for test in tree.find_all(nodes.Test)):
        return False
    aliases = {
        assign.target.name
        for assign in tree.find_all(nodes.Assign)
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node)
    }
    return any(
        _is_content(loop.iter) or (isinstance(loop.iter, nodes.Name) and loop.iter.name in aliases)
        for loop in tree.find_all(nodes.For)
    )


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    return isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Const) and node.arg.value == "content"

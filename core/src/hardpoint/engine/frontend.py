"""What both front ends know of a model: its tokenizer, limits and chat template. No engine in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from hardpoint.engine.input_processor import InputProcessor
from hardpoint.engine.spec import EngineSpec
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import ModelLimits, Prompt
from hardpoint.interfaces.tokenizer import Tokenizer, TokenizerProvider
from hardpoint.plugins.runtime import PluginRuntime

__all__ = ["Frontend", "Renderer", "load_tokenizer"]


class Renderer(Protocol):
    def render(
        self,
        messages: Sequence[dict[str, Any]],
        add_generation_prompt: bool = True,
        template_arguments: dict[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        """Text and token ids of a conversation. Raises ``InvalidRequestError``."""


class Frontend:
    """``renderer`` makes a chat renderer from tokenizer and template source; it is called for the first chat."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        *,
        model_name: str = "model",
        tasks: tuple[str, ...] = ("generate",),
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
        renderer: Callable[[Tokenizer, str], Renderer] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.model_name = model_name
        self.tasks = tasks
        self.inputs = InputProcessor(tokenizer, limits, eos_token_ids=eos_token_ids, tasks=tasks)
        self._template = chat_template or tokenizer.chat_template
        self._make_renderer = renderer or _chat_renderer
        self._renderer: Renderer | None = None

    @classmethod
    def from_spec(cls, spec: EngineSpec, runtime: PluginRuntime) -> Frontend:
        """Loads the tokenizer through its plugin. Raises ``ModelFormatError`` and the plugin errors."""
        return cls(
            load_tokenizer(spec, runtime),
            spec.model_limits,
            model_name=spec.model_name,
            tasks=spec.model.tasks,
            eos_token_ids=_eos_token_ids(spec),
            chat_template=spec.chat_template,
        )

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: dict[str, Any] | None = None,
    ) -> Prompt:
        """The conversation as ids: only the template, never a message's text, can spell a control token."""
        if self._renderer is None:
            if self._template is None:
                raise InvalidRequestError(
                    f"model {self.model_name!r} has no chat template; send a plain prompt or set --chat-template",
                    param="messages",
                    code="no_chat_template",
                )
            self._renderer = self._make_renderer(self.tokenizer, self._template)
        _, ids = self._renderer.render(
            messages, add_generation_prompt=add_generation_prompt, template_arguments=template_arguments
        )
        return Prompt(token_ids=ids)


def load_tokenizer(spec: EngineSpec, runtime: PluginRuntime) -> Tokenizer:
    context = runtime.context("tokenizer", spec.tokenizer)
    provider: TokenizerProvider = runtime.create("tokenizer", spec.tokenizer, context)
    return provider.load(spec.model.artifact)


def _eos_token_ids(spec: EngineSpec) -> tuple[int, ...]:
    """Those of the model and those of its generation defaults, which may be one id or several."""
    given = spec.model.generation.get("eos_token_id")
    more = [given] if isinstance(given, int) else list(given or ())
    return tuple(sorted({*spec.model.eos_token_ids, *more}))


def _chat_renderer(tokenizer: Tokenizer, template: str) -> Renderer:
    from hardpoint.rendering import ChatRenderer

    renderer: Renderer = ChatRenderer(tokenizer, template)
    return renderer

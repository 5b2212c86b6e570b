"""What both front ends know of a model, its tokenizer, limits and chat renderer, and keep of it. No engine in here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from hardpoint.engine.input_processor import InputProcessor
from hardpoint.engine.output_processor import OutputProcessor, StatEvent
from hardpoint.engine.spec import EngineSpec
from hardpoint.engine.validation import max_prompt_chars
from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.chat_renderer import ChatRenderer, ChatRendererContext
from hardpoint.interfaces.engine import ModelLimits, Prompt
from hardpoint.interfaces.io_processor import IOProcessor, IOProcessorContext
from hardpoint.interfaces.tokenizer import Tokenizer, TokenizerProvider
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.rendering import plain_copy, plain_messages


class Frontend:
    """Raises ``InvalidRequestError`` for what no prompt can be made of."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        renderer: ChatRenderer,
        *,
        model_name: str = "model",
        tasks: tuple[str, ...] = ("generate",),
        eos_token_ids: tuple[int, ...] = (),
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.model_name = model_name
        self.tasks = tasks
        self.io_processor: IOProcessor | None = None
        self.inputs = InputProcessor(tokenizer, limits, eos_token_ids=eos_token_ids, tasks=tasks)
        self._renderer = renderer

    @classmethod
    def from_spec(cls, spec: EngineSpec, runtime: PluginRuntime) -> Frontend:
        """Loads tokenizer, chat renderer and IO processor through their plugins.

        Raises ``ModelFormatError`` and the plugin errors.
        """
        provider: TokenizerProvider = runtime.make_selected("tokenizer")
        tokenizer = provider.load(spec.model.artifact)
        frontend = cls(
            tokenizer,
            spec.model_limits,
            _create_renderer(spec, runtime, tokenizer),
            model_name=spec.model_name,
            tasks=spec.model.tasks,
            eos_token_ids=_eos_token_ids(spec),
        )
        if any(planned.active for planned in runtime.plan.of("io_processor")):
            facts = {"model": spec.model, "model_name": spec.model_name, "limits": spec.model_limits}
            parts = {"tokenizer": frontend.tokenizer, "render_chat": frontend.render_chat}
            frontend.io_processor = runtime.make_selected("io_processor", IOProcessorContext, **facts, **parts)
        return frontend

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: dict[str, Any] | None = None,
    ) -> Prompt:
        """The conversation as ids: only the template, never a message's text, can spell a control token.

        Raises ``InvalidRequestError`` for messages the template cannot take or the context cannot hold. Thread-safe.
        """
        plain = plain_messages(messages, max_chars=max_prompt_chars(self.limits))
        arguments = plain_copy(template_arguments or {})
        _, ids = self._renderer.render(plain, add_generation_prompt=add_generation_prompt, template_arguments=arguments)
        return Prompt(token_ids=ids)


class ModelFront:
    """A model's facts, and the outputs of its requests. ``limit`` sequences run or wait at a time (None: no limit)."""

    def __init__(
        self, frontend: Frontend, limit: int | None, observe: Callable[[StatEvent], None] | None = None
    ) -> None:
        self.model_name: str = frontend.model_name
        self.limits: ModelLimits = frontend.limits
        self.tokenizer: Tokenizer = frontend.tokenizer
        self.render_chat = frontend.render_chat
        self._frontend = frontend
        self._max_unfinished = limit
        self._outputs = OutputProcessor(frontend.tokenizer, frontend.model_name, observe=observe)


def _create_renderer(spec: EngineSpec, runtime: PluginRuntime, tokenizer: Tokenizer) -> ChatRenderer:
    bound = max_prompt_chars(spec.model_limits)
    facts = {"tokenizer": tokenizer, "model": spec.model, "template": spec.chat_template, "max_chars": bound}
    try:
        made: ChatRenderer = runtime.make_selected("chat_renderer", ChatRendererContext, **facts)
    except ModelFormatError as error:
        raise ModelFormatError(f"model {spec.model_name!r}: {error}") from None
    return made


def _eos_token_ids(spec: EngineSpec) -> tuple[int, ...]:
    """Those of the model and those of its generation defaults, which may be one id or several."""
    given = spec.model.generation.get("eos_token_id")
    return tuple(sorted({*spec.model.eos_token_ids, *([given] if isinstance(given, int) else given or ())}))

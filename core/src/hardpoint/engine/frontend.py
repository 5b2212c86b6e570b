"""What both front ends know of a model: its tokenizer, limits and chat template. No engine in here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from hardpoint.engine.input_processor import InputProcessor
from hardpoint.engine.spec import EngineSpec
from hardpoint.engine.validation import max_prompt_chars
from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.engine import ModelLimits, Prompt
from hardpoint.interfaces.io_processor import IOProcessor, IOProcessorContext
from hardpoint.interfaces.tokenizer import Tokenizer, TokenizerProvider
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.rendering import ChatRenderer


class Frontend:
    """``chat_template`` overrides the tokenizer's own. Raises ``ModelFormatError`` for one that cannot be compiled."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        *,
        model_name: str = "model",
        tasks: tuple[str, ...] = ("generate",),
        eos_token_ids: tuple[int, ...] = (),
        chat_template: str | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.limits = limits
        self.model_name = model_name
        self.tasks = tasks
        self.io_processor: IOProcessor | None = None
        self.inputs = InputProcessor(tokenizer, limits, eos_token_ids=eos_token_ids, tasks=tasks)
        try:
            self._renderer = ChatRenderer(tokenizer, chat_template, max_chars=max_prompt_chars(limits))
        except ModelFormatError as error:
            raise ModelFormatError(f"model {model_name!r}: {error}") from None

    @classmethod
    def from_spec(cls, spec: EngineSpec, runtime: PluginRuntime) -> Frontend:
        """Loads tokenizer and IO processor through their plugins. Raises ``ModelFormatError`` and the plugin errors."""
        context = runtime.context("tokenizer", spec.tokenizer)
        provider: TokenizerProvider = runtime.create("tokenizer", spec.tokenizer, context)
        frontend = cls(
            provider.load(spec.model.artifact),
            spec.model_limits,
            model_name=spec.model_name,
            tasks=spec.model.tasks,
            eos_token_ids=_eos_token_ids(spec),
            chat_template=spec.chat_template,
        )
        if spec.io_processor is not None:
            facts = {"model": spec.model, "model_name": spec.model_name, "limits": spec.model_limits}
            parts = {"tokenizer": frontend.tokenizer, "render_chat": frontend.render_chat}
            io_context = runtime.context("io_processor", spec.io_processor, IOProcessorContext, **facts, **parts)
            frontend.io_processor = runtime.create("io_processor", spec.io_processor, io_context)
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
        return Prompt(token_ids=self._renderer.render(messages, add_generation_prompt, template_arguments)[1])


def _eos_token_ids(spec: EngineSpec) -> tuple[int, ...]:
    """Those of the model and those of its generation defaults, which may be one id or several."""
    given = spec.model.generation.get("eos_token_id")
    return tuple(sorted({*spec.model.eos_token_ids, *([given] if isinstance(given, int) else given or ())}))

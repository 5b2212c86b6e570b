"""Plugin kind ``io_processor``: turns one task's raw input into prompts, and the model's outputs into its result.

Used where a client asks for a task instead of a text: ``LLM.process``, ``AsyncLLM.process`` and endpoints built on
``EngineClient.process``. A model has at most one, which ``--io-processor`` names, or else the field
``io_processor_plugin`` of the model's configuration; it is created once, in the API process.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from hardpoint.interfaces.engine import ModelLimits, Prompt, RequestOutput
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class IORequest:
    """One prompt of a task. ``params`` default to sampling up to the context length.

    ``state`` is the processor's own: :meth:`IOProcessor.finish` gets it back, nobody else reads it.
    """

    prompt: Prompt
    params: SamplingParams = field(default_factory=SamplingParams)
    state: Any = None


@dataclass(frozen=True, slots=True, kw_only=True)
class IOProcessorContext(PluginContext):
    """The model that the processor serves. ``model_name`` is the served name.

    ``render_chat(messages, add_generation_prompt=True, template_arguments=None)`` applies the chat template and raises
    ``InvalidRequestError`` for messages that it cannot take.
    """

    model_name: str
    model: ModelInfo
    limits: ModelLimits
    tokenizer: Tokenizer
    render_chat: Callable[..., Prompt]


class IOProcessor(ABC):
    """One instance serves all calls at the same time, on several threads: what a call needs belongs into ``state``."""

    @abstractmethod
    def parse(self, data: Any) -> Sequence[IORequest]:
        """The prompts of one task; ``data`` is what a client sent, JSON-able and otherwise anything.

        Raises ``InvalidRequestError`` (HTTP 400 unless its ``status`` says otherwise) for data that this processor
        does not understand, with a text that the client may read. Any other exception is the processor's own fault.
        """

    @abstractmethod
    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        """The JSON-able result; ``outputs[i]`` is the whole, finished output of ``requests[i]``, as parsed.

        Not called when a request failed in the engine. Raises ``InvalidRequestError`` like :meth:`parse`.
        """

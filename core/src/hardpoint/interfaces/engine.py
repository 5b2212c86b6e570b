"""What front ends (endpoints, CLI, Python) see of a running engine."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Annotated, Any, Protocol

import msgspec
from msgspec import Meta

from hardpoint.interfaces.kv_events import KVEventBatch
from hardpoint.interfaces.request import Feature as Feature
from hardpoint.interfaces.request import FinishReason, Float32Array, PoolingParams, SamplingParams, SchedulerStats
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint.plugins.report import LoadReport


@dataclass(frozen=True, slots=True)
class Prompt:
    """Text or token ids; exactly one is set. ``add_special_tokens``: prepend BOS and the like to ``text``.

    ``features`` are what is no text. Where a model has an encoder for text, a prompt without them is its input, and the
    decoder begins as the model's configuration says; with them the prompt is the decoder's own beginning.
    """

    text: str | None = None
    token_ids: Sequence[int] | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    features: tuple[Feature, ...] = ()


class RequestOptions(msgspec.Struct, frozen=True):
    """Per-request settings that are not sampling. ``timeout_s`` counts from arrival; ``external_id`` is for logs
    only."""

    priority: Annotated[int, Meta(ge=1 - 2**31, le=2**31 - 1)] = 0
    tenant: str = ""
    timeout_s: Annotated[float, Meta(gt=0, le=24 * 3600)] | None = None
    external_id: Annotated[str, Meta(max_length=256)] | None = None
    adapter: str | None = None
    extensions: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class Logprob:
    """One alternative: ``rank`` is 1-based, or None where unknown."""

    token_id: int
    logprob: float
    text: str
    token_bytes: bytes
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class PositionLogprobs:
    """The chosen token and the top alternatives (most likely first) of one position."""

    chosen: Logprob
    top: tuple[Logprob, ...] = ()


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One of ``n`` sequences; text, ids and logprobs are full or new parts as ``SamplingParams.output_kind`` says."""

    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[PositionLogprobs, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_generated_tokens: int = 0

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """Seconds since arrival; None where the phase was not reached."""

    arrival_time: float
    queue_s: float | None = None
    ttft_s: float | None = None
    e2e_s: float | None = None
    decode_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """State of one request. ``error`` is a client-safe text when a sequence ended with ``FinishReason.ERROR``."""

    request_id: str
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    finished: bool
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[PositionLogprobs | None, ...] | None = None
    metrics: RequestMetrics | None = None
    error: str | None = None
    pooled: Any = None
    extensions: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EmbeddingOutput:
    """``embedding`` is float32 [D], or [prompt, D] where every token was to have its own."""

    request_id: str
    prompt_token_ids: tuple[int, ...]
    embedding: Float32Array
    num_cached_tokens: int = 0

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.prompt_token_ids)


@dataclass(frozen=True, slots=True)
class ModelLimits:
    """Bounds the one request validator checks. Counts; ``vocab_size`` is the width of the logits.

    ``embedding_size`` is that of hidden states, None where not known; ``max_step_tokens`` the tokens of one step, for a
    model that can only compute a prompt as a whole; ``decoder_prompt`` what the decoder of a model is given where
    prompts are its encoder's.
    """

    vocab_size: int
    max_model_len: int
    max_logprobs: int = 20
    max_n: int = 128
    max_prompts: int = 256
    max_stop_strings: int = 16
    max_stop_chars: int = 512
    max_num_seqs: int = 256
    embedding_size: int | None = None
    decoder_prompt: tuple[int, ...] = ()
    max_step_tokens: int | None = None


class EngineClient(Protocol):
    """An asynchronous handle on one engine."""

    @property
    def model_name(self) -> str: ...
    @property
    def limits(self) -> ModelLimits: ...
    @property
    def tokenizer(self) -> Tokenizer: ...
    @property
    def tasks(self) -> tuple[str, ...]: ...

    def generate(
        self, prompt: Prompt, params: SamplingParams, options: RequestOptions | None = None
    ) -> AsyncGenerator[RequestOutput, None]:
        """Yield outputs as they come; the last one has ``finished``. Closing the generator aborts the request.

        Raises ``InvalidRequestError`` before anything is queued, ``OverloadedError``, ``EngineDeadError``,
        ``EngineNotReadyError``.
        """

    async def embed(
        self, prompt: Prompt, params: PoolingParams | None = None, options: RequestOptions | None = None
    ) -> EmbeddingOutput:
        """The embedding of one prompt. Raises what :meth:`generate` raises; cancelling aborts the request."""

    async def process(self, data: Any, options: RequestOptions | None = None) -> Any:
        """The JSON-able result of one task of the model's IO processor. Cancelling aborts its requests.

        Raises what :meth:`generate` raises; ``InvalidRequestError`` with the code ``no_io_processor`` where the model
        has none.
        """

    def check_batch(self, num_prompts: int, n: int) -> None:
        """Prompts and sequences of one call, before anything is built for them. Raises ``InvalidRequestError``."""

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: dict[str, Any] | None = None,
    ) -> Prompt:
        """Apply the chat template. Raises ``InvalidRequestError`` for messages it cannot take.

        Takes up to two seconds whatever the messages' length, and is thread-safe: event loops call it on a thread.
        """

    @property
    def is_ready(self) -> bool:
        """Loaded, alive, not draining, step loop advancing."""

    @property
    def is_alive(self) -> bool: ...

    @property
    def dead_reason(self) -> str | None: ...

    def stats(self) -> SchedulerStats | None:
        """Latest statistics, None before the first step."""

    def on_kv_events(self, sink: Callable[[KVEventBatch], None]) -> None:
        """Call ``sink`` on the event loop with every later batch, in order. It must not block.

        Raises ``ConfigError`` without the setting ``kv_events``, since nothing would ever come.
        """

    async def reset_prefix_cache(self) -> bool:
        """False when blocks are in use, so that nothing was dropped. Raises ``EngineDeadError``."""

    async def load_reports(self) -> Sequence[LoadReport]:
        """Plugins of the engine process and then of each worker process in rank order, as they are now.

        The engine answers between two steps. Raises ``EngineDeadError``.
        """


class ModelRouter(Protocol):
    """Resolves a model name to an engine; endpoints know no other way to reach one."""

    def names(self) -> tuple[str, ...]: ...

    def resolve(self, model: str | None) -> EngineClient:
        """None means the only or default model. Raises ``InvalidRequestError`` with status 404 for an unknown name."""

    def clients(self) -> tuple[EngineClient, ...]: ...

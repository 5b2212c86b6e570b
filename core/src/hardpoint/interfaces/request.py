"""Requests as they cross the process boundary, and what comes back.

All records are frozen ``msgspec`` structs: typed msgpack on every socket. Arrays are ``numpy`` arrays and travel as raw
bytes with dtype and shape (see ``hardpoint.ipc``).
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec import Meta

from hardpoint.interfaces.kv_events import KVEventBatch

Int32Array = npt.NDArray[np.int32]
Float32Array = npt.NDArray[np.float32]
BoolArray = npt.NDArray[np.bool_]


class FinishReason(enum.StrEnum):
    """Why a request ended. ``LENGTH`` covers both the token limit and a prompt over the context length."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


class OutputKind(enum.StrEnum):
    """What each yielded output holds: everything so far, only what is new, or one output at the end."""

    CUMULATIVE = "cumulative"
    DELTA = "delta"
    FINAL_ONLY = "final_only"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to draw tokens. Validated against model and server limits by ``hardpoint.engine.validation`` only.

    ``temperature`` below 1e-5 is greedy; ``top_k`` 0 means all; ``max_tokens`` None means up to the context length;
    ``logprobs`` is the number of alternatives per token (None: none, -1: the whole vocabulary, if the server allows).
    """

    n: int = 1
    max_tokens: int | None = None
    min_tokens: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    temperature: Annotated[float, Meta(ge=0, le=100)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0, le=2**31 - 1)] = 0
    min_p: Annotated[float, Meta(ge=0, le=1)] = 0.0
    presence_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    frequency_penalty: Annotated[float, Meta(ge=-2, le=2)] = 0.0
    repetition_penalty: Annotated[float, Meta(gt=0, le=10)] = 1.0
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    include_stop_str_in_output: bool = False
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: dict[int, Annotated[float, Meta(ge=-100, le=100)]] = {}
    allowed_token_ids: tuple[int, ...] = ()
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    skip_special_tokens: bool = True
    detokenize: bool = True
    output_kind: OutputKind = OutputKind.CUMULATIVE
    extensions: dict[str, Any] = {}

    @property
    def is_greedy(self) -> bool:
        return self.temperature < 1e-5


POOLING_METHODS = ("last", "cls", "mean", "token_embed")
"""Ways from the hidden states of a prompt to its embedding: the last or first one, their mean, or each on its own."""


class PoolingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """How to embed a prompt; what is None is as the model itself has it.

    Attributes:
        pooling: one of :data:`POOLING_METHODS`.
        normalize: scale embeddings to length 1.
        dimensions: leading entries to keep, before normalization; for models whose embeddings can be cut.
    """

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None


class Feature(msgspec.Struct, frozen=True, kw_only=True):
    """One non-text item of a prompt: ``length`` placeholder positions from ``offset`` on stand for it.

    ``content_hash`` identifies type, shape and bytes, so that equal placeholders with other content never share KV.
    """

    modality: str
    content_hash: str
    offset: int
    length: int
    num_encoder_tokens: int | None = None
    data: dict[str, np.ndarray] = {}


class AdapterRef(msgspec.Struct, frozen=True):
    """A weight adapter (LoRA and the like): ``name`` is its identity in prefix hashes, ``slot_id`` its number."""

    name: str
    slot_id: int
    path: str


class RequestWork(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """What scheduler and workers both know of a request. ``request_id`` is internal and unique; a client's own id never
    appears here.

    Attributes:
        prompt_embeds: float32 ``[prompt, hidden]`` or None.
        task: what is wanted of the model: ``generate``, or ``embed``, which has ``pooling`` and ends with a pooled
            result instead of tokens.
    """

    request_id: str
    sampling: SamplingParams
    prompt_embeds: np.ndarray | None = None
    features: tuple[Feature, ...] = ()
    adapter: AdapterRef | None = None
    task: str = "generate"
    pooling: PoolingParams | None = None


class EngineRequest(RequestWork, frozen=True, kw_only=True, omit_defaults=True):
    """One schedulable sequence.

    Attributes:
        prompt_token_ids: int32 ``[prompt]``; placeholder ids of equal length when only embeddings are given.
        eos_token_ids: ids that end generation unless ``ignore_eos``; already merged with the model's generation config.
        deadline: absolute ``time.time()`` seconds after which the request is aborted, or None.
        transfer: parameters for KV connectors; only from a trusted router.
    """

    prompt_token_ids: Int32Array
    eos_token_ids: tuple[int, ...] = ()
    arrival_time: float = 0.0
    client_index: int = 0
    cache_salt: str | None = None
    priority: int = 0
    deadline: float | None = None
    tenant: str = ""
    transfer: dict[str, Any] = {}


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Log-probabilities of one position: the sampled (or given) token first, then the top alternatives.

    ``ranks`` holds the 1-based rank of the first token in the full distribution.
    """

    token_ids: list[int]
    logprobs: list[float]
    rank: int


class EngineOutput(msgspec.Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """What one step produced for one request. ``finish_reason`` set marks the one terminal event.

    ``stop_reason`` is the stop token id, or None for end-of-sequence; ``error`` a client-safe text for ``ERROR``. There
    is one per running request and step, so the garbage collector does not look at them: nothing that an output holds
    may refer back to it.
    """

    request_id: str
    new_token_ids: list[int]
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    num_cached_tokens: int = 0
    logprobs: list[TokenLogprobs] | None = None
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    error: str | None = None
    first_scheduled_time: float | None = None
    extensions: dict[str, Any] = {}
    pooled: np.ndarray | None = None


class SchedulerStats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Counts after a step. Cumulative counters never decrease within one engine process.

    Attributes:
        num_waiting: all that wait, ``num_skipped`` of them held back by what they depend on.
        num_cached_blocks: distinct prefixes in the index, in use or not. num_evictions: cached blocks that were reused.
        prefix_cache_queries: prompt tokens of admitted requests, ``prefix_cache_hits`` of them found; the ``recent``
            ones count the last thousand requests or so only.
    """

    num_running: int = 0
    num_waiting: int = 0
    num_free_blocks: int = 0
    num_total_blocks: int = 0
    prefix_cache_queries: int = 0
    prefix_cache_hits: int = 0
    num_preemptions: int = 0
    num_skipped: int = 0
    num_cached_blocks: int = 0
    num_evictions: int = 0
    recent_prefix_queries: int = 0
    recent_prefix_hits: int = 0
    step_id: int = 0
    extensions: dict[str, Any] = {}

    @property
    def kv_cache_usage(self) -> float:
        """Fraction of usable blocks that are referenced, 0 to 1."""
        return 1.0 - self.num_free_blocks / self.num_total_blocks if self.num_total_blocks else 0.0


class EngineOutputs(msgspec.Struct, frozen=True, omit_defaults=True):
    """One frame per step and client. Events of the KV cache go to the first client only."""

    outputs: list[EngineOutput] = []
    stats: SchedulerStats | None = None
    timestamp: float = 0.0
    kv_events: KVEventBatch | None = None

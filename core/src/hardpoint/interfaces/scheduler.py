"""Plugin kind ``scheduler``: who computes how many tokens in the next step, and where their KV lives.

The engine core drives any scheduler through this loop and no other::

    step = scheduler.schedule()           # SchedulerOutput; state advances optimistically
    future = executor.execute(step)       # RunnerOutput, or Deferred followed by executor.sample(...)
    outputs = scheduler.update(step, future.result())

Up to ``max_inflight_steps`` steps may be between ``schedule`` and ``update``; updates come in step order.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from hardpoint.interfaces.kv_cache import KVCacheConfig
from hardpoint.interfaces.kv_events import KVEvent
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.request import EngineOutput, EngineRequest, FinishReason, Int32Array, SchedulerStats
from hardpoint.interfaces.step import RunnerOutput, SchedulerOutput


class PauseMode(enum.StrEnum):
    """``NEW`` admits nobody new; ``ALL`` schedules nothing at all."""

    NONE = "none"
    NEW = "new"
    ALL = "all"


class SchedulerLimits(msgspec.Struct, frozen=True, kw_only=True):
    """Budgets. ``max_num_seqs`` sizes worker slots; ``max_num_active_seqs`` limits running requests (None: the same).

    Attributes:
        max_scheduled_tokens: tokens the scheduler decides on per step; what ``max_num_batched_tokens``, the size of the
            workers' batch, has beyond it is room for drafts (None: none).
        long_prefill_threshold: caps one request's new tokens per step while others wait (0: off).
        adaptive_prefill_threshold: raises that cap to an equal share of the batch when that is more.
        watermark: the fraction of blocks that admission leaves free.
        num_pipeline_stages: steps between two decodes of one request while several steps are under way.
        encoder_budget: embeddings that media encoders compute per step (0: as many as the scheduler sees fit).
        encoder_cache_size: embeddings of encoder outputs that the workers keep.
        prefill_interval: prefills go on in every such step only, at the same time in all data-parallel engines.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    max_num_active_seqs: int | None = None
    max_waiting: int | None = None
    long_prefill_threshold: int = 0
    chunked_prefill: bool = True
    prefix_caching: bool = True
    kv_events: bool = False
    full_sequence_must_fit: bool = False
    watermark: float = 0.0
    max_inflight_steps: int = 1
    max_scheduled_tokens: int | None = None
    adaptive_prefill_threshold: bool = False
    num_pipeline_stages: int = 1
    encoder_budget: int = 0
    encoder_cache_size: int = 0
    prefill_interval: int = 1


class RequestView(Protocol):
    """What an extension may see of a live request. Token lists are read-only views."""

    @property
    def request_id(self) -> str: ...
    @property
    def record(self) -> EngineRequest: ...
    @property
    def num_tokens(self) -> int: ...
    @property
    def num_prompt_tokens(self) -> int: ...
    @property
    def num_computed_tokens(self) -> int: ...
    @property
    def output_token_ids(self) -> Sequence[int]: ...


@dataclass(frozen=True, slots=True)
class ExternalMatch:
    """KV available elsewhere beyond the local prefix: ``num_tokens`` more tokens; ``asynchronous`` loads take steps."""

    num_tokens: int
    asynchronous: bool = False


@dataclass(frozen=True, slots=True)
class LoadResult:
    """The end of an asynchronous load: the first ``num_tokens`` of those to load are there (None: all of them).

    The rest is computed, unless ``error`` is set, a client-safe text with which the request then ends. Where layers do
    not keep every token (windows, chunks, states) a part is of no use: all behind the local prefix is computed.
    """

    request_id: str
    num_tokens: int | None = None
    error: str | None = None


class WaitReason(enum.StrEnum):
    """What a request held back waits for. Streaming input keeps its place among those that run."""

    DEPENDENCY = "dependency"
    GRAMMAR = "grammar"
    REMOTE_KV = "remote_kv"
    STREAMING_INPUT = "streaming_input"


ENCODER_INPUTS = "encoder_inputs"
"""Key of :class:`EncoderInputs` in ``SchedulerOutput.extensions``."""


class EncoderInputs(msgspec.Struct, frozen=True):
    """What media encoders do before the step's forward; all rows may use the outputs.

    ``rows`` int32 [N] index the step's rows and ``features`` int32 [N] the ``features`` of each row's request.
    ``freed``: content hashes of outputs to drop first, where they are there. All others are kept.
    """

    rows: Int32Array
    features: Int32Array
    freed: tuple[str, ...] = ()


class SchedulerExtension:
    """A feature's seat in the scheduler (grammars, adapters, KV connectors, speculation). Override what is needed.

    ``name`` keys the extension's structs in ``SchedulerOutput.extensions`` and ``RunnerOutput.extensions``;
    ``wait_reason`` says why the requests it blocks wait. ``drafts_on_worker``: after each sample the worker has
    :meth:`num_lookahead_tokens` guesses of its own, so the next step is planned with them before anybody sees them.
    Methods run inside the step loop: they must not block.
    """

    name: str = ""
    wait_reason: WaitReason = WaitReason.DEPENDENCY
    drafts_on_worker: bool = False

    def on_added(self, request: RequestView) -> None:
        """The request entered the waiting queue."""

    def is_blocked(self, request: RequestView) -> bool:
        """True keeps the request out of this step's admission without blocking those behind it."""
        return False

    def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
        """Tokens whose KV can be had elsewhere beyond the block-aligned local hit. None: cannot answer yet, ask
        again."""
        return ExternalMatch(0)

    def take_loaded(self) -> Iterable[LoadResult]:
        """Asynchronous loads that ended, each once; also those of requests that are gone, whose blocks wait for it."""
        return ()

    def num_lookahead_tokens(self, request: RequestView) -> int:
        """Extra slots to allocate beyond the scheduled tokens (draft tokens)."""
        return 0

    def after_allocation(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        """Blocks (per group) were allocated for the request."""

    def build_metadata(self, step: SchedulerOutput) -> Any | None:
        """Msgpack-able struct to ship with the step, or None."""
        return None

    def on_output(self, step: SchedulerOutput, payload: Any | None) -> None:
        """The worker's struct for this extension; called once per updated step, None if the worker sent none."""

    def may_free(self, request: RequestView) -> bool:
        """False delays freeing the finished request's blocks until :meth:`take_freeable` returns it."""
        return True

    def take_freeable(self) -> Iterable[str]:
        """Request ids whose delayed blocks may now be freed; each is returned once."""
        return ()


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerContext(PluginContext):
    """What a scheduler factory receives beyond the common context."""

    limits: SchedulerLimits
    kv_cache: KVCacheConfig
    hash_algorithm: str = "sha256"
    extensions: tuple[SchedulerExtension, ...] = ()


class Scheduler(ABC):
    """One per engine; called from one thread only. Every added request yields exactly one terminal output:
    from :meth:`update`, or from :meth:`finish` for requests ended from outside."""

    @abstractmethod
    def add(self, request: EngineRequest) -> EngineOutput | None:
        """Queue a request. Returns a terminal output when it can never run (for example a prompt over the limit).

        Raises ``OverloadedError`` when ``max_waiting`` is reached, ``ValueError`` for a duplicate live id.
        """

    @abstractmethod
    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        """End live requests from outside (abort, deadline, stop string found by the front end); unknown ids are
        ignored.

        Blocks are free when this returns, or as soon as in-flight steps that use them are updated.
        """

    @abstractmethod
    def schedule(self) -> SchedulerOutput:
        """Decide the next step and advance the state optimistically. May be empty (``num_tokens == 0``)."""

    @abstractmethod
    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        """Apply results: append tokens, check stops and limits, free what finished. Outputs hold only changed
        requests."""

    def take_outputs(self) -> list[EngineOutput]:
        """Terminal outputs that arose without a step, such as a deadline passed while waiting; each returned once.

        The loop asks when :meth:`schedule` returned nothing to execute; otherwise :meth:`update` delivers them.
        """
        return []

    def take_events(self) -> Sequence[KVEvent]:
        """What happened to cached blocks since the last call, in order; always empty unless ``limits.kv_events``."""
        return ()

    @abstractmethod
    def has_work(self) -> bool:
        """True while a call of :meth:`schedule` could compute something or must deliver finished slots."""

    @abstractmethod
    def live_request_ids(self) -> Iterable[str]:
        """Ids of all requests without a terminal output."""

    @abstractmethod
    def stats(self) -> SchedulerStats: ...

    @abstractmethod
    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        """Forget cached prefixes; False, with nothing changed, when blocks are still in use.

        ``reset_running``: preempt all running requests first and compute them anew; what is under way for them is
        thrown away. A scheduler that preempts nobody answers as without.
        """

    @abstractmethod
    def set_pause(self, mode: PauseMode) -> None: ...

    @abstractmethod
    def check_integrity(self) -> None:
        """Raise ``RuntimeError`` naming the violated invariant; cheap enough to call when idle."""

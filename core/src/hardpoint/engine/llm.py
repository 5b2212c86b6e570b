"""The offline front end: everything in the caller's own process, so that tracebacks are plain."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from typing import Any

import msgspec

from hardpoint.config import AppConfig
from hardpoint.engine.build import build_engine
from hardpoint.engine.core import EngineCore
from hardpoint.engine.frontend import Frontend, ModelFront
from hardpoint.engine.input_processor import ProcessedRequest
from hardpoint.engine.io_tasks import embedding_of, start_task
from hardpoint.engine.output_state import RequestState
from hardpoint.errors import EngineDeadError, InvalidRequestError
from hardpoint.interfaces.engine import EmbeddingOutput, Prompt, RequestOptions, RequestOutput
from hardpoint.interfaces.request import EngineOutputs, OutputKind, PoolingParams, SamplingParams
from hardpoint.launch import Launcher, launch_config, launch_model
from hardpoint.process import announce_stop, starting
from hardpoint.roles import ProcessRole

PromptLike = str | Sequence[int] | Prompt
Prompts = PromptLike | Sequence[PromptLike]
ROLES = frozenset({ProcessRole.API, ProcessRole.ENGINE, ProcessRole.WORKER})
DEFAULT_MAX_TOKENS = 256
"""Where a call gives no params: a model that never ends its text should not fill the whole context unasked."""


class LLM(ModelFront, AbstractContextManager["LLM"]):
    """``LLM("smollm2").generate(["Hello"])``. Not thread-safe; use it as a context manager or call :meth:`shutdown`.

    ``settings`` are the command line's in their Python spelling (``dtype="bfloat16"``, ``max_num_seqs=8``); ``plugins``
    maps kind and name of plugins to their options, as in a configuration file.
    ``launch`` turns name and settings into a spec and this process's plugins.
    """

    def __init__(self, model: str, *, launch: Launcher = launch_model, **settings: Any) -> None:
        started = launch(model, settings, ROLES)
        with starting(started.runtime):
            frontend = Frontend.from_spec(started.spec, started.runtime)
            core = build_engine(started.spec, started.runtime)
        self._assemble(core, frontend, started.spec.max_unfinished, lambda: announce_stop(started.runtime))

    @classmethod
    def from_config(cls, config: AppConfig) -> LLM:
        """The one engine of a whole configuration, as the command line makes it."""
        return cls("", launch=lambda _model, _settings, roles: launch_config(config, roles))

    @classmethod
    def from_parts(cls, core: EngineCore, frontend: Frontend, *, max_unfinished: int | None = None) -> LLM:
        """Over an engine core that exists already; it is owned from here on."""
        llm = cls.__new__(cls)
        llm._assemble(core, frontend, max_unfinished, lambda: None)
        return llm

    def _assemble(self, core: EngineCore, frontend: Frontend, limit: int | None, on_stop: Callable[[], None]) -> None:
        ModelFront.__init__(self, frontend, limit)
        self.core = core
        self._on_stop: Callable[[], None] | None = on_stop

    def generate(
        self,
        prompts: Prompts,
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        options: RequestOptions | None = None,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete every prompt (a text, ids, or a list of such) and return the outputs in the order given.

        One ``params`` serves all prompts; a list has one each. All requests are checked before the first one runs.
        Raises ``InvalidRequestError``, ``EngineDeadError``.
        """
        asked = _as_prompts(prompts)
        each = _as_params(params, len(asked))
        processed = [self._process(prompt, one, options) for prompt, one in zip(asked, each, strict=True)]
        return self._run(processed, show_progress)

    def stream(
        self, prompts: Prompts, params: SamplingParams, *, options: RequestOptions | None = None
    ) -> Iterator[tuple[int, RequestOutput]]:
        """Yield ``(index of the prompt, output)`` as outputs come, all prompts in one batch.

        Leaving the iterator early aborts what still runs. Raises like :meth:`generate`.
        """
        processed = [self._frontend.inputs.process(prompt, params, options) for prompt in _as_prompts(prompts)]
        return self._stream(processed)

    def chat(
        self,
        messages: Sequence[dict[str, Any]] | Sequence[Sequence[dict[str, Any]]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        template_arguments: dict[str, Any] | None = None,
        show_progress: bool = False,
    ) -> list[RequestOutput]:
        """Answer one conversation, or each of several."""
        several: Iterable[Any] = [messages] if messages and isinstance(messages[0], dict) else messages
        prompts = [self.render_chat(one, template_arguments=template_arguments) for one in several]
        return self.generate(prompts, params, show_progress=show_progress)

    def embed(
        self,
        prompts: Prompts,
        *,
        pooling: str | None = None,
        normalize: bool | None = None,
        dimensions: int | None = None,
        options: RequestOptions | None = None,
    ) -> list[EmbeddingOutput]:
        """The embedding of every prompt, in the order given. See :class:`PoolingParams` for the settings, each of which
        is the model's own by default. Raises like :meth:`generate`, and for a request that failed in the engine.
        """
        params = PoolingParams(pooling=pooling, normalize=normalize, dimensions=dimensions)
        processed = [self._frontend.inputs.process(prompt, params, options) for prompt in _as_prompts(prompts)]
        return [embedding_of(output) for output in self._run(processed, show_progress=False)]

    def process(self, data: Any, *, options: RequestOptions | None = None) -> Any:
        """The result of one task of the model's IO processor. Raises ``InvalidRequestError`` where it has none."""
        requests, finish = start_task(self._frontend.io_processor, data, self.limits)
        return finish(self.generate([r.prompt for r in requests], [r.params for r in requests], options=options))

    def reset_prefix_cache(self) -> bool:
        return bool(self.core.utility("reset_prefix_cache"))

    def shutdown(self) -> None:
        """Stop the workers. Idempotent."""
        if self._on_stop is not None:
            on_stop, self._on_stop = self._on_stop, None
            self.core.shutdown()
            on_stop()

    def __exit__(self, *exception: object) -> None:
        self.shutdown()

    def _process(self, prompt: Prompt, params: Any, options: RequestOptions | None) -> ProcessedRequest:
        """Nobody reads in between, so only a final output is made. Odd types are left for the validator to refuse."""
        ids = self._frontend.inputs.tokenize(prompt)
        if params is None:
            room = self.limits.max_model_len - len(self.limits.decoder_prompt or ids)
            params = SamplingParams(max_tokens=min(DEFAULT_MAX_TOKENS, room))
        if isinstance(params, SamplingParams):
            params = msgspec.structs.replace(params, output_kind=OutputKind.FINAL_ONLY)
        return self._frontend.inputs.process(prompt, params, options, ids)

    def _run(self, processed: list[ProcessedRequest], show_progress: bool) -> list[RequestOutput]:
        """Progress is one line on stderr, written anew."""
        states: list[RequestState] = []
        total, shown = len(processed), 0
        for _ in self._steps(processed, states):
            done = sum(state.finished for state in states)
            if show_progress and done > shown:
                shown = done
                print(f"\r{done}/{total} prompts", end="\n" if done == total else "", file=sys.stderr, flush=True)
        return [_result(state) for state in states]

    def _stream(self, processed: list[ProcessedRequest]) -> Iterator[tuple[int, RequestOutput]]:
        states: list[RequestState] = []
        # Once more at the end: another call on this object may have computed our last tokens while nobody read here.
        for _ in chain(self._steps(processed, states), (None,)):
            for index, state in enumerate(states):
                if (output := state.take()) is not None:
                    yield index, output

    def _steps(self, processed: list[ProcessedRequest], states: list[RequestState]) -> Iterator[None]:
        """Step until all is done, filling ``states``; an exception or an early end aborts what still runs."""
        backlog = deque(processed)
        try:
            while backlog or not all(state.finished for state in states):
                with interrupts_deferred():
                    self._feed(backlog, states)
                    for frame in self._step():
                        self.core.abort(self._outputs.process(frame))
                yield
        except BaseException:
            self.core.abort([name for state in states for name in self._outputs.abort(state.processed.request_id)])
            raise

    def _step(self) -> list[EngineOutputs]:
        if self._on_stop is None:
            raise EngineDeadError("this LLM was shut down; make another one")
        frames = list(self.core.step().values())
        if self.core.dead_reason is not None:
            raise EngineDeadError(self.core.dead_reason)
        if not self.core.made_progress:
            time.sleep(0.001)  # Nothing can be computed now: what is waited for comes from elsewhere.
        return frames

    def _feed(self, backlog: deque[ProcessedRequest], states: list[RequestState]) -> None:
        """Hand over what the waiting queue takes: an offline batch may be longer than a server's queue."""
        limit = self._max_unfinished
        while backlog:
            busy = self._outputs.num_sequences
            if limit is not None and busy and busy + len(backlog[0].requests) > limit:
                return
            one = backlog.popleft()
            for request in one.requests:
                self.core.add(request)
            states.append(self._outputs.add(one))


def _result(state: RequestState) -> RequestOutput:
    output = state.take()
    if output is None:
        raise RuntimeError(f"request {state.processed.request_id} ended without an output")
    return output


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Hold back Ctrl-C: a step that ends half-way would leave scheduler and workers at odds for good."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    received: list[int] = []
    previous = signal.signal(signal.SIGINT, lambda number, frame: received.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, previous if previous is not None else signal.default_int_handler)
    if received:
        signal.raise_signal(signal.SIGINT)


def _as_prompts(prompts: Any) -> list[Prompt]:
    if isinstance(prompts, Iterable) and not isinstance(prompts, str | bytes | Mapping | Sequence):
        prompts = list(prompts)
    if isinstance(prompts, bytes | Mapping) or not isinstance(prompts, Sequence | Prompt):
        kind = type(prompts).__name__
        raise InvalidRequestError(f"prompts are a text, token ids or a list of such, not a {kind}", param="prompts")
    if isinstance(prompts, str | Prompt) or (len(prompts) and isinstance(prompts[0], int)):
        prompts = [prompts]
    texts = [Prompt(text=prompt) if isinstance(prompt, str) else prompt for prompt in prompts]
    return [prompt if isinstance(prompt, Prompt) else Prompt(token_ids=prompt) for prompt in texts]


def _as_params(params: Any, count: int) -> list[Any]:
    if params is None or isinstance(params, SamplingParams):
        return [params] * count
    if len(params) != count:
        raise InvalidRequestError(f"{len(params)} params for {count} prompts; give one, or one each", param="params")
    return list(params)

"""From a prompt and its parameters to the requests the engine schedules: one per sequence."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import msgspec

from hardpoint.engine import validation
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import ModelLimits, Prompt, RequestOptions
from hardpoint.interfaces.request import EngineRequest, Feature, Int32Array, OutputKind, PoolingParams, SamplingParams
from hardpoint.interfaces.tokenizer import Tokenizer

_INT64 = 2**64
_NOTHING_SAMPLED = SamplingParams(output_kind=OutputKind.FINAL_ONLY, detokenize=False)


@dataclass(frozen=True, slots=True)
class ProcessedRequest:
    """One validated call. ``requests`` has one entry per sequence; ``prompt_text`` is None for a prompt of ids."""

    request_id: str
    prompt_text: str | None
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    requests: tuple[EngineRequest, ...]
    arrival_time: float


class InputProcessor:
    """Stateless but for what is fixed per model. ``eos_token_ids`` end generation unless a request ignores them."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        limits: ModelLimits,
        *,
        eos_token_ids: tuple[int, ...] = (),
        tasks: tuple[str, ...] = ("generate",),
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._tokenizer = tokenizer
        self._limits = limits
        self._eos_token_ids = eos_token_ids
        self._tasks = tasks
        self._clock = clock

    def tokenize(self, prompt: Prompt, task: str = "generate") -> Int32Array:
        """Checked prompt ids. Safe on any thread, so that long texts need not hold up an event loop."""
        if task not in self._tasks:
            asked, served = task.replace("generate", "generate text"), ", ".join(self._tasks) or "nothing"
            raise InvalidRequestError(f"this model does not {asked}; it serves {served}", code="unsupported_task")
        validation.validate_prompt(prompt, self._limits)
        ids = prompt.token_ids
        if prompt.text is not None:
            ids = self._tokenizer.encode(prompt.text, add_special_tokens=prompt.add_special_tokens)
        return validation.validate_token_ids(ids, self._limits, room=int(task == "generate"))

    def process(
        self,
        prompt: Prompt,
        params: SamplingParams | PoolingParams,
        options: RequestOptions | None = None,
        token_ids: Int32Array | None = None,
    ) -> ProcessedRequest:
        """``token_ids`` is the result of :meth:`tokenize` where the caller has it. Raises ``InvalidRequestError``."""
        arrival = self._clock()
        options = options or RequestOptions()
        validation.validate_options(options)
        task = task_of(params)
        ids = self.tokenize(prompt, task) if token_ids is None else token_ids
        checked, pooling, features = _NOTHING_SAMPLED, None, validation.validate_features(prompt.features)
        if self._limits.decoder_prompt and not features:
            facts: dict[str, Any] = {"content_hash": sha256(ids.tobytes()).hexdigest(), "data": {"token_ids": ids}}
            features = (Feature(modality="text", offset=0, length=1, num_encoder_tokens=len(ids), **facts),)
            ids = validation.validate_token_ids(self._limits.decoder_prompt, self._limits)
        if isinstance(params, PoolingParams):
            pooling = validation.validate_pooling(params, self._limits)
        else:
            checked = validation.validate_sampling(params, len(ids), self._limits, self._eos_token_ids)
        request_id = uuid.uuid4().hex
        requests = tuple(
            EngineRequest(
                request_id=request_id if checked.n == 1 else f"{request_id}-{index}",
                prompt_token_ids=ids,
                features=features,
                sampling=_child_params(checked, index),
                eos_token_ids=self._eos_token_ids,
                arrival_time=arrival,
                cache_salt=_salt(prompt, options),
                priority=options.priority,
                deadline=None if options.timeout_s is None else arrival + options.timeout_s,
                tenant=options.tenant,
                task=task,
                pooling=pooling,
            )
            for index in range(checked.n)
        )
        return ProcessedRequest(request_id, prompt.text, tuple(ids.tolist()), checked, requests, arrival)


def task_of(params: SamplingParams | PoolingParams) -> str:
    return "embed" if isinstance(params, PoolingParams) else "generate"


def _child_params(params: SamplingParams, index: int) -> SamplingParams:
    """Sequence ``index`` draws with its own seed; the prompt's log-probabilities are asked for once."""
    if params.n == 1:
        return params
    seed = None if params.seed is None else (params.seed + index + _INT64 // 2) % _INT64 - _INT64 // 2
    prompt_logprobs = params.prompt_logprobs if index == 0 else None
    return msgspec.structs.replace(params, n=1, seed=seed, prompt_logprobs=prompt_logprobs)


def _salt(prompt: Prompt, options: RequestOptions) -> str | None:
    """Tenants never share cached prefixes (class 45); no salt or tenant may hold the slash that keeps them apart."""
    return f"{options.tenant}/{prompt.cache_salt or ''}" if options.tenant else prompt.cache_salt

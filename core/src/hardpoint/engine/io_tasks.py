"""Runs one task of an IO processor: parse, generate every prompt, finish; and waits for whole results of other tasks.

The same for both front ends.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Any

import msgspec

from hardpoint.engine.validation import validate_batch
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import EmbeddingOutput, EngineClient, ModelLimits, RequestOptions, RequestOutput
from hardpoint.interfaces.io_processor import IOProcessor, IORequest
from hardpoint.interfaces.request import FinishReason, OutputKind

Finish = Callable[[Sequence[RequestOutput]], Any]


async def last_output(stream: AsyncGenerator[RequestOutput, None]) -> RequestOutput:
    async with contextlib.aclosing(stream):
        return [output async for output in stream][-1]


def embedding_of(output: RequestOutput) -> EmbeddingOutput:
    """Raises ``InvalidRequestError`` with status 500 for a request that ended without its result."""
    if output.pooled is None:
        raise _failure(output)
    return EmbeddingOutput(output.request_id, output.prompt_token_ids, output.pooled, output.num_cached_tokens)


def _failure(output: RequestOutput) -> InvalidRequestError:
    message = output.error or "the request failed in the engine"
    return InvalidRequestError(message, code="request_failed", status=500)


def start_task(processor: IOProcessor | None, data: Any, limits: ModelLimits) -> tuple[list[IORequest], Finish]:
    """The prompts, and what makes the result of their outputs.

    Raises ``InvalidRequestError`` without a processor, for data that it refuses, and for more prompts than allowed.
    """
    if processor is None:
        message = "this model has no IO processor; the operator names one with --io-processor"
        raise InvalidRequestError(message, param="model", code="no_io_processor")
    requests = list(processor.parse(data))
    validate_batch(len(requests), max((request.params.n for request in requests), default=1), limits)

    def finish(outputs: Sequence[RequestOutput]) -> Any:
        for output in outputs:
            if any(sequence.finish_reason is FinishReason.ERROR for sequence in output.outputs):
                raise _failure(output)
        return processor.finish(requests, outputs)

    return requests, finish


async def process_task(
    client: EngineClient, processor: IOProcessor | None, data: Any, options: RequestOptions | None = None
) -> Any:
    """All prompts at the same time; the first failure, or cancelling, aborts the others.

    The processor runs on threads, so that it may take its time. Raises what it and ``client.generate`` raise.
    """

    async def last(request: IORequest) -> RequestOutput:
        params = msgspec.structs.replace(request.params, output_kind=OutputKind.FINAL_ONLY)
        return await last_output(client.generate(request.prompt, params, options))

    requests, finish = await asyncio.to_thread(start_task, processor, data, client.limits)
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(last(request)) for request in requests]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return await asyncio.to_thread(finish, [task.result() for task in running])

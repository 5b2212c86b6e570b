"""What endpoints that pool have in common: all prompts at the same time, for clients that are still there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, TypeVar

import msgspec
from fastapi import Request, Response

from hardpoint.interfaces.engine import EmbeddingOutput, EngineClient, Prompt, RequestOptions
from hardpoint.interfaces.request import PoolingParams
from hardpoint_serving.outputs import ClientGone, until_gone, watch_client

__all__ = ["Pooled", "answer_unless_gone", "embed_all"]

T = TypeVar("T")
Pooled = EmbeddingOutput
_CLIENT_CLOSED_REQUEST = 499


async def embed_all(
    client: EngineClient, prompts: Sequence[Prompt], params: PoolingParams, options: RequestOptions
) -> list[Pooled]:
    """In the order of the prompts; the first failure, or cancelling, aborts the others."""
    try:
        async with asyncio.TaskGroup() as group:
            running = [group.create_task(client.embed(prompt, params, options)) for prompt in prompts]
    except BaseExceptionGroup as failures:
        raise failures.exceptions[0] from None
    return [task.result() for task in running]


async def answer_unless_gone(request: Request, work: Coroutine[Any, Any, T], answer: Callable[[T], Any]) -> Response:
    """What ``answer`` makes of the result of ``work``, as JSON; ``work`` ends when the client leaves.

    Raises what ``work`` raises.
    """
    gone = watch_client(request)
    try:
        result = await until_gone(work, gone)
    except ClientGone:
        return Response(status_code=_CLIENT_CLOSED_REQUEST)
    finally:
        gone.cancel()
    # Hundreds of vectors as text take their time: other requests go on meanwhile.
    encoded = await asyncio.to_thread(lambda: msgspec.json.encode(answer(result)))
    return Response(encoded, media_type="application/json")

"""KV cache events on their way from the scheduler to whoever listens in the API process: all of them, in order."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.core import EngineCore
from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    AllBlocksCleared,
    BlockHash,
    BlocksRemoved,
    BlocksStored,
    EngineOutputs,
    KVCacheConfig,
    KVEvent,
    KVEventBatch,
    Prompt,
    SamplingParams,
    SchedulerLimits,
)
from hardpoint.ipc import Decoder, encode
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeExecutor, FakeScheduler, FakeWorker

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)


class Scripted(FakeScheduler):
    """Hands out what a test put into ``events``."""

    events: tuple[KVEvent, ...] = ()

    def take_events(self) -> tuple[KVEvent, ...]:
        events, self.events = self.events, ()
        return events


def core_over(scheduler: FakeScheduler) -> EngineCore:
    executor = FakeExecutor(FakeWorker(block_size=4))
    executor.initialize_kv_cache(KVCacheConfig(num_blocks=64, groups=(), tensors=()))
    return EngineCore(scheduler, executor, clock=lambda: 7.0)


def scripted() -> Scripted:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    return Scripted(limits, num_blocks=64, block_size=4)


def test_events_make_a_frame_even_where_no_request_has_news() -> None:
    scheduler = scripted()
    core = core_over(scheduler)
    assert core.step() == {}
    gone = BlocksRemoved(block_hashes=[BlockHash(b"x")])
    scheduler.events = (gone, AllBlocksCleared())
    frames = core.step()
    assert list(frames) == [0]
    assert frames[0].outputs == []
    assert frames[0].kv_events == KVEventBatch(1, 7.0, [gone, AllBlocksCleared()])
    assert core.step() == {}
    scheduler.events = (gone,)
    batch = core.step()[0].kv_events
    assert batch is not None
    assert batch.sequence == 2


def test_a_dead_engine_tells_nothing_more() -> None:
    scheduler = scripted()
    core = core_over(scheduler)
    scheduler.events = (AllBlocksCleared(),)
    core.fail(RuntimeError("broken"))
    assert core.step() == {}


def test_schedulers_without_events_need_no_method() -> None:
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64, kv_events=True)
    assert list(FakeScheduler(limits, num_blocks=64, block_size=4).take_events()) == []


def test_they_survive_the_wire() -> None:
    stored = BlocksStored(
        block_hashes=[BlockHash(b"\0\xff")],
        parent_hash=BlockHash(b"p"),
        token_ids=np.arange(4, dtype=np.int32),
        block_size=4,
        adapter="style",
        has_extra_keys=True,
    )
    gone = BlocksRemoved(block_hashes=[BlockHash(b"x")], group=3, medium="host")
    frame = EngineOutputs(kv_events=KVEventBatch(9, 1.5, [stored, gone, AllBlocksCleared()]))
    back = Decoder[EngineOutputs](EngineOutputs).decode(encode(frame)).kv_events
    assert back is not None
    first, *rest = back.events
    assert (back.sequence, back.timestamp, rest) == (9, 1.5, [gone, AllBlocksCleared()])
    assert isinstance(first, BlocksStored)
    assert first.token_ids.tolist() == [0, 1, 2, 3]
    assert (first.block_hashes, first.parent_hash, first.adapter) == ([b"\0\xff"], b"p", "style")
    assert first.has_extra_keys


async def collect(llm: AsyncLLM) -> int:
    return len([output async for output in llm.generate(Prompt(token_ids=[40, 41, 42]), GREEDY)])


async def test_listeners_hear_every_batch_of_the_engine_process(
    make_spec: Callable[..., Any], make_runtime: Callable[..., Any]
) -> None:
    llm = await AsyncLLM.start(make_spec(limits={"kv_events": True}), make_runtime(ProcessRole.API))
    try:
        heard: list[KVEventBatch] = []
        also: list[int] = []
        llm.on_kv_events(heard.append)
        llm.on_kv_events(lambda batch: also.append(batch.sequence))
        await asyncio.gather(collect(llm), collect(llm))
        for _ in range(500):
            if len(also) < 6:
                await asyncio.sleep(0.01)
        assert also == [batch.sequence for batch in heard] == list(range(1, len(heard) + 1))
        hashes = [h for batch in heard for e in batch.events if isinstance(e, BlocksRemoved) for h in e.block_hashes]
        assert hashes == sorted(set(hashes)), "an event is missing, doubled or out of order"
    finally:
        await llm.shutdown(drain=False)


@pytest.mark.slow
async def test_an_engine_that_collects_none_refuses_listeners(
    make_spec: Callable[..., Any], make_runtime: Callable[..., Any]
) -> None:
    llm = await AsyncLLM.start(make_spec(), make_runtime(ProcessRole.API))
    try:
        with pytest.raises(ConfigError, match="--kv-events"):
            llm.on_kv_events(lambda batch: None)
    finally:
        await llm.shutdown(drain=False)

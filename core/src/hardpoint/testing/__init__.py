"""Torch-free conformance kit and fakes for plugin authors and for the core's own tests."""

from __future__ import annotations

from hardpoint.testing.fake_chat_renderer import FakeChatRenderer
from hardpoint.testing.fake_engine_client import FakeEngineClient
from hardpoint.testing.fake_executor import FakeExecutor
from hardpoint.testing.fake_scheduler import FakeScheduler
from hardpoint.testing.fake_tokenizer import FakeTokenizer
from hardpoint.testing.fake_worker import FakeWorker, next_token

__all__ = [
    "FakeChatRenderer",
    "FakeEngineClient",
    "FakeExecutor",
    "FakeScheduler",
    "FakeTokenizer",
    "FakeWorker",
    "next_token",
]

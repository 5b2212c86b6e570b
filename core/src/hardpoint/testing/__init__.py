"""Torch-free conformance kit, fakes and tools for plugin authors and for the core's own tests.

A module is imported when one of its names is first used: ``hardpoint plugins list`` lives here too, and needs no fake.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.testing.fake_chat_renderer import FakeChatRenderer
    from hardpoint.testing.fake_engine_client import FakeEngineClient
    from hardpoint.testing.fake_executor import FakeExecutor
    from hardpoint.testing.fake_scheduler import FakeScheduler
    from hardpoint.testing.fake_tokenizer import FakeTokenizer
    from hardpoint.testing.fake_worker import FakeWorker, next_token

_MODULES = {
    "FakeChatRenderer": "fake_chat_renderer",
    "FakeEngineClient": "fake_engine_client",
    "FakeExecutor": "fake_executor",
    "FakeScheduler": "fake_scheduler",
    "FakeTokenizer": "fake_tokenizer",
    "FakeWorker": "fake_worker",
    "next_token": "fake_worker",
}
__all__ = [
    "FakeChatRenderer",
    "FakeEngineClient",
    "FakeExecutor",
    "FakeScheduler",
    "FakeTokenizer",
    "FakeWorker",
    "next_token",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULES[name]}"), name)
    return value

"""Hardpoint: a plugin-first LLM inference platform.

Names below are imported when first used: ``import hardpoint`` alone stays light.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hardpoint.version import __version__ as __version__

if TYPE_CHECKING:
    from hardpoint.engine.async_llm import AsyncLLM
    from hardpoint.engine.llm import LLM
    from hardpoint.interfaces import Prompt, RequestOptions, RequestOutput, SamplingParams

__all__ = ["LLM", "AsyncLLM", "Prompt", "RequestOptions", "RequestOutput", "SamplingParams", "__version__"]

_LAZY = {"AsyncLLM": "hardpoint.engine.async_llm", "LLM": "hardpoint.engine.llm"}
_LAZY |= dict.fromkeys(("Prompt", "RequestOptions", "RequestOutput", "SamplingParams"), "hardpoint.interfaces")


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_LAZY[name]), name)
    return value

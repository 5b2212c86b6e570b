"""The OpenAI-compatible endpoint: chat completions, completions and models."""

from __future__ import annotations

from hardpoint_serving.openai.endpoint import OpenAIEndpoint, OpenAIOptions, create

__all__ = ["OpenAIEndpoint", "OpenAIOptions", "create"]

"""The spec and its manager keep the rules of their kind."""

from __future__ import annotations

from recent_tokens.conformance import TestRecentTokens as TestRecentTokens

"""The processor keeps the rules of its kind."""

from __future__ import annotations

from multiple_choice.conformance import TestMultipleChoice as TestMultipleChoice

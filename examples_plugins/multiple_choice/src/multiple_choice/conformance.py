"""What the rules need to know of this processor: two tasks that it answers differently."""

from __future__ import annotations

from typing import Any, ClassVar

from hardpoint.testing.io_processor_suite import IOProcessorSuite


class TestMultipleChoice(IOProcessorSuite):
    plugin = "multiple_choice"
    tasks: ClassVar[tuple[Any, ...]] = (
        {"question": "The sky is", "choices": ["blue", "green"]},
        {"question": "Two and two make", "choices": ["four", "five", "a pair of shoes"]},
    )

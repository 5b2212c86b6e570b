"""What the rules need to know of this processor: it acts on every request that has said something before."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hardpoint_testing_torch import LogitsProcessorSuite


class TestNoRepeatNgrams(LogitsProcessorSuite):
    plugin = "no_repeat_ngrams"
    other_sampling: ClassVar[Mapping[str, Any] | None] = None
    answer: ClassVar[Sequence[int]] = (5, 6, 7, 5, 6)

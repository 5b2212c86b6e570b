"""The processor keeps the rules of its kind."""

from __future__ import annotations

from no_repeat_ngrams.conformance import TestNoRepeatNgrams as TestNoRepeatNgrams

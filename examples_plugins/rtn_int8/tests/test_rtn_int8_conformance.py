"""The method keeps the rules of its kind, with the error and the size that eight bits allow."""

from __future__ import annotations

from typing import ClassVar

from hardpoint_testing_torch import QuantizationSuite


class TestRtnInt8(QuantizationSuite):
    plugin = "rtn_int8"
    max_relative_error: ClassVar[float] = 0.01
    max_bytes_per_weight: ClassVar[float | None] = 1.2

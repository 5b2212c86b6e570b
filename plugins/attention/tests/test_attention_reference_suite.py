"""The reference backend, as it is installed, passes the conformance suite of its kind."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint_testing_torch import AttentionBackendSuite


@pytest.mark.slow
class TestReferenceBackend(AttentionBackendSuite):
    plugin: ClassVar[str | None] = "torch_reference"

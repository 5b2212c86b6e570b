"""The reference backend passes the conformance suite of its kind."""

from __future__ import annotations

import pytest

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_testing_torch import AttentionBackendSuite


class TestReferenceBackend(AttentionBackendSuite):
    @pytest.fixture
    def backend(self) -> AttentionBackend:
        return ReferenceBackend()

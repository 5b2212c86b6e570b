"""The communicators of this distribution are held to their kind's kit."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint.plugins.plan import PlannedPlugin
from hardpoint_testing_torch.communicator_suite import CommunicatorSuite


class TestGloo(CommunicatorSuite):
    plugin: ClassVar[str | None] = "gloo"
    timeout_option: ClassVar[str | None] = "timeout_s"

    @pytest.mark.slow
    def test_importing_it_changes_nothing(self, planned: PlannedPlugin) -> None:
        super().test_importing_it_changes_nothing(planned)

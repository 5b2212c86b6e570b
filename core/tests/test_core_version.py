"""The version that users see is the version of the installed distribution."""

from importlib.metadata import version

import hardpoint


def test_version_matches_the_distribution() -> None:
    assert hardpoint.__version__ == version("hardpoint-core")

"""What holds for all tests of the workspace: how parallel runs share the cores, and what starts first."""

from __future__ import annotations

import os

import pytest

# Set before anything imports torch: two parallel runs with a thread for each core would mostly wait for one another.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))

_LONG = ("tests/end_to_end/", "tests/parity/", "tests/process/", "plugins/torch_runtime/")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, so that a parallel run does not wait for the last of them alone."""

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(config.rootpath).as_posix()
        return next((index for index, start in enumerate(_LONG) if place.startswith(start)), len(_LONG))

    items.sort(key=rank)

"""What holds for all tests of the workspace: how parallel runs share the cores, and what starts first."""

from __future__ import annotations

import os

import pytest

# Set before anything imports torch: two parallel runs with a thread for each core would mostly wait for one another.
if "PYTEST_XDIST_WORKER_COUNT" in os.environ:
    _share = len(os.sched_getaffinity(0)) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _share)))

_LONG = ("tests/end_to_end/", "tests/parity/", "tests/process/", "plugins/torch_runtime/")


_KITS = ("core/tests/testing/", "plugins/testing_torch/tests/")
_MUTANTS = ("test_a_mutant_", "test_a_faulty_", "test_faulty_")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Long files first, so that a parallel run does not wait for the last of them alone.

    Kits are held against hundreds of mutants, each a test run of its own: that is for the slow tier. The sound samples
    that the kits must accept stay in the fast one.
    """
    for item in items:
        place = item.path.relative_to(config.rootpath).as_posix()
        if place.startswith(_KITS) and item.name.startswith(_MUTANTS):
            item.add_marker(pytest.mark.slow)

    def rank(item: pytest.Item) -> int:
        place = item.path.relative_to(config.rootpath).as_posix()
        return next((index for index, start in enumerate(_LONG) if place.startswith(start)), len(_LONG))

    items.sort(key=rank)

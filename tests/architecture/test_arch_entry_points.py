"""Every entry point a pyproject declares is installed as declared and resolves to something callable."""

from __future__ import annotations

from importlib.metadata import EntryPoint, distribution

import pytest

from workspace import Distribution, distributions

DECLARED = [
    pytest.param(dist.name, group, name, target, id=f"{group}:{name}")
    for dist in distributions()
    for group, names in dist.entry_points.items()
    for name, target in names.items()
]


@pytest.mark.parametrize(("owner", "group", "name", "target"), DECLARED)
def test_entry_point_is_installed_and_resolves(owner: str, group: str, name: str, target: str) -> None:
    declared = EntryPoint(name=name, group=group, value=target)
    installed = distribution(owner).entry_points
    assert declared in installed, f"{owner} was installed before this entry point was added: run `make setup`"
    assert callable(declared.load())


def test_something_is_declared() -> None:
    assert len(DECLARED) > 10


@pytest.mark.parametrize("dist", distributions(), ids=lambda dist: dist.name)
def test_nothing_stale_is_installed(dist: Distribution) -> None:
    installed = {
        (point.group, point.name, point.value)
        for point in distribution(dist.name).entry_points
        if point.group.startswith("hardpoint.")
    }
    declared = {(group, name, target) for group, names in dist.entry_points.items() for name, target in names.items()}
    assert installed == declared

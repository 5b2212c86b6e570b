"""L12.12: the core depends on no framework, so its wheel pins nothing that a vendor brings."""

from __future__ import annotations

import re
from importlib.metadata import requires

import pytest

from workspace import Distribution, core, distributions

FRAMEWORKS = {"torch", "transformers", "triton", "jax", "tensorflow", "onnxruntime", "vllm"}


def names(lines: list[str]) -> set[str]:
    """Canonical names of what the requirement lines ask for, extras and markers aside."""
    return {re.split(r"[^\w.-]", line, maxsplit=1)[0].lower().replace("_", "-") for line in lines}


def test_the_core_asks_for_no_framework() -> None:
    """L12.12: in what is installed and in what will be built, extras included."""
    project = core().project
    extras = [line for lines in project.get("optional-dependencies", {}).values() for line in lines]
    assert names([*project["dependencies"], *extras]) & FRAMEWORKS == set()
    assert names(list(requires(core().name) or [])) & FRAMEWORKS == set()
    assert {"pydantic", "msgspec"} <= names(list(requires(core().name) or [])), "the requirements were not read"


def test_the_core_asks_for_no_plugin() -> None:
    """L12.12, I12.6: nor does it bring a plugin along that would."""
    plugins = {distribution.name for distribution in distributions()} - {core().name}
    extras = [line for lines in core().project.get("optional-dependencies", {}).values() for line in lines]
    assert names([*core().project["dependencies"], *extras]) & plugins == set()


@pytest.mark.parametrize("distribution", distributions(), ids=lambda dist: dist.name)
def test_no_framework_is_pinned_to_one_version(distribution: Distribution) -> None:
    """L12.12: a vendor's build of the framework must be able to satisfy the requirement."""
    pinned = [
        line
        for line in distribution.project.get("dependencies", [])
        if names([line]) & FRAMEWORKS and re.search(r"===?", line)
    ]
    assert pinned == []

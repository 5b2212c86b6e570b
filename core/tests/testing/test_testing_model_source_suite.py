"""The kit for model sources accepts a correct one and rejects each mutant."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import msgspec
import pytest

from hardpoint.errors import ModelNotFoundError
from hardpoint.interfaces import ModelArtifact, ModelSource
from hardpoint.testing.model_source_suite import ModelSourceSuite
from hardpoint.testing.suite_runner import run_suite

PREFIX = "shelf:"


class ShelfSource(ModelSource):
    """``shelf:/absolute/folder`` and nothing else."""

    priority = 50

    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        if not name.startswith(PREFIX):
            return None
        root = name.removeprefix(PREFIX)
        if revision is not None or not os.path.isdir(root):
            raise ModelNotFoundError(f"{name} with revision {revision} is not on the shelf")
        return ModelArtifact(name=name, root=root, files=tuple(sorted(os.listdir(root))), source="shelf")


def make_suite(kind: type[ModelSource]) -> type[ModelSourceSuite]:
    class Suite(ModelSourceSuite):
        missing_names: ClassVar[tuple[str, ...]] = (PREFIX + "/nowhere",)

        def create_source(self) -> ModelSource:
            return kind()

        def create_name(self, folder: Path) -> str:
            (folder / "weights").write_bytes(b"w")
            return f"{PREFIX}{folder}"

    return Suite


class TestShelfSource(make_suite(ShelfSource)):  # type: ignore[misc]
    pass


class ClaimsAll(ShelfSource):
    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        found = super().resolve(name, revision)
        return found or ModelArtifact(name=name, root="/", files=("x",), source="shelf")


class IgnoresRevisions(ShelfSource):
    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        return super().resolve(name, None)


class SilentlyMissing(ShelfSource):
    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        try:
            return super().resolve(name, revision)
        except ModelNotFoundError:
            return None


class AbsoluteFiles(ShelfSource):
    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        found = super().resolve(name, revision)
        if found is None:
            return None
        return msgspec.structs.replace(found, files=tuple(f"{found.root}/{one}" for one in found.files))


class TouchesEveryName(ShelfSource):
    """A name with a null byte is an accident waiting in every path function."""

    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        with contextlib.suppress(OSError):
            os.stat(name)
        return super().resolve(name, revision)


class BoastsOfNames(ShelfSource):
    def known_names(self) -> Sequence[str]:
        return ("great-model",)


MUTANTS: dict[type[ModelSource], str] = {
    ClaimsAll: "test_a_foreign_name_is_left_to_others",
    IgnoresRevisions: "test_an_unknown_revision_is_never_ignored",
    SilentlyMissing: "test_a_name_that_cannot_be_had_says_so",
    AbsoluteFiles: "test_the_files_exist",
    TouchesEveryName: "test_hostile_names_do_no_harm",
    BoastsOfNames: "test_known_names_resolve",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[ModelSource]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed

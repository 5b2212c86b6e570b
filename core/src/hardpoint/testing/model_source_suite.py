"""Conformance of the plugin kind ``model_source``: derive from :class:`ModelSourceSuite`."""

from __future__ import annotations

import time
from abc import abstractmethod
from pathlib import Path, PurePosixPath
from typing import ClassVar

import msgspec
import pytest

from hardpoint.errors import HardpointError, ModelNotFoundError
from hardpoint.interfaces import ModelArtifact, ModelSource
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["HOSTILE_NAMES", "ModelSourceSuite"]

HOSTILE_NAMES = (
    "",
    " ",
    ".",
    "..",
    "\0",
    "a\0b",
    "a" * 5_000,
    "-rf",
    "../../../../etc/passwd",
    "name\nwith\nlines",
    "\ud800",
    "$(id)",
    "%2e%2e%2f",
    "\\\\server\\share",
    "☃",
)


class ModelSourceSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.ModelSource`.

    ``foreign_names`` must be left to other sources; ``missing_names`` clearly belong to this one but cannot be had.
    ``hostile_names`` may be answered with None or with an error for the user, never with anything else.
    """

    kind: ClassVar[str] = "model_source"
    torch_free: ClassVar[bool] = True
    foreign_names: ClassVar[tuple[str, ...]] = ("a-name-that-nobody-has",)
    missing_names: ClassVar[tuple[str, ...]] = ()
    hostile_names: ClassVar[tuple[str, ...]] = HOSTILE_NAMES

    def create_source(self) -> ModelSource:
        """The source under test."""
        made: ModelSource = self.create_plugin(self.context())
        return made

    @abstractmethod
    def create_name(self, folder: Path) -> str:
        """A name that this source resolves without a network; ``folder`` is empty and may hold the model."""

    @pytest.fixture
    def source(self) -> ModelSource:
        return self.create_source()

    @pytest.fixture
    def artifact(self, source: ModelSource, name: str) -> ModelArtifact:
        found = source.resolve(name, None)
        assert found is not None, f"{name!r} is not known"
        return found

    @pytest.fixture
    def name(self, tmp_path: Path) -> str:
        return self.create_name(tmp_path)

    def test_the_files_exist(self, artifact: ModelArtifact) -> None:
        root = Path(artifact.root)
        assert root.is_absolute()
        assert artifact.files, "an artifact without files"
        assert len(set(artifact.files)) == len(artifact.files)
        for name in artifact.files:
            relative = PurePosixPath(name)
            assert not relative.is_absolute(), f"{name} is not relative to the root"
            assert ".." not in relative.parts, f"{name} leads out of the root"
            assert (root / name).is_file(), f"{name} does not exist"

    def test_the_artifact_says_what_was_asked_for(self, artifact: ModelArtifact, name: str) -> None:
        assert artifact.name == name
        assert artifact.source, "the source does not name itself"

    def test_the_artifact_travels(self, artifact: ModelArtifact) -> None:
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(artifact), type=ModelArtifact) == artifact

    def test_the_answer_is_always_the_same(self, source: ModelSource, artifact: ModelArtifact, name: str) -> None:
        assert source.resolve(name, None) == artifact
        assert self.create_source().resolve(name, None) == artifact

    def test_a_foreign_name_is_left_to_others(self, source: ModelSource) -> None:
        for name in self.foreign_names:
            assert source.resolve(name, None) is None

    def test_a_name_that_cannot_be_had_says_so(self, source: ModelSource) -> None:
        if not self.missing_names:
            pytest.skip("the source declares no names that can only be its own")
        for name in self.missing_names:
            with pytest.raises(ModelNotFoundError) as caught:
                source.resolve(name, None)
            assert name in str(caught.value), "the message must repeat what was asked for"

    def test_an_unknown_revision_is_never_ignored(self, source: ModelSource, name: str) -> None:
        try:
            found = source.resolve(name, "no-such-revision")
        except ModelNotFoundError:
            return
        assert found is None, "a revision that does not exist was answered with some other one"

    def test_hostile_names_do_no_harm(
        self, source: ModelSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Names such as ".." are folders; what lies in those of the checkout is nobody's matter here.
        inner = tmp_path / "outer" / "inner"
        inner.mkdir(parents=True)
        monkeypatch.chdir(inner)
        for name in self.hostile_names:
            try:
                found = source.resolve(name, None)
            except HardpointError:
                continue
            assert found is None, f"{name[:40]!r} was resolved to {found}"

    def test_known_names_resolve(self, source: ModelSource) -> None:
        started = time.perf_counter()
        names = source.known_names()
        assert time.perf_counter() - started < 1.0, "known_names must be cheap: error messages use it"
        for name in names:
            assert source.resolve(name, None) is not None, f"{name!r} is listed but not known"

    def test_the_priority_is_a_number(self, source: ModelSource) -> None:
        assert type(source.priority) is int

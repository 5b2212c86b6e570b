"""The kit for weight loaders accepts a small correct one and rejects each mutant."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces import ModelArtifact, ModelInfo, WeightLoader, WeightTensor
from hardpoint.testing.suite_runner import run_suite
from hardpoint.testing.weight_loader_suite import WeightLoaderSuite

TENSORS = {"a.weight": np.arange(12, dtype=np.float32).reshape(3, 4), "b.weight": np.arange(5, dtype=np.float32)}


class LineLoader(WeightLoader):
    """One file: a line of JSON that maps names to shapes, then float32 data in that order and nothing else."""

    def accepts(self, artifact: ModelArtifact) -> bool:
        return len(artifact.files) == 1 and artifact.files[0].endswith(".line")

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        self.read(artifact)
        return ModelInfo(
            artifact=artifact,
            architecture="Line",
            config={},
            max_position=8,
            vocab_size=9,
            dtype="float32",
            loader="line",
        )

    def num_bytes(self, info: ModelInfo) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors(info))

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        shapes, data = self.read(info.artifact)
        for name, shape in shapes.items():
            count = math.prod(shape)
            yield WeightTensor(name, "float32", tuple(shape), data[:count].reshape(shape))
            data = data[count:]

    def read(self, artifact: ModelArtifact) -> tuple[dict[str, list[int]], np.ndarray]:
        path = self.path(artifact)
        header, _, body = path.read_bytes().partition(b"\n")
        try:
            shapes = json.loads(header)
        except ValueError as error:
            raise ModelFormatError(f"{path}: {error}") from None
        if not isinstance(shapes, dict) or not all(self.is_shape(shape) for shape in shapes.values()):
            raise ModelFormatError(f"{path}: the first line must map names to shapes")
        if 4 * sum(math.prod(shape) for shape in shapes.values()) != len(body):
            raise ModelFormatError(f"{path}: the data is not as long as the shapes say")
        return shapes, np.frombuffer(body, dtype=np.float32)

    def is_shape(self, shape: Any) -> bool:
        return isinstance(shape, list) and bool(shape) and all(type(one) is int and one > 0 for one in shape)

    def path(self, artifact: ModelArtifact) -> Path:
        path = Path(artifact.root) / artifact.files[0]
        if not path.resolve().is_relative_to(Path(artifact.root).resolve()) or not path.is_file():
            raise ModelFormatError(f"{path} is not a regular file of the model")
        return path


def make_suite(kind: type[WeightLoader]) -> type[WeightLoaderSuite]:
    class Suite(WeightLoaderSuite):
        def create_loader(self, packed: bool) -> WeightLoader:
            return kind()

        def create_artifact(self, folder: Path) -> ModelArtifact:
            header = json.dumps({name: list(values.shape) for name, values in TENSORS.items()})
            data = b"".join(values.tobytes() for values in TENSORS.values())
            (folder / "model.line").write_bytes(header.encode() + b"\n" + data)
            return ModelArtifact(name="line", root=str(folder), files=("model.line",), source="test")

        def expected_tensors(self) -> Mapping[str, np.ndarray]:
            return TENSORS

    return Suite


class TestLineLoader(make_suite(LineLoader)):  # type: ignore[misc]
    pass


class AcceptsAll(LineLoader):
    def accepts(self, artifact: ModelArtifact) -> bool:
        return True


class LeavesTheRoot(LineLoader):
    def path(self, artifact: ModelArtifact) -> Path:
        path = Path(artifact.root) / artifact.files[0]
        if not path.is_file():
            raise ModelFormatError(f"{path} is not a regular file")
        return path


class BelievesTheHeader(LineLoader):
    """Crashes in the middle of damaged files."""

    def read(self, artifact: ModelArtifact) -> tuple[dict[str, list[int]], np.ndarray]:
        header, _, body = self.path(artifact).read_bytes().partition(b"\n")
        return json.loads(header), np.frombuffer(body, dtype=np.float32)


class ToleratesCuts(LineLoader):
    def read(self, artifact: ModelArtifact) -> tuple[dict[str, list[int]], np.ndarray]:
        path = self.path(artifact)
        content = path.read_bytes()
        whole = content.ljust(500, b"\0")
        header, _, body = whole.partition(b"\n")
        try:
            return json.loads(header), np.frombuffer(body[: len(body) // 4 * 4], dtype=np.float32)
        except ValueError as error:
            raise ModelFormatError(f"{path}: {error}") from None


class Transposed(LineLoader):
    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        for tensor in super().tensors(info):
            yield replace(tensor, data=tensor.data.T)


class Repeats(LineLoader):
    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        for tensor in super().tensors(info):
            yield tensor
            yield tensor


class CountsWrongly(LineLoader):
    def num_bytes(self, info: ModelInfo) -> int:
        return super().num_bytes(info) // 2


MUTANTS: dict[type[WeightLoader], str] = {
    AcceptsAll: "test_it_accepts_its_own_format_only",
    LeavesTheRoot: "test_only_regular_files_inside_the_root_are_read",
    BelievesTheHeader: "test_damaged_bytes_raise_nothing_unforeseen",
    ToleratesCuts: "test_a_cut_file_is_refused",
    Transposed: "test_tensors_are_what_they_say",
    Repeats: "test_tensors_are_what_they_say",
    CountsWrongly: "test_the_number_of_bytes_is_exact",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[WeightLoader]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed

"""Conformance of the plugin kind ``weight_loader``: derive from :class:`WeightLoaderSuite`."""

from __future__ import annotations

import shutil
from abc import abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import ClassVar

import msgspec
import numpy as np
import pytest

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces import ModelArtifact, ModelInfo, WeightLoader, WeightLoaderContext, WeightTensor
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["WeightLoaderSuite", "read_all"]

REFUSALS = (ModelFormatError, UnsupportedModelError)
STORED_AS = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


def read_all(loader: WeightLoader, artifact: ModelArtifact) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Everything the loader says about the artifact's tensors, by name."""
    info = loader.describe(artifact)
    return {one.name: (one.dtype, one.shape, one.data.tobytes()) for one in loader.tensors(info)}


class WeightLoaderSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.WeightLoader`, over a small model that the author writes.

    ``automatic`` is False for loaders that are used only when named. ``checks_files`` is False for those that read no
    weights from files. ``num_flips`` damaged copies are read.
    """

    kind: ClassVar[str] = "weight_loader"
    torch_free: ClassVar[bool] = True
    automatic: ClassVar[bool] = True
    checks_files: ClassVar[bool] = True
    num_flips: ClassVar[int] = 150

    def create_loader(self, packed: bool) -> WeightLoader:
        """The loader under test, with packed tensors yielded as stored or dequantized."""
        made: WeightLoader = self.create_plugin(self.context(WeightLoaderContext, packed=packed))
        return made

    @abstractmethod
    def create_artifact(self, folder: Path) -> ModelArtifact:
        """Write a small valid model into the empty ``folder``."""

    def expected_tensors(self) -> Mapping[str, np.ndarray] | None:
        """What :meth:`create_artifact` wrote, by Hugging Face name; None leaves the values untested."""
        return None

    @pytest.fixture(params=[False, True], ids=["plain", "packed"])
    def loader(self, request: pytest.FixtureRequest) -> WeightLoader:
        return self.create_loader(bool(request.param))

    @pytest.fixture
    def artifact(self, tmp_path: Path) -> ModelArtifact:
        (tmp_path / "model").mkdir()
        return self.create_artifact(tmp_path / "model")

    @pytest.fixture
    def info(self, loader: WeightLoader, artifact: ModelArtifact) -> ModelInfo:
        return loader.describe(artifact)

    def test_it_accepts_its_own_format_only(
        self, loader: WeightLoader, artifact: ModelArtifact, tmp_path: Path
    ) -> None:
        assert loader.accepts(artifact) == self.automatic
        (tmp_path / "notes.txt").write_text("not a model")
        foreign = ModelArtifact(name="notes", root=str(tmp_path), files=("notes.txt",), source="test")
        assert not loader.accepts(foreign)

    def test_the_description_is_complete(self, loader: WeightLoader, info: ModelInfo, artifact: ModelArtifact) -> None:
        assert info.artifact == artifact
        assert info.loader, "the description does not name its loader"
        assert info.architecture
        assert info.vocab_size > 0
        assert info.max_position > 0
        assert all(0 <= token_id < info.vocab_size for token_id in info.eos_token_ids)
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(info), type=ModelInfo) == info, "it must travel"
        assert loader.describe(artifact) == info

    def test_tensors_are_what_they_say(self, loader: WeightLoader, info: ModelInfo) -> None:
        names = []
        for tensor in loader.tensors(info):
            names.append(tensor.name)
            check_tensor(tensor)
        assert names, "no tensors"
        assert len(set(names)) == len(names), "a tensor comes twice"

    def test_the_number_of_bytes_is_exact(self, loader: WeightLoader, info: ModelInfo) -> None:
        assert loader.num_bytes(info) == sum(tensor.data.nbytes for tensor in loader.tensors(info))

    def test_reading_again_gives_the_same(self, loader: WeightLoader, artifact: ModelArtifact) -> None:
        first = read_all(loader, artifact)
        assert list(read_all(loader, artifact).items()) == list(first.items())

    def test_an_abandoned_reading_disturbs_nobody(self, loader: WeightLoader, info: ModelInfo) -> None:
        next(iter(loader.tensors(info)))
        assert len(list(loader.tensors(info))) > 0

    def test_values_are_those_that_were_stored(self, artifact: ModelArtifact) -> None:
        expected = self.expected_tensors()
        if expected is None:
            pytest.skip("the author states no expected values")
        loader = self.create_loader(False)
        found = {tensor.name: tensor for tensor in loader.tensors(loader.describe(artifact))}
        assert sorted(found) == sorted(expected)
        for name, values in expected.items():
            assert found[name].shape == values.shape
            np.testing.assert_array_equal(found[name].data.reshape(values.shape), values, err_msg=name)

    def test_a_cut_file_is_refused(self, loader: WeightLoader, artifact: ModelArtifact, tmp_path: Path) -> None:
        """Refused, or harmless: whatever is cut off may not change a value."""
        self._need_files()
        whole = read_all(loader, artifact)
        for name, content in self._contents(artifact):
            for size in sorted({0, 1, 7, 8, 9, len(content) // 2, len(content) - 1}):
                damaged = damage(artifact, tmp_path / "cut", name, content[:size])
                found = read_or_refuse(loader, damaged)
                assert found is None or found == whole, f"{name} cut to {size} bytes gave other tensors"

    def test_damaged_bytes_raise_nothing_unforeseen(
        self, loader: WeightLoader, artifact: ModelArtifact, tmp_path: Path
    ) -> None:
        """Only the two errors of the contract, whatever the file says about its offsets and sizes."""
        self._need_files()
        rng = np.random.default_rng(0)
        contents = list(self._contents(artifact))
        for number in range(self.num_flips):
            name, content = contents[number % len(contents)]
            changed = bytearray(content)
            # Headers come first and are where damage matters.
            limit = len(changed) if number % 3 == 0 else min(len(changed), 400)
            for place in rng.integers(0, limit, int(rng.integers(1, 4))).tolist():
                changed[place] = int(rng.integers(0, 256))
            read_or_refuse(loader, damage(artifact, tmp_path / "flipped", name, bytes(changed)))

    def test_only_regular_files_inside_the_root_are_read(
        self, loader: WeightLoader, artifact: ModelArtifact, tmp_path: Path
    ) -> None:
        self._need_files()
        weights = max(artifact.files, key=lambda name: (Path(artifact.root) / name).stat().st_size)
        for name in ("missing" + Path(weights).suffix, f"../outside/{weights}"):
            outside = tmp_path / "outside"
            shutil.copytree(artifact.root, outside, dirs_exist_ok=True)
            files = tuple(name if one == weights else one for one in artifact.files)
            with pytest.raises(REFUSALS):
                read_all(loader, msgspec.structs.replace(artifact, files=files))
        (Path(artifact.root) / weights).unlink()
        (Path(artifact.root) / weights).mkdir()
        with pytest.raises(REFUSALS):
            read_all(loader, artifact)

    def _need_files(self) -> None:
        if not self.checks_files:
            pytest.skip("the loader declares that it reads no weights from files")

    def _contents(self, artifact: ModelArtifact) -> Iterator[tuple[str, bytes]]:
        for name in artifact.files:
            yield name, (Path(artifact.root) / name).read_bytes()


def check_tensor(tensor: WeightTensor) -> None:
    """Layout, type and shape of one tensor."""
    assert tensor.data.flags.c_contiguous, f"{tensor.name} is not C-contiguous"
    assert all(size > 0 for size in tensor.shape), f"{tensor.name} has the shape {tensor.shape}"
    if tensor.dequantize is None:
        assert tensor.data.shape == tensor.shape, f"{tensor.name}: data of {tensor.data.shape} for {tensor.shape}"
        if tensor.dtype in STORED_AS:
            assert tensor.data.dtype == STORED_AS[tensor.dtype], f"{tensor.name}: {tensor.data.dtype}"
        return
    assert tensor.data.dtype == np.uint8, f"{tensor.name}: packed data must be bytes"
    values = tensor.dequantize()
    assert values.dtype == np.float32
    assert values.shape == tensor.shape


def damage(artifact: ModelArtifact, folder: Path, name: str, content: bytes) -> ModelArtifact:
    """A copy of the artifact in ``folder`` whose file ``name`` holds ``content``."""
    shutil.copytree(artifact.root, folder, dirs_exist_ok=True)
    # Written anew, not in place: an earlier reading may still map the old one.
    (folder / name).unlink()
    (folder / name).write_bytes(content)
    return msgspec.structs.replace(artifact, root=str(folder))


def read_or_refuse(
    loader: WeightLoader, artifact: ModelArtifact
) -> dict[str, tuple[str, tuple[int, ...], bytes]] | None:
    """The tensors, or None where the loader refused as its contract says; any other exception passes through."""
    try:
        return read_all(loader, artifact) if loader.accepts(artifact) else None
    except REFUSALS:
        return None

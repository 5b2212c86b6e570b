"""Safetensors: views of valid files, one error for others; nothing outside the model's folder (class 11)."""

from __future__ import annotations

import json
import os
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.formats.safetensors import read_safetensors
from hardpoint_model_io.weights.safetensors import SafetensorsWeightLoader

AsArtifact = Callable[[Path], ModelArtifact]
MakeFolder = Callable[..., Path]


def raw_file(path: Path, header: Any, data: bytes = b"", size: int | None = None) -> Path:
    encoded = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(encoded) if size is None else size) + encoded + data)
    return path


def tensor(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def test_arrays_of_every_dtype_are_views_of_the_file(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    arrays = {
        name: generator.integers(0, 2, (3, 5)).astype(name)
        for name in ("float64", "float32", "float16", "int64", "int32", "int16", "int8", "uint8", "bool")
    }
    arrays["empty"] = np.empty((0, 4), np.float32)
    arrays["scalar"] = np.array(2.5, np.float32)
    save_file(arrays, tmp_path / "a.safetensors", metadata={"format": "pt"})
    file = read_safetensors(tmp_path / "a.safetensors")
    assert set(file.tensors) == set(arrays)
    for name, expected in arrays.items():
        found = file.array(file.tensors[name])
        np.testing.assert_array_equal(found, expected)
        assert found.dtype == expected.dtype
        assert found.size == 0 or not found.flags.owndata


def test_bfloat16_and_8_bit_floats_come_as_unsigned_integers(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    save = pytest.importorskip("safetensors.torch").save_file
    values = torch.randn(4, 6)
    save({"b": values.bfloat16(), "f": values.to(torch.float8_e4m3fn)}, tmp_path / "a.safetensors")
    file = read_safetensors(tmp_path / "a.safetensors")
    assert (file.tensors["b"].dtype.name, file.tensors["f"].dtype.name) == ("bfloat16", "float8_e4m3fn")
    found = file.array(file.tensors["b"])
    assert found.dtype == np.uint16
    np.testing.assert_array_equal((found.astype(np.uint32) << 16).view(np.float32), values.bfloat16().float().numpy())
    assert file.array(file.tensors["f"]).dtype == np.uint8


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (({}, b"", None), None),
        (({"a": tensor(0, 16, [4])}, bytes(16), None), None),
        (({"a": tensor(0, 16, [4])}, bytes(15), None), "file at"),
        (({"a": tensor(0, 16, [4])}, bytes(17), None), "file at"),
        (({"a": tensor(0, 12, [4])}, bytes(12), None), "needs 16 bytes"),
        (({"a": tensor(4, 20, [4])}, bytes(20), None), "begins at byte"),
        (({"a": tensor(0, 16, [4]), "b": tensor(8, 24, [4])}, bytes(24), None), "begins at byte"),
        (({"a": tensor(0, 16, [4]), "b": tensor(0, 16, [4])}, bytes(16), None), "begins at byte"),
        (({"a": tensor(-16, 0, [4])}, bytes(16), None), "range -16 to 0"),
        (({"a": tensor(0, 16, [-2, -2])}, bytes(16), None), "impossible shape"),
        (({"a": tensor(0, 0, [2**60, 2**60])}, b"", None), "impossible shape"),
        (({"a": tensor(0, 0, [0] * 40)}, b"", None), "impossible shape"),
        (({"a": {"dtype": "F32", "shape": [4]}}, bytes(16), None), "data_offsets"),
        (({"a": tensor(0, 16, ["4"])}, bytes(16), None), "header cannot be read"),
        (({"a": 5}, b"", None), "header cannot be read"),
        ((b"[1, 2]", b"", None), "header cannot be read"),
        ((b"\xff\xff\xff", b"", None), "header cannot be read"),
        ((b"{" * 20_000, b"", None), "header cannot be read"),
        ((b'{"a":' * 20_000, b"", None), "header cannot be read"),
        (({}, b"", 2**63), "claims 9223372036854775808 bytes"),
        (({}, b"", 100), "claims 100 bytes"),
        (({}, b"", 0), "claims 0 bytes"),
    ],
)
def test_headers(tmp_path: Path, content: tuple[Any, bytes, int | None], message: str | None) -> None:
    path = raw_file(tmp_path / "a.safetensors", *content)
    if message is None:
        read_safetensors(path)
        return
    with pytest.raises(ModelFormatError, match=message) as caught:
        read_safetensors(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("content", [b"", b"1234567"])
def test_files_without_a_header(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(content)
    with pytest.raises(ModelFormatError, match=r"a\.safetensors"):
        read_safetensors(tmp_path / "a.safetensors")


def test_an_unknown_dtype_is_named(tmp_path: Path) -> None:
    path = raw_file(tmp_path / "a.safetensors", {"w": tensor(0, 2, [4], "F4")}, bytes(2))
    with pytest.raises(UnsupportedModelError, match="'w' has the dtype 'F4'"):
        read_safetensors(path)


def test_mutations_end_in_tensors_or_one_of_two_errors(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    root = hf_folder()
    path = root / "model.safetensors"
    whole = path.read_bytes()
    header_end = 8 + int.from_bytes(whole[:8], "little")
    artifact = as_artifact(root)
    generator = np.random.default_rng(7)
    refused: list[str] = []
    slowest = 0.0
    for _ in range(2_000):
        data = bytearray(whole)
        for _ in range(int(generator.integers(1, 4))):
            data[int(generator.integers(0, header_end))] = int(generator.integers(0, 256))
        if generator.random() < 0.2:
            del data[int(generator.integers(0, len(data))) :]
        path.write_bytes(bytes(data))
        started = time.perf_counter()
        try:
            loader = SafetensorsWeightLoader()
            for found in loader.tensors(loader.describe(artifact)):
                assert found.data.shape == found.shape
        except (ModelFormatError, UnsupportedModelError) as error:
            refused.append(str(error))
        slowest = max(slowest, time.perf_counter() - started)
    assert len(refused) > 500
    assert all(str(path) in message for message in refused)
    assert slowest < 1.0


def sharded(root: Path, weight_map: dict[str, Any] | None = None) -> Path:
    save_file({"a": np.ones(2, np.float32)}, root / "model-00001-of-00002.safetensors")
    save_file({"b": np.zeros(3, np.float16)}, root / "model-00002-of-00002.safetensors")
    names = {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}
    index = {"metadata": {}, "weight_map": names if weight_map is None else weight_map}
    (root / "model.safetensors.index.json").write_text(json.dumps(index))
    return root


def test_shards_are_read_through_the_index(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    artifact = as_artifact(sharded(hf_folder({"intermediate_size": 40, "vocab_size": 40}, tensors={})))
    loader = SafetensorsWeightLoader()
    info = loader.describe(artifact)
    assert [found.name for found in loader.tensors(info)] == ["a", "b"]
    assert loader.num_bytes(info) == 14
    assert info.dtype == "float32"


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "../outside.safetensors"}, "plain names"),
        ({"a": "/etc/passwd.safetensors"}, "plain names"),
        ({"a": "sub/../../outside.safetensors"}, "plain names"),
        ({"a": "a\0b.safetensors"}, "plain names"),
        ({"a": "..\\outside.safetensors"}, "plain names"),
        ({"a": "pytorch_model.bin"}, "not a .safetensors file"),
        ({"a": 5}, "not a .safetensors file"),
        ({}, "must map tensor names"),
        ({"a": "link.safetensors"}, "outside the model's folder"),
        ({"a": "pipe.safetensors"}, "not a regular file"),
        ({"a": "gone.safetensors"}, "is missing"),
        ({"zzz": "model-00001-of-00002.safetensors"}, "'zzz' is missing"),
    ],
)
def test_an_index_cannot_lead_elsewhere(
    tmp_path: Path, hf_folder: MakeFolder, as_artifact: AsArtifact, weight_map: dict[str, Any], message: str
) -> None:
    root = sharded(hf_folder(tensors={}), weight_map)
    save_file({"a": np.ones(2, np.float32)}, tmp_path / "outside.safetensors")
    os.symlink(tmp_path / "outside.safetensors", root / "link.safetensors")
    os.mkfifo(root / "pipe.safetensors")
    started = time.perf_counter()
    with pytest.raises(ModelFormatError, match=message) as caught:
        SafetensorsWeightLoader().describe(as_artifact(root))
    assert str(root) in str(caught.value)
    assert time.perf_counter() - started < 1


def test_a_tensor_in_two_shards_is_refused(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    root = sharded(hf_folder(tensors={}))
    save_file({"a": np.ones(2, np.float32), "b": np.ones(2, np.float32)}, root / "model-00002-of-00002.safetensors")
    with pytest.raises(ModelFormatError, match="'a' is also in another shard"):
        SafetensorsWeightLoader().describe(as_artifact(root))


def test_a_snapshot_of_the_hub_cache_may_link_to_its_blobs(hf_folder: MakeFolder, tmp_path: Path) -> None:
    source = hf_folder()
    repo = tmp_path / "models--org--name"
    snapshot = repo / "snapshots" / ("0" * 40)
    snapshot.mkdir(parents=True)
    (repo / "blobs").mkdir()
    for index, name in enumerate(("config.json", "model.safetensors")):
        (repo / "blobs" / str(index)).write_bytes((source / name).read_bytes())
        os.symlink(f"../../blobs/{index}", snapshot / name)
    artifact = ModelArtifact(
        name="org/name", root=str(snapshot), files=("config.json", "model.safetensors"), source="hub"
    )
    assert SafetensorsWeightLoader().describe(artifact).vocab_size == 100


def test_pickled_weights_are_refused_with_the_way_out(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    root = hf_folder(tensors={})
    (root / "pytorch_model.bin").write_bytes(b"\x80\x04cos\nsystem\n.")
    artifact = ModelArtifact(name="m", root=str(root), files=("config.json",), source="test")
    assert SafetensorsWeightLoader().accepts(artifact)
    with pytest.raises(ModelFormatError, match=r"only pickled weights \(pytorch_model.bin\).*save_pretrained"):
        SafetensorsWeightLoader().describe(artifact)


def test_missing_parts_are_named(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    root = hf_folder(tensors={})
    with pytest.raises(ModelFormatError, match=r"no weights: model\.safetensors"):
        SafetensorsWeightLoader().describe(as_artifact(root))
    for name in ("x.safetensors", "y.safetensors"):
        save_file({"a": np.ones(2, np.float32)}, root / name)
    with pytest.raises(ModelFormatError, match=r"model\.safetensors\.index\.json is missing"):
        SafetensorsWeightLoader().describe(as_artifact(root))
    (root / "y.safetensors").unlink()
    (root / "config.json").unlink()
    with pytest.raises(ModelFormatError, match=r"config\.json is missing"):
        SafetensorsWeightLoader().describe(as_artifact(root))


def resident_bytes(path: Path) -> int:
    """Memory that the mappings of ``path`` hold in this process."""
    total, is_ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(maxsplit=1)[0]:
            is_ours = line.endswith(str(path))
        elif is_ours and line.startswith("Rss:"):
            total += int(line.split()[1]) * 1024
    return total


@pytest.mark.skipif(not os.path.exists("/proc/self/smaps"), reason="resident memory per mapping is a Linux figure")
def test_what_was_read_does_not_stay_in_memory(hf_folder: MakeFolder, as_artifact: AsArtifact) -> None:
    """Weights that are converted while they are loaded would otherwise lie in memory twice."""
    size = 4 << 20
    folder = hf_folder(tensors={f"t{index}": np.full(size, index, np.uint8) for index in range(6)})
    loader = SafetensorsWeightLoader()
    found, most = [], 0
    for one in loader.tensors(loader.describe(as_artifact(folder))):
        found.append((one.name, int(one.data.max()), int(one.data.min())))
        most = max(most, resident_bytes(folder / "model.safetensors"))
    assert sorted(found) == [(f"t{index}", index, index) for index in range(6)]
    assert size // 2 <= most <= 2 * size

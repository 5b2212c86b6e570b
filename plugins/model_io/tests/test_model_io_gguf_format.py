"""GGUF headers: what is well formed is read, anything else is one error that names the file (class 11)."""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable
from pathlib import Path

import gguf
import numpy as np
import pytest

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.formats.gguf import GgufArray, read_gguf
from hardpoint_model_io.tokenizers.gguf import GgufTokenizerProvider
from hardpoint_model_io.weights.gguf import GgufWeightLoader


def header(num_tensors: int = 0, num_metadata: int = 0, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_metadata)


def text(value: bytes) -> bytes:
    return struct.pack("<Q", len(value)) + value


def entry(key: bytes, kind: int, value: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + value


def row(name: bytes = b"t", dims: tuple[int, ...] = (4,), kind: int = 0, offset: int = 0) -> bytes:
    packed_dims = struct.pack(f"<{len(dims)}Q", *dims)
    return text(name) + struct.pack("<I", len(dims)) + packed_dims + struct.pack("<IQ", kind, offset)


def padded(head: bytes, data: bytes = b"", alignment: int = 32) -> bytes:
    return head + b"\0" * (-len(head) % alignment) + data


def test_a_file_of_the_reference_writer_reads_the_same_as_by_its_reader(gguf_file: Callable[..., Path]) -> None:
    path = gguf_file()
    ours, theirs = read_gguf(path), gguf.GGUFReader(path)
    assert {tensor.name for tensor in theirs.tensors} == set(ours.tensors)
    for tensor in theirs.tensors:
        mine = ours.tensors[tensor.name]
        assert mine.shape == tuple(int(size) for size in reversed(tensor.shape))
        assert mine.offset == tensor.data_offset
        assert np.array_equal(ours.raw(mine).reshape(-1), tensor.data.view(np.uint8).reshape(-1))
    for key, field in theirs.fields.items():
        if key.startswith("GGUF."):
            continue
        value = ours.metadata[key]
        if isinstance(value, GgufArray):
            is_text = field.types[-1] == gguf.GGUFValueType.STRING
            found = [entry.decode() for entry in ours.strings(key)] if is_text else ours.numbers(key).tolist()
            assert found == field.contents()
        else:
            assert value == field.contents()


def test_the_demo_models_header_and_vocabulary_take_under_half_a_second(smollm2: ModelArtifact) -> None:
    started = time.perf_counter()
    info = GgufWeightLoader().describe(smollm2)
    file = read_gguf(Path(smollm2.root) / smollm2.files[0])
    assert len(file.strings("tokenizer.ggml.tokens")) == info.vocab_size == 49_152
    assert len(file.strings("tokenizer.ggml.merges")) == 48_900
    assert time.perf_counter() - started < 0.5


def test_version_2_is_read_too(tmp_path: Path) -> None:
    path = tmp_path / "v2.gguf"
    path.write_bytes(padded(header(1, 0, version=2) + row(), b"\0" * 16))
    assert read_gguf(path).tensors["t"].shape == (4,)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "empty"),
        (b"GG", "magic number needs 4 bytes"),
        (b"GGML" + bytes(40), "does not begin with 'GGUF'"),
        (header(version=1), "version 1"),
        (b"GGUF" + struct.pack(">I", 3) + bytes(40), "big-endian"),
        (header(version=9), "version 9"),
        (header()[:10], "tensor count needs 8 bytes"),
        (header(2**63), "claims 9223372036854775808 tensors"),
        (header(0, 2**60), "metadata entries"),
        (padded(header(0, 1) + struct.pack("<Q", 2**62) + bytes(20)), "claims 4611686018427387904 bytes"),
        (padded(header(0, 1) + text(b"\xff\xfe") + bytes(12)), "not valid UTF-8"),
        (padded(header(0, 1) + entry(b"k", 99, b"")), "unknown value type 99"),
        (padded(header(0, 1) + entry(b"k", 8, struct.pack("<Q", 2**40))), "more than"),
        (padded(header(0, 1) + entry(b"k", 8, struct.pack("<Q", 2**20))), "only"),
        (padded(header(0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 2**50))), "claims 1125899906842624 elements"),
        (padded(header(0, 1) + entry(b"k", 9, struct.pack("<IQ", 8, 10**6))), "entry"),
        (padded(header(0, 1) + entry(b"k", 9, struct.pack("<IQ", 12, 10**6))), "needs 8000000 bytes"),
        (padded(header(0, 1) + entry(b"k", 9, struct.pack("<IQ", 9, 1) + bytes(30))), "unsupported type 9"),
        (padded(header(0, 2) + 2 * entry(b"k", 4, bytes(4))), "occurs twice"),
        (padded(header(0, 1) + entry(b"general.alignment", 4, struct.pack("<I", 3))), "power of two"),
        (padded(header(0, 1) + entry(b"general.alignment", 4, bytes(4))), "power of two"),
        (padded(header(0, 1) + entry(b"general.alignment", 8, text(b"32"))), "power of two"),
        (padded(header(1) + row(dims=()), bytes(64)), "0 dimensions"),
        (padded(header(1) + text(b"t") + struct.pack("<I", 2**31) + bytes(40)), "dimensions"),
        (padded(header(1) + row(dims=(0,)), bytes(64)), "impossible shape"),
        (padded(header(1) + row(dims=(2**40, 2**40)), bytes(64)), "impossible shape"),
        (padded(header(1) + row(dims=(33,), kind=8), bytes(64)), "no multiple of the 32"),
        (padded(header(1) + row(offset=2**60), bytes(64)), "should end at byte"),
        (padded(header(1) + row(dims=(17,)), bytes(64)), "should end at byte"),
        (padded(header(1) + row(offset=8), bytes(64)), "not aligned"),
        (padded(header(2) + row() + row(), bytes(64)), "occurs twice"),
        (padded(header(2) + row(b"a", (16,)) + row(b"b", (4,), offset=32), bytes(64)), "overlap"),
    ],
)
def test_each_fault_names_the_file(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "broken.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelFormatError, match=message) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize(("kind", "name"), [(10, "Q2_K"), (29, "IQ1_M"), (4_000, "number 4000")])
def test_other_tensor_types_are_named(tmp_path: Path, kind: int, name: str) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(padded(header(1) + row(b"blk.0.attn_q.weight", kind=kind), bytes(64)))
    with pytest.raises(UnsupportedModelError, match=f"'blk.0.attn_q.weight' is stored as GGUF type {name}"):
        read_gguf(path)


def test_a_fifo_is_refused_without_waiting_for_a_writer(tmp_path: Path) -> None:
    path = tmp_path / "pipe.gguf"
    os.mkfifo(path)
    started = time.perf_counter()
    with pytest.raises(ModelFormatError, match="not a regular file"):
        read_gguf(path)
    artifact = ModelArtifact(name="p", root=str(tmp_path), files=(path.name,), source="t")
    assert GgufWeightLoader().accepts(artifact), "by its name: then the message can say what is wrong with it"
    with pytest.raises(ModelFormatError, match="not a regular file"):
        GgufWeightLoader().describe(artifact)
    assert time.perf_counter() - started < 1


@pytest.mark.parametrize("target", ["missing.gguf", "."])
def test_missing_files_and_folders_are_one_message(tmp_path: Path, target: str) -> None:
    with pytest.raises(ModelFormatError, match=str(tmp_path)):
        read_gguf(tmp_path / target)


def test_truncation_anywhere_is_one_error(gguf_file: Callable[..., Path], as_artifact: Callable) -> None:
    whole = gguf_file().read_bytes()
    for size in [*range(0, 2_000, 13), *range(2_000, len(whole), 997)]:
        path = gguf_file("cut.gguf")
        path.write_bytes(whole[:size])
        with pytest.raises(ModelFormatError):
            GgufWeightLoader().describe(as_artifact(path))


def mutated(whole: bytes, generator: np.random.Generator) -> bytes:
    """A few bytes changed, mostly in the header, sometimes to extreme values; sometimes cut or spliced."""
    data = bytearray(whole)
    for _ in range(int(generator.integers(1, 5))):
        position = int(generator.integers(0, min(len(data), 1_600)))
        match int(generator.integers(0, 4)):
            case 0:
                data[position] = int(generator.integers(0, 256))
            case 1:
                extreme = (2**63, 2**64 - 1, 2**31, 0)[int(generator.integers(0, 4))]
                data[position : position + 8] = extreme.to_bytes(8, "little")
            case 2:
                data[position] ^= 1 << int(generator.integers(0, 8))
            case _:
                other = int(generator.integers(0, min(len(data), 1_600)))
                data[position : position + 16] = data[other : other + 16]
    if generator.random() < 0.1:
        del data[int(generator.integers(0, len(data))) :]
    return bytes(data)


def test_mutations_end_in_a_model_or_one_of_two_errors(tmp_path: Path, gguf_file: Callable[..., Path]) -> None:
    whole = gguf_file().read_bytes()
    generator = np.random.default_rng(11)
    path = tmp_path / "mutant.gguf"
    artifact = ModelArtifact(name="m", root=str(tmp_path), files=(path.name,), source="test")
    refused: list[str] = []
    slowest = 0.0
    for _ in range(2_000):
        path.write_bytes(mutated(whole, generator))
        started = time.perf_counter()
        try:
            info = GgufWeightLoader().describe(artifact)
            for tensor in GgufWeightLoader().tensors(info):
                assert tensor.data.shape == tensor.shape
            GgufTokenizerProvider().load(artifact)
        except (ModelFormatError, UnsupportedModelError) as error:
            refused.append(str(error))
        slowest = max(slowest, time.perf_counter() - started)
    assert len(refused) > 500
    assert all(str(path) in message for message in refused)
    assert slowest < 1.0

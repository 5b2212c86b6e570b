"""Class 11: thousands of damaged headers of both formats; each is read or refused with one of two errors."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_model_io.formats.gguf import read_gguf
from hardpoint_model_io.formats.safetensors import read_safetensors

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NUM_MUTATIONS = 10_000
EXTREMES = (2**64 - 1, 2**63, 2**32, 2**31 - 1, 1, 0)


def mutated(whole: bytes, generator: np.random.Generator, reach: int) -> bytes:
    """One to four places among the first ``reach`` bytes changed, moved or made extreme; one file in ten is cut."""
    data = bytearray(whole)
    for place, way, other in generator.integers(0, (reach, 4, reach), (int(generator.integers(1, 5)), 3)).tolist():
        if way == 0:
            data[place] = other % 256
        elif way == 1:
            data[place] ^= 1 << other % 8
        elif way == 2:
            data[place : place + 8] = EXTREMES[other % len(EXTREMES)].to_bytes(8, "little")
        else:
            data[place : place + 16] = data[other : other + 16]
    return bytes(data[: int(generator.integers(0, len(data)))]) if generator.random() < 0.1 else bytes(data)


def refusals(path: Path, read: Callable[[Path], object], reach: int) -> int:
    whole = path.read_bytes()
    generator = np.random.default_rng(43)
    count = 0
    for _ in range(NUM_MUTATIONS):
        path.write_bytes(mutated(whole, generator, min(reach, len(whole))))
        try:
            read(path)
        except (ModelFormatError, UnsupportedModelError) as error:
            count += 1
            assert str(path) in str(error)  # noqa: PT017
    return count


def test_gguf_headers(gguf_file: Callable[..., Path]) -> None:
    """Every tensor of what is read lies in the file."""

    def read(path: Path) -> None:
        file = read_gguf(path)
        for tensor in file.tensors.values():
            assert file.raw(tensor).nbytes == tensor.num_bytes

    assert NUM_MUTATIONS // 4 < refusals(gguf_file(), read, 1_600) < NUM_MUTATIONS


def test_safetensors_headers(hf_folder: Callable[..., Path], as_artifact: Callable[[Path], ModelArtifact]) -> None:
    folder = hf_folder()
    path = folder / "model.safetensors"

    def read(path: Path) -> None:
        file = read_safetensors(path)
        for tensor in file.tensors.values():
            assert file.array(tensor).shape == tensor.shape

    header = 8 + int.from_bytes(path.read_bytes()[:8], "little")
    assert NUM_MUTATIONS // 4 < refusals(path, read, header) < NUM_MUTATIONS

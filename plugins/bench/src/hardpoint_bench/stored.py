"""How the weights of a model are stored: what has to be read in each step, and what is said beside figures."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from hardpoint_bench.roofline import Geometry, Stored

__all__ = ["stored_in_class", "stored_in_file", "weights_of"]

_FOLDERS = {
    "hf-fp32": "float32 weights",
    "hf-w8a8": "int8 weights per channel",
    "openvino-fp32": "float32 weights",
    "openvino-int8": "int8 weights per channel",
    "openvino-int4": "int4 weights in groups of 64",
}
"""Converted models, which are all named like this."""
_BYTES_PER_WEIGHT = {"fp32": 4.0, "int8": 1.0}
_LAYERS = "blk."
_HEADS = ("output.weight", "token_embd.weight")


def weights_of(path: Path) -> str | None:
    """The type of most weights of a GGUF file, such as ``Q4_1``; in words for a converted folder, None for another."""
    if path.suffix != ".gguf":
        return _FOLDERS.get(path.name)
    kinds: Counter[str] = Counter()
    for _, kind, num_bytes in _matrices(path):
        kinds[kind] += num_bytes
    return kinds.most_common(1)[0][0]


def stored_in_file(path: Path, *, tied: bool) -> Stored:
    """Bytes as they are packed in a GGUF file."""
    sizes = {name: num_bytes for name, _, num_bytes in _matrices(path)}
    layers = sum(size for name, size in sizes.items() if name.startswith(_LAYERS))
    return Stored(layers, next((sizes[name] for name in _HEADS if name in sizes), 0), tied)


def stored_in_class(precision: str, geometry: Geometry, model: Path) -> Stored | None:
    """Bytes of our weights: computed from sizes, or read in the file where they stay packed; None for no such file."""
    if precision in _BYTES_PER_WEIGHT:
        return Stored.at(geometry, _BYTES_PER_WEIGHT[precision])
    return stored_in_file(model, tied=geometry.tied) if model.suffix == ".gguf" else None


def _matrices(path: Path) -> list[tuple[str, str, int]]:
    """Name, type and bytes of each, vectors left out."""
    from gguf import GGUFReader

    return [
        (tensor.name, tensor.tensor_type.name, int(tensor.n_bytes))
        for tensor in GGUFReader(path).tensors
        if len(tensor.shape) > 1
    ]

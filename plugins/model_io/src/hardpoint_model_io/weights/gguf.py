"""Weight loader ``gguf``: describes a GGUF file and yields its tensors under Hugging Face names."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from math import prod

import numpy as np

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightLoaderContext, WeightTensor
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_model_io.files import confined_path, release_pages, starts_with
from hardpoint_model_io.formats.gguf import MAGIC, GgufFile, GgufTensor, read_gguf
from hardpoint_model_io.formats.gguf_config import build_config, token_id
from hardpoint_model_io.formats.gguf_dequant import dequantize
from hardpoint_model_io.formats.gguf_names import (
    IGNORED_TENSORS,
    GgufArchitecture,
    MappedName,
    Transform,
    architectures,
    find_architecture,
    map_tensor_name,
)
from hardpoint_model_io.formats.gguf_vocabulary import end_token_ids
from hardpoint_model_io.weights.sizes import check_sizes

_PLAIN_DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": np.uint16}


class GgufWeightLoader(WeightLoader):
    """``packed`` yields blocks as stored (uint8 ``[rows, bytes per row]``); otherwise they become float32.

    Plain tensors (float32, float16, bfloat16 as uint16) are views of the file in both cases.
    """

    def __init__(self, packed: bool = False) -> None:
        self._packed = packed

    def accepts(self, artifact: ModelArtifact) -> bool:
        """A single file called ``.gguf`` or beginning with the magic number; :meth:`describe` tells of damage."""
        if len(artifact.files) != 1:
            return False
        (name,) = artifact.files
        return name.endswith(".gguf") or starts_with(confined_path(artifact.root, name), MAGIC)

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        file, row = _open(artifact)
        config = build_config(file, row)
        check_sizes(config, (tensor.shape for tensor in file.tensors.values()), file.path)
        for name in file.tensors:
            if name not in IGNORED_TENSORS:
                map_tensor_name(row, name, file.path)
        return ModelInfo(
            artifact=artifact,
            architecture=row.architecture,
            config=config,
            max_position=config["max_position_embeddings"],
            vocab_size=config["vocab_size"],
            dtype=_dominant_dtype(file),
            loader="gguf",
            eos_token_ids=end_token_ids(file),
            bos_token_id=token_id(file, "bos_token_id"),
            tasks=row.tasks,
        )

    def num_bytes(self, info: ModelInfo) -> int:
        file, row = _open(info.artifact)
        stored = [tensor for name, tensor in file.tensors.items() if name not in IGNORED_TENSORS]
        return sum(_yielded_bytes(map_tensor_name(row, one.name, file.path), one, self._packed) for one in stored)

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        file, row = _open(info.artifact)
        for stored in sorted(file.tensors.values(), key=lambda tensor: tensor.offset):
            if stored.name in IGNORED_TENSORS:
                continue
            mapped = map_tensor_name(row, stored.name, file.path)
            yield from _read(file, stored, mapped, info, self._packed)
            release_pages(file.data, stored.offset, stored.num_bytes)


def _open(artifact: ModelArtifact) -> tuple[GgufFile, GgufArchitecture]:
    if len(artifact.files) != 1:
        raise ModelFormatError(f"{artifact.root}: a GGUF model is one file, not {len(artifact.files)}")
    file = read_gguf(confined_path(artifact.root, artifact.files[0]))
    return file, find_architecture(file.metadata, file.path)


def _dominant_dtype(file: GgufFile) -> str:
    sizes: Counter[str] = Counter()
    for tensor in file.tensors.values():
        sizes[tensor.type.storage_name] += tensor.num_bytes
    return sizes.most_common(1)[0][0] if sizes else "float32"


def _yielded_bytes(mapped: MappedName, stored: GgufTensor, packed: bool) -> int:
    """Size of what :func:`_read` makes of a tensor."""
    is_dequantized = mapped.transform is Transform.SUBTRACT_ONE or (stored.type.is_packed and not packed)
    return 4 * prod(stored.shape) if is_dequantized else stored.num_bytes


def _read(
    file: GgufFile, stored: GgufTensor, mapped: MappedName, info: ModelInfo, packed: bool
) -> Iterator[WeightTensor]:
    """The tensor; of a stack one expert at a time, so that no more than that is ever unpacked."""
    raw, shape = file.raw(stored), stored.shape
    if not mapped.is_stack:
        yield _convert(file, stored, mapped, info, packed)
        return
    if len(shape) != 3:
        raise ModelFormatError(
            f"{file.path}: tensor {stored.name!r} of shape {list(shape)} is no stack of one matrix per expert; "
            "download the file again"
        )
    for expert, matrix in enumerate(raw):
        yield _as_stored(mapped.name.replace("*", str(expert)), matrix, stored, shape[1:], packed)


def _convert(file: GgufFile, stored: GgufTensor, mapped: MappedName, info: ModelInfo, packed: bool) -> WeightTensor:
    kind, shape = stored.type, stored.shape
    raw = file.raw(stored)
    if mapped.transform in (Transform.UNPERMUTE_QUERY, Transform.UNPERMUTE_KEY):
        key = "num_attention_heads" if mapped.transform is Transform.UNPERMUTE_QUERY else "num_key_value_heads"
        raw = _unpermute(raw, shape[0], info.config[key], f"{file.path}: tensor {stored.name!r}")
    if mapped.transform is Transform.SUBTRACT_ONE:
        values = dequantize(raw, kind, shape) - np.float32(1)
        return WeightTensor(mapped.name, "float32", shape, values)
    return _as_stored(mapped.name, raw, stored, shape, packed)


def _as_stored(name: str, raw: np.ndarray, stored: GgufTensor, shape: tuple[int, ...], packed: bool) -> WeightTensor:
    """Plain values as they are; packed ones as they are or as float32."""
    kind = stored.type
    if not kind.is_packed:
        return WeightTensor(name, kind.storage_name, shape, raw.view(_PLAIN_DTYPES[kind.storage_name]).reshape(shape))
    if packed:
        return WeightTensor(name, kind.storage_name, shape, raw, lambda: dequantize(raw, kind, shape))
    return WeightTensor(name, "float32", shape, dequantize(raw, kind, shape))


def _unpermute(raw: np.ndarray, num_rows: int, num_heads: int, origin: str) -> np.ndarray:
    """Rows from interleaved rotary order (a0 b0 a1 b1 ...) to split halves (a0 a1 ... b0 b1 ...) within each head.

    ``raw`` is uint8; its first axis, or its bytes for a vector, hold the rows. Whole rows move, so blocks stay intact.
    """
    if num_rows % (2 * num_heads):
        raise ModelFormatError(f"{origin} has {num_rows} rows, which do not divide into {num_heads} heads of pairs")
    paired = raw.reshape(num_heads, num_rows // num_heads // 2, 2, -1)
    return np.ascontiguousarray(paired.swapaxes(1, 2)).reshape(raw.shape)


@plugin("weight_loader", options=NoOptions, capabilities={"architectures": architectures()})
def create(ctx: WeightLoaderContext, options: NoOptions) -> WeightLoader:
    return GgufWeightLoader(packed=ctx.packed)

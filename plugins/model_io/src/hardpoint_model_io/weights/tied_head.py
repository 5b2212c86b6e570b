"""Whether a stored output head is one of its own, though the configuration calls head and embedding the same."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from hardpoint_model_io.formats.safetensors import SafetensorsFile, StoredTensor

__all__ = ["HEAD", "has_own_head"]

HEAD = "lm_head.weight"
_EMBEDDINGS = ("embed_tokens.weight", "wte.weight")
_CHUNK = 1 << 22
"""Values that are compared at a time; those of different matrices mostly differ in the first chunk."""


def has_own_head(stored: Mapping[str, tuple[SafetensorsFile, StoredTensor]]) -> bool:
    """Whether head and embedding are stored with different values: no file is written so by a model that ties them.

    ``stored``: tensors by name. False where either is not stored, or it is unclear which is the embedding.
    """
    heads = [name for name in stored if name == HEAD or name.endswith(f".{HEAD}")]
    tables = [name for name in stored if name.rpartition(".")[0].rpartition(".")[2] + ".weight" in _EMBEDDINGS]
    if len(heads) != 1 or len(tables) != 1:
        return False
    head, table = stored[heads[0]], stored[tables[0]]
    if (head[1].dtype, head[1].shape) != (table[1].dtype, table[1].shape):
        return True
    one, other = (shard.array(tensor).reshape(-1) for shard, tensor in (head, table))
    return any(
        not np.array_equal(one[begin : begin + _CHUNK], other[begin : begin + _CHUNK])
        for begin in range(0, one.size, _CHUNK)
    )

"""How keys and values are stored: element dtypes, quantization modes, and what ``--kv-cache-dtype`` may say."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass

from hardpoint.errors import ConfigError

_DTYPES = {4: ("float32", "int32"), 2: ("float16", "bfloat16"), 1: ("float8_e4m3fn", "float8_e5m2", "int8", "uint8")}
DTYPE_BYTES: Mapping[str, int] = {dtype: size for size, dtypes in _DTYPES.items() for dtype in dtypes}


def dtype_bytes(dtype: str) -> int:
    """Bytes of one element. Raises ``ConfigError`` for a name that is not in ``DTYPE_BYTES``."""
    if dtype not in DTYPE_BYTES:
        raise ConfigError(f"KV cache dtype {dtype!r} is unknown; allowed: {', '.join(sorted(DTYPE_BYTES))}")
    return DTYPE_BYTES[dtype]


class KVQuantization(enum.StrEnum):
    """How stored keys and values stand for the real ones. Kernels dispatch on it, never on the text of a setting.

    ``PER_TENSOR``: one scale for a layer's keys and one for its values. ``PER_TOKEN_HEAD``: scales of each head and
    state lie behind its content. ``CUSTOM``: only kernels that come with the registered storage know.
    """

    NONE = "none"
    PER_TENSOR = "per_tensor"
    PER_TOKEN_HEAD = "per_token_head"
    CUSTOM = "custom"


@dataclass(frozen=True, slots=True)
class KVStorage:
    """What a ``--kv-cache-dtype`` stands for. ``scale_bytes``: bytes of scales per head and state in the page."""

    dtype: str
    quantization: KVQuantization = KVQuantization.NONE
    scale_bytes: int = 0


_STORAGES: dict[str, KVStorage] = {
    **{dtype: KVStorage(dtype) for dtype in DTYPE_BYTES},
    "fp8": KVStorage("float8_e4m3fn", KVQuantization.PER_TENSOR),
    "fp8_e5m2": KVStorage("float8_e5m2", KVQuantization.PER_TENSOR),
    "int8_per_token_head": KVStorage("int8", KVQuantization.PER_TOKEN_HEAD, 8),
}


def register_kv_storage(name: str, storage: KVStorage) -> None:
    """Let ``--kv-cache-dtype name`` mean ``storage`` in this process; to be called where its kernels are loaded.

    Raises ``ConfigError`` when ``name`` means something else already. Equal data again change nothing.
    """
    dtype_bytes(storage.dtype)
    if _STORAGES.setdefault(name, storage) != storage:
        raise ConfigError(f"KV cache dtype {name!r} stands for {_STORAGES[name]} already; {storage} conflicts")


def kv_storage(name: str) -> KVStorage:
    """The one place where the text of a setting is read (R1.25). Raises ``ConfigError`` for an unregistered name."""
    if name not in _STORAGES:
        raise ConfigError(f"--kv-cache-dtype {name!r} is unknown; allowed: {', '.join(sorted(_STORAGES))}")
    return _STORAGES[name]

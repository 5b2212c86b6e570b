"""Opening files of a model that may be hostile: regular files inside the model's folder, and nothing else."""

from __future__ import annotations

import json
import mmap
import os
import stat
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from hardpoint.errors import ModelFormatError

MAX_JSON_BYTES = 16 * 1024 * 1024
"""Largest configuration file read; real ones stay under a megabyte."""
MAX_TOKENIZER_BYTES = 256 * 1024 * 1024
"""Largest ``tokenizer.json`` read; those of 260,000-token vocabularies have about 35 MB."""


def confined_path(root: str, name: str) -> Path:
    """Absolute real path of the file ``name`` of the model in ``root``.

    ``name`` must be relative, without ``..``, and must not lead out of the folder through a symbolic link. A snapshot
    folder of the hub cache is made of links into the ``blobs`` folder beside it, which therefore counts as inside.
    Raises ``ModelFormatError``.
    """
    pure = PurePosixPath(name)
    if not name or "\0" in name or "\\" in name or pure.is_absolute() or ".." in pure.parts:
        raise ModelFormatError(
            f"{root}: the model refers to the file {name!r}; only plain names inside the model's folder are allowed"
        )
    base = Path(os.path.realpath(root))
    real = Path(os.path.realpath(base / name))
    if not any(real.is_relative_to(allowed) for allowed in _allowed_roots(base)):
        raise ModelFormatError(
            f"{base / name} is a link to {real}, outside the model's folder; replace the link by the file itself"
        )
    return real


def _allowed_roots(base: Path) -> tuple[Path, ...]:
    if base.parent.name == "snapshots":
        return base, base.parent.parent / "blobs"
    return (base,)


def open_regular(path: Path) -> int:
    """Descriptor of a regular file, opened for reading without ever waiting for a FIFO's writer.

    Raises ``ModelFormatError`` naming the file when it is missing, unreadable or of another kind.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        raise ModelFormatError(f"{path} is missing; complete the model's folder or download it again") from None
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be read: {error}") from None
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise ModelFormatError(f"{path} is not a regular file; models are read from regular files only")
    return descriptor


def map_file(path: Path) -> mmap.mmap:
    """Read-only memory map of a regular, non-empty file. The map lives as long as arrays over it do."""
    descriptor = open_regular(path)
    try:
        if os.fstat(descriptor).st_size == 0:
            raise ModelFormatError(f"{path} is empty; download it again")
        return mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ)
    except (OSError, ValueError) as error:
        raise ModelFormatError(f"{path} cannot be mapped into memory: {error}") from None
    finally:
        os.close(descriptor)


def release_pages(data: mmap.mmap, start: int, size: int) -> None:
    """Give back the memory of whole pages within ``size`` bytes from ``start``; reading them again is slow, not wrong.

    Otherwise a model that is converted while it is loaded lies in memory twice.
    """
    first = start + -start % mmap.PAGESIZE
    last = (start + size) // mmap.PAGESIZE * mmap.PAGESIZE
    if last > first and hasattr(mmap, "MADV_DONTNEED"):
        data.madvise(mmap.MADV_DONTNEED, first, last - first)


def read_bytes(path: Path, limit: int) -> bytes:
    """Whole content of a regular file of at most ``limit`` bytes."""
    descriptor = open_regular(path)
    with os.fdopen(descriptor, "rb") as stream:
        data = stream.read(limit + 1)
    if len(data) > limit:
        raise ModelFormatError(f"{path} is larger than {limit} bytes, more than any such file needs")
    return data


def starts_with(path: Path, magic: bytes) -> bool:
    """True if ``path`` is a readable regular file beginning with ``magic``."""
    try:
        descriptor = open_regular(path)
    except ModelFormatError:
        return False
    try:
        return os.read(descriptor, len(magic)) == magic
    finally:
        os.close(descriptor)


def read_json_object(path: Path, limit: int = MAX_JSON_BYTES) -> dict[str, Any]:
    """A JSON file whose top level is an object. Raises ``ModelFormatError`` naming the file."""
    return decode_object(read_bytes(path, limit), str(path))


def decode_object(data: bytes | memoryview, origin: str) -> dict[str, Any]:
    """JSON object in ``data``; ``origin`` names it in errors. Excessive nesting counts as corrupt."""
    try:
        return msgspec.json.decode(data, type=dict[str, Any])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError) as error:
        if (found := _with_endless_numbers(data)) is not None:
            return found
        raise ModelFormatError(f"{origin} is not a valid JSON object: {error}; download the file again") from None


def _with_endless_numbers(data: bytes | memoryview) -> dict[str, Any] | None:
    """Python writes numbers that JSON lacks by name, and published configurations hold them (steps without a limit)."""
    text = bytes(data)
    if b"Infinity" not in text and b"NaN" not in text:
        return None
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) else None

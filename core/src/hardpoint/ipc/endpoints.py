"""Private places for sockets: a 0700 folder of this user, removed at exit, and checked addresses in it."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import shutil
import stat
import tempfile
import time
from pathlib import Path

from hardpoint.errors import ConfigError

_PREFIX = "hardpoint-"
_MARK = ".hardpoint-sockets"
"""In every folder made here, so that no other folder that happens to be called like one is ever removed."""

_MAX_PATH_BYTES = 107  # sun_path holds 108 bytes with its terminator.
_STALE_AFTER_S = 60.0


def create_runtime_dir() -> str:
    """A new private folder below ``XDG_RUNTIME_DIR`` (else the temporary folder), removed when this process exits.

    The folder stays locked while the process lives. Folders whose owner died without cleaning up are removed here.
    """
    base = os.environ.get("XDG_RUNTIME_DIR", "")
    if not (os.path.isdir(base) and os.access(base, os.W_OK)):
        base = tempfile.gettempdir()
    _remove_stale(Path(base))
    path = tempfile.mkdtemp(prefix=_PREFIX, dir=base)
    Path(path, _MARK).touch()
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    atexit.register(_remove_own, path, descriptor, os.getpid())
    return path


def private_ipc_address(runtime_dir: str, name: str) -> str:
    """``ipc://`` address of socket ``name`` in ``runtime_dir``.

    Raises ``ConfigError`` if the folder is not this user's own with mode 0700, or the path is too long for a socket.
    """
    if not name or "/" in name or "\0" in name:
        raise ConfigError(f"socket name {name!r} is not a plain file name")
    try:
        status = os.lstat(runtime_dir)
    except OSError as error:
        raise ConfigError(f"runtime folder {runtime_dir!r} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o077:
        raise ConfigError(f"runtime folder {runtime_dir!r} must be a folder owned by this user with mode 0700")
    path = os.path.join(os.path.abspath(runtime_dir), name)
    if len(os.fsencode(path)) > _MAX_PATH_BYTES:
        raise ConfigError(
            f"socket path {path!r} is longer than {_MAX_PATH_BYTES} bytes; set XDG_RUNTIME_DIR or TMPDIR to a short one"
        )
    return f"ipc://{path}"


def _remove_own(path: str, descriptor: int, owner: int) -> None:
    if os.getpid() == owner:
        shutil.rmtree(path, ignore_errors=True)
        os.close(descriptor)


def _remove_stale(base: Path) -> None:
    for path in base.glob(f"{_PREFIX}*"):
        with contextlib.suppress(OSError):
            status = path.lstat()
            # Young folders may not be locked yet by the process that makes them.
            is_ours = stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid()
            if is_ours and (path / _MARK).is_file() and time.time() - status.st_mtime > _STALE_AFTER_S:
                _remove_unlocked(path)


def _remove_unlocked(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        shutil.rmtree(path, ignore_errors=True)
    finally:
        os.close(descriptor)

"""Private folders and addresses."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
import zmq

from hardpoint.errors import ConfigError
from hardpoint.ipc import create_runtime_dir, private_ipc_address

SCRIPT = """
import os, signal, sys
from hardpoint.ipc import create_runtime_dir, private_ipc_address
folder = create_runtime_dir()
open(os.path.join(folder, "socket"), "w").close()
print(folder, flush=True)
if "die" in sys.argv:
    os.kill(os.getpid(), signal.SIGKILL)
if "live" in sys.argv:
    sys.stdin.read()
"""


def start(base: Path, *arguments: str) -> tuple[subprocess.Popen[str], Path]:
    process = subprocess.Popen(
        [sys.executable, "-c", SCRIPT, *arguments],
        env={**os.environ, "XDG_RUNTIME_DIR": str(base)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    return process, Path(process.stdout.readline().strip())


def finish(process: subprocess.Popen[str]) -> None:
    process.communicate(timeout=20)


def age(folder: Path) -> None:
    os.utime(folder, (time.time() - 3600,) * 2)


def test_the_folder_is_private_and_gone_after_an_ordinary_end(tmp_path: Path) -> None:
    process, folder = start(tmp_path, "live")
    assert folder.parent == tmp_path
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    finish(process)
    assert not folder.exists()


def test_what_a_killed_process_left_is_removed_by_the_next_one(tmp_path: Path) -> None:
    """kill -9: no leftover sockets or files once anything of ours starts again."""
    killed, leftover = start(tmp_path, "die")
    finish(killed)
    assert (leftover / "socket").exists()
    age(leftover)
    process, folder = start(tmp_path)
    finish(process)
    assert not leftover.exists()
    assert not folder.exists()


def test_a_living_processs_old_folder_and_strangers_are_left_alone(tmp_path: Path) -> None:
    living, folder = start(tmp_path, "live")
    other = tmp_path / "other"
    other.mkdir()
    link = tmp_path / "hardpoint-link"
    link.symlink_to(other)
    namesake = tmp_path / "hardpoint-checkout"
    namesake.mkdir(mode=0o700)
    (namesake / "work").touch()
    for path in (folder, other, namesake):
        age(path)
    finish(start(tmp_path)[0])
    assert folder.exists()
    assert (namesake / "work").exists()
    assert other.exists()
    assert link.is_symlink()
    finish(living)


def test_without_a_usable_base_the_temporary_folder_serves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "missing"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    folder = Path(create_runtime_dir())
    assert folder.parent == tmp_path


def test_an_address_serves_a_socket(tmp_path: Path) -> None:
    """Class 3: a unix socket in a folder that only this user can enter."""
    tmp_path.chmod(0o700)
    address = private_ipc_address(str(tmp_path), "s")
    assert address == f"ipc://{tmp_path}/s"
    with zmq.Context() as context, context.socket(zmq.PULL) as socket:
        socket.bind(address)
        assert stat.S_ISSOCK((tmp_path / "s").stat().st_mode)


@pytest.mark.parametrize("mode", [0o755, 0o710, 0o701, 0o777])
def test_a_folder_others_can_enter_is_refused(tmp_path: Path, mode: int) -> None:
    tmp_path.chmod(mode)
    with pytest.raises(ConfigError, match="mode 0700"):
        private_ipc_address(str(tmp_path), "s")


def test_a_link_or_a_missing_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir(mode=0o700)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(ConfigError, match="owned by this user"):
        private_ipc_address(str(tmp_path / "link"), "s")
    with pytest.raises(ConfigError, match="cannot be used"):
        private_ipc_address(str(tmp_path / "missing"), "s")


@pytest.mark.parametrize("name", ["", "a/b", "../x", "a\0b"])
def test_only_plain_names_are_sockets(tmp_path: Path, name: str) -> None:
    tmp_path.chmod(0o700)
    with pytest.raises(ConfigError, match="plain file name"):
        private_ipc_address(str(tmp_path), name)


def test_a_path_too_long_for_a_socket_is_refused_with_advice(tmp_path: Path) -> None:
    tmp_path.chmod(0o700)
    room = 107 - len(os.fsencode(tmp_path)) - 1
    assert private_ipc_address(str(tmp_path), "x" * room)
    with pytest.raises(ConfigError, match="set XDG_RUNTIME_DIR or TMPDIR"):
        private_ipc_address(str(tmp_path), "x" * (room + 1))

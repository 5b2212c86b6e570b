"""Child processes of an instance: how they start, what they inherit, and how their end is noticed on both sides.

A child is a fresh interpreter that runs one function with one payload of bytes. The payload travels over an inherited
descriptor, never over the command line. A child ends with its parent, however that ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import NoReturn

import msgspec

from hardpoint.errors import ConfigError, PluginError
from hardpoint.ipc.memory import anonymous_file
from hardpoint.logging import configure_logging, get_logger
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.report import LoadReport
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.roles import ProcessRole

__all__ = ["ChildProcess", "LoadReport", "announce_stop", "boot", "describe_exit", "spawn", "starting"]

_logger = get_logger(__name__)
_PR_SET_PDEATHSIG = 1


class _Launch(msgspec.Struct, frozen=True):
    """What a child needs before it can import anything. ``parent_pid`` None: it is not bound to a thread's life."""

    entry: str
    name: str
    search_path: tuple[str, ...]
    parent_pid: int | None
    payload: bytes


def spawn(
    entry: str, payload: bytes, *, name: str, env: Mapping[str, str] | None = None, pass_fds: Sequence[int] = ()
) -> ChildProcess:
    """Start ``module:function`` with ``payload`` in a new interpreter with the same flags and module search path.

    ``env`` is added to this process's environment; ``pass_fds`` are open in the child under the same numbers. The
    function's integer result, or 0, is the exit code. Raises ``ConfigError`` for a malformed ``entry``.
    """
    module, _, function = entry.partition(":")
    if not module or not function:
        raise ConfigError(f"entry {entry!r} is not of the form module:function")
    # The kernel's parent-death signal follows the spawning *thread*, so only the main thread may ask for it.
    is_main = threading.current_thread() is threading.main_thread()
    launch = _Launch(entry, name, tuple(sys.path), os.getpid() if is_main else None, payload)
    alive_read, alive_write = os.pipe()
    payload_fd = anonymous_file("hardpoint-payload", 0)
    try:
        with open(payload_fd, "wb", closefd=False) as file:
            file.write(msgspec.msgpack.encode(launch))
        os.lseek(payload_fd, 0, os.SEEK_SET)
        command = [sys.executable, "-P", *_interpreter_flags(), "-m", "hardpoint.process", name]
        process = subprocess.Popen(
            [*command, str(payload_fd), str(alive_read)],
            env={**os.environ, **(env or {})},
            pass_fds=(payload_fd, alive_read, *pass_fds),
            stdin=subprocess.DEVNULL,
        )
    except BaseException:
        os.close(alive_write)
        raise
    finally:
        os.close(payload_fd)
        os.close(alive_read)
    return ChildProcess(process, name, alive_write)


class ChildProcess:
    """A running or ended child. One watcher thread waits for its end; every method may be called from any thread."""

    def __init__(self, process: subprocess.Popen[bytes], name: str, alive_fd: int) -> None:
        self.name = name
        self.pid = process.pid
        self._process = process
        self._alive_fd: int | None = alive_fd
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._callbacks: list[Callable[[int], None]] = []
        threading.Thread(target=self._watch, name=f"watch-{name}", daemon=True).start()

    def __repr__(self) -> str:
        state = "running" if self.is_alive else describe_exit(self._process.returncode)
        return f"<ChildProcess {self.name} pid {self.pid}: {state}>"

    def poll(self) -> int | None:
        """Exit code, negative for a signal; None while it runs."""
        return self._process.returncode if self._ended.is_set() else None

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    def terminate(self) -> None:
        """Send SIGTERM; nothing happens to an ended child."""
        self._process.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL; nothing happens to an ended child."""
        self._process.send_signal(signal.SIGKILL)

    def wait(self, timeout: float | None = None) -> int | None:
        """Exit code, or None if it still runs after ``timeout`` seconds."""
        self._ended.wait(timeout)
        return self.poll()

    def on_exit(self, callback: Callable[[int], None]) -> None:
        """Call ``callback(returncode)`` once, on the watcher thread; at once if the child has ended already."""
        with self._lock:
            if not self._ended.is_set():
                self._callbacks.append(callback)
                return
        callback(self._process.returncode)

    def close(self) -> None:
        """Kill the child if it still runs, and give up what belongs to it here. Idempotent."""
        if self.is_alive:
            self.kill()
            self.wait()
        with self._lock:
            if self._alive_fd is not None:
                os.close(self._alive_fd)
                self._alive_fd = None

    def _watch(self) -> None:
        returncode = self._process.wait()
        with self._lock:
            self._ended.set()
            callbacks, self._callbacks = self._callbacks, []
        for callback in callbacks:
            try:
                callback(returncode)
            except Exception:
                _logger.exception("an exit callback of %s failed", self.name)


def describe_exit(returncode: int) -> str:
    """``exit code 3`` or ``signal SIGKILL``, for messages."""
    if returncode >= 0:
        return f"exit code {returncode}"
    with contextlib.suppress(ValueError):
        return f"signal {signal.Signals(-returncode).name}"
    return f"signal {-returncode}"


def boot(
    plan: bytes, roles: Iterable[ProcessRole], *, rank: int | None = None, log_level: str | None = None
) -> PluginRuntime:
    """First act of a process that holds ``roles``: logging, the plan, its verification, hooks, then the platform.

    Raises ``PluginMismatchError`` when the plugins installed here differ from the plan, ``PluginLoadError`` for a
    plugin that is needed and fails.
    """
    roles = frozenset(roles)
    title = "+".join(role for role in ProcessRole if role in roles)
    configure_logging(title if rank is None else f"{title}-{rank}", log_level)
    try:
        decoded = PluginPlan.from_bytes(plan)
    except msgspec.MsgspecError as error:
        raise PluginError(f"what {title} was given is not a plugin plan: {error}") from error
    runtime = PluginRuntime(decoded, roles, rank)
    hooks = HookRunner.from_runtime(runtime)  # Vendors prepare the process here: nothing has touched hardware yet.
    for planned in runtime.plan.of("platform"):
        if planned.active:
            runtime.platform = runtime.make("platform", planned.name)
    hooks.start(runtime)
    return runtime


@contextlib.contextmanager
def starting(runtime: PluginRuntime) -> Iterator[None]:
    """Tell this process's hooks that ``runtime`` begins its work, and should the body fail, that it ended."""
    HookRunner.from_runtime(runtime).start(runtime)
    try:
        yield
    except BaseException:
        announce_stop(runtime)
        raise


def announce_stop(runtime: PluginRuntime) -> None:
    """Last act of an orderly end: tell this process's hooks. Idempotent."""
    HookRunner.from_runtime(runtime).stop(runtime)


def _interpreter_flags() -> list[str]:
    flags = ["-" + "O" * sys.flags.optimize] if sys.flags.optimize else []
    flags += [f"-W{option}" for option in sys.warnoptions]
    flags += [f"-X{key}" if value is True else f"-X{key}={value}" for key, value in sys._xoptions.items()]
    if sys.flags.isolated:
        return [*flags, "-I"]
    return flags + (["-E"] if sys.flags.ignore_environment else []) + (["-s"] if sys.flags.no_user_site else [])


def _child_main(payload_fd: int, alive_fd: int) -> int:
    """What ``python -m hardpoint.process`` does: bind to the parent's life, then run the entry."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.set_inheritable(alive_fd, False)
    with open(payload_fd, "rb") as file:
        launch = msgspec.msgpack.decode(file.read(), type=_Launch)
    sys.path[:] = launch.search_path
    if launch.parent_pid is not None:
        _die_with_parent(launch.parent_pid)
    threading.Thread(target=_watch_parent, args=(alive_fd,), name="watch-parent", daemon=True).start()
    configure_logging(launch.name)
    module, _, function = launch.entry.partition(":")
    result = getattr(importlib.import_module(module), function)(launch.payload)
    return result if isinstance(result, int) else 0


def _die_with_parent(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent_pid:
        os._exit(1)


def _watch_parent(alive_fd: int) -> NoReturn:
    # The parent never writes: the read ends when the parent's end of the pipe closes, by its death or by close().
    os.read(alive_fd, 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(_child_main(int(sys.argv[2]), int(sys.argv[3])))

"""When compiled kernels are there: loaded from the cache, compiled meanwhile, or not to be had. Imports no torch."""

from __future__ import annotations

import enum
import logging
import os
import platform
import threading
import weakref
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import ThreadPlan
from hardpoint.logging import get_logger
from hardpoint_cpu.host import Host
from hardpoint_cpu.native.build import KernelBuild, KernelBuildError, find_build
from hardpoint_cpu.native.levels import Level, named_level

if TYPE_CHECKING:
    from hardpoint_cpu.native.library import NativeLibrary

__all__ = ["BuildMode", "KernelProvider", "KernelReport", "KernelState", "find_report"]

BuildMode = Literal["background", "wait", "off"]
_SWITCHED_OFF = "plugins.platform.cpu.kernels is off"
LOST = "plain torch computes instead, several times slower"
# One pool of threads per process, however many platforms are created in it (in tests); gone with its last user. A child
# that was forked has none of its parent's threads.
_LOADED: weakref.WeakValueDictionary[tuple[int, Path, ThreadPlan], NativeLibrary] = weakref.WeakValueDictionary()


class KernelState(enum.StrEnum):
    """``UNASKED``: nobody needed kernels yet."""

    UNASKED = "unasked"
    COMPILING = "compiling"
    READY = "ready"
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class KernelReport:
    """``path``: where the library lies or will lie, None without a compiler; ``reason``: why it is unavailable."""

    level: str
    state: KernelState
    path: Path | None = None
    reason: str | None = None

    def facts(self) -> dict[str, str]:
        """For diagnosis, by name."""
        given = {"kernels": self.state.value, "kernel_level": self.level, "kernel_path": self.path}
        given["kernel_reason"] = self.reason
        return {name: str(value) for name, value in given.items() if value is not None}


class KernelProvider:
    """The kernels of one process, for every user of them. ``library()`` may be asked at every step.

    Args:
        level: a level's name or ``auto``. Raises ``ConfigError`` for one that this host cannot run.
        build: what happens where the cache holds no library yet: compile while plain torch computes, compile at once,
            or do without.
        is_enabled: False: there are no kernels, whatever the cache holds.
        environment: by default the process's; says where the cache and the compiler are.
    """

    def __init__(
        self,
        host: Host,
        *,
        level: str = "auto",
        build: BuildMode = "background",
        is_enabled: bool = True,
        environment: Mapping[str, str] | None = None,
        logger: logging.Logger | None = None,
    ) -> None:
        try:
            self.level: Level = named_level(level, platform.machine(), host.cpu_flags())
        except ValueError as error:
            raise ConfigError(f"{error}; change plugins.platform.cpu.kernel_level") from error
        self._host = host
        self._settings: dict[str, Any] = {"level": level, "build": build, "is_enabled": is_enabled}
        self._mode = build
        self._is_enabled = is_enabled
        self._environment = os.environ if environment is None else environment
        self._logger = logger or get_logger(__name__)
        self._threads: ThreadPlan | None = None
        self._lock = threading.RLock()
        self._build: KernelBuild | None = None
        self._compilation: _Compilation | None = None
        self._library: NativeLibrary | None = None
        self._state = KernelState.UNASKED
        self._reason: str | None = None

    def bind(self, threads: ThreadPlan) -> None:
        """The threads that will compute; before the first :meth:`library`, else they are one."""
        self._threads = threads

    def library(self) -> NativeLibrary | None:
        """The kernels, or None where there are none (yet): :meth:`report` says why.

        The first call loads what the cache holds, or begins to compile. Never waits, unless asked to by ``build``.
        """
        if self._library is None and self._state is not KernelState.UNAVAILABLE:
            with self._lock:
                self._advance()
        return self._library

    def wait(self) -> NativeLibrary | None:
        """The same after a compilation that is under way."""
        self.library()
        with self._lock:
            if self._compilation is not None:
                self._compilation.join()
        return self.library()

    def report(self) -> KernelReport:
        """Asks for nothing to be loaded or compiled."""
        if not self._is_enabled:
            return KernelReport(self.level.name, KernelState.UNAVAILABLE, None, _SWITCHED_OFF)
        if self._state is KernelState.UNASKED:
            return find_report(self.level, self._environment)
        path = self._build.path if self._build is not None else None
        return KernelReport(self.level.name, self._state, path, self._reason)

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(KernelProvider, **self._settings), (self._host,)

    def __deepcopy__(self, memo: object) -> KernelProvider:
        """Copies of a platform are in the same process, and share its kernels."""
        del memo
        return self

    def _advance(self) -> None:
        try:
            if self._state is KernelState.UNASKED:
                self._start()
            elif self._compilation is not None and not self._compilation.is_running:
                self._compilation.result()
                self._load()
        except KernelBuildError as error:
            self._give_up(str(error))
        except OSError as error:
            self._give_up(_unusable(error))

    def _start(self) -> None:
        if not self._is_enabled:
            self._give_up(_SWITCHED_OFF)
            return
        self._build = find_build(self.level, self._environment)
        if self._build.is_ready():
            self._load()
        elif self._mode == "background":
            self._logger.info(
                "compiling CPU kernels for %s in the background, once, into %s; until then %s",
                self.level.name,
                self._build.path,
                LOST,
            )
            self._state = KernelState.COMPILING
            self._compilation = _Compilation(self._build)
        elif self._mode == "wait":
            self._logger.info("compiling CPU kernels for %s, once, into %s", self.level.name, self._build.path)
            self._build.compile()
            self._load()
        else:
            self._give_up(
                "they are not compiled yet and plugins.platform.cpu.kernel_build is off; compile them with "
                "`python -m hardpoint_cpu.native.build`"
            )

    def _load(self) -> None:
        # Deferred: a platform can be asked about everything else without torch.
        from hardpoint_cpu.native.library import NativeLibrary

        build = self._build
        if build is None:
            raise RuntimeError("there is nothing to load before the first library()")
        build.check_owner()
        build.check_whole()
        plan = self._threads or ThreadPlan(compute_threads=1)
        path = build.path
        key = (os.getpid(), path, plan)
        library = _LOADED.get(key)
        if library is None:
            # Pinning needs a core for each thread, no more and no fewer.
            cores = plan.cores if len(plan.cores) == plan.compute_threads else ()
            try:
                library = NativeLibrary(path, threads=plan.compute_threads, cores=cores)
            except (OSError, ValueError, AttributeError) as error:
                raise KernelBuildError(f"{path} cannot be loaded: {error}; delete its folder") from error
            _LOADED[key] = library
        self._library, self._state = library, KernelState.READY
        self._logger.info("CPU kernels for %s on %d threads: %s", self.level.name, plan.compute_threads, path)

    def _give_up(self, reason: str) -> None:
        self._state, self._reason = KernelState.UNAVAILABLE, reason
        # Who switched them off knows.
        level = logging.INFO if reason == _SWITCHED_OFF else logging.WARNING
        self._logger.log(level, "there are no CPU kernels, so %s: %s", LOST, reason)


class _Compilation:
    """Runs in a thread of its own; a process that ends meanwhile waits for the compilers it started."""

    def __init__(self, build: KernelBuild) -> None:
        self._build = build
        self._error: KernelBuildError | None = None
        self._thread = threading.Thread(target=self._run, name="hardpoint-cpu-kernels", daemon=True)
        self._thread.start()

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def join(self) -> None:
        self._thread.join()

    def result(self) -> None:
        """Raises ``KernelBuildError`` where compiling failed."""
        if self._error is not None:
            raise self._error

    def _run(self) -> None:
        try:
            # Of this thread and the compilers it starts: what computes meanwhile goes first.
            os.nice(10)
            self._build.compile()
        except KernelBuildError as error:
            self._error = error
        except OSError as error:
            self._error = KernelBuildError(f"{self._build.cache} cannot be written: {error}; set XDG_CACHE_HOME")


def find_report(level: Level, environment: Mapping[str, str] = os.environ) -> KernelReport:
    """What is to be found for ``level`` without loading or compiling anything."""
    try:
        build = find_build(level, environment)
        path = build.path
        state = KernelState.READY if build.is_ready() else KernelState.UNASKED
    except KernelBuildError as error:
        return KernelReport(level.name, KernelState.UNAVAILABLE, None, str(error))
    except OSError as error:
        return KernelReport(level.name, KernelState.UNAVAILABLE, None, _unusable(error))
    return KernelReport(level.name, state, path)


def _unusable(error: OSError) -> str:
    return f"the cache of kernels cannot be used: {error}; set XDG_CACHE_HOME to a folder of yours"

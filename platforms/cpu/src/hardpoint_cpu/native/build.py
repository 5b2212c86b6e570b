"""Compiling the kernels into a cache that processes share. ``python -m hardpoint_cpu.native.build`` does it ahead.

A library lies under keys made of the sources and flags and of the compiler's version, so nothing in the cache is ever
out of date; where there is no compiler, one that was compiled before, by whichever, will do. It is compiled beside its
place and moved there whole: whoever looks sees all of it or nothing. What one source compiles to is kept as well, so
that a change of one file costs one file. However many processes start at once, one of them compiles. Kernels do not
link to torch, whose version therefore takes no part in keys.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import platform
import re
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hardpoint_cpu.host import Host
from hardpoint_cpu.native.levels import Level, named_level

__all__ = ["SOURCES", "KernelBuild", "KernelBuildError", "cache_folder", "find_build", "find_compiler"]

SOURCES = Path(__file__).parent
LIBRARY = "libhardpoint_cpu.so"
OBJECTS = "objects"
"""In the cache: what single sources were compiled to."""
FLAGS = (
    *("-std=c++20", "-O3", "-fPIC", "-fvisibility=hidden", "-pthread"),
    # Sums keep their order, which other parts of -ffast-math would not promise.
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=fast"),
    # The last one is about vectors that the compiler's own header leaves undefined on purpose.
    *("-Wall", "-Wextra", "-Wno-maybe-uninitialized"),
)
SHOWN_LINES = 12
VERSION_TIMEOUT_S = 60.0
"""A compiler that takes longer to say its version is none; it is asked before anything is computed."""
ABANDONED_S = 24 * 3600.0
"""Of what a build that was killed leaves behind: swept up by a later build after this time."""
_INCLUDED = re.compile(r'^#include "([^"]+)"', re.MULTILINE)


class KernelBuildError(RuntimeError):
    """The kernels cannot be compiled or loaded; the message says why and what to do."""


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """Where compiled kernels are kept: ``hardpoint/cpu-kernels`` in the user's cache folder."""
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hardpoint" / "cpu-kernels"


def find_compiler(environment: Mapping[str, str] = os.environ) -> str:
    """``CXX``, or the first C++ compiler on the path. Raises ``KernelBuildError`` without one."""
    path = environment.get("PATH", "")
    wanted = environment.get("CXX")
    for name in (wanted,) if wanted else ("g++", "c++", "clang++"):
        found = shutil.which(name, path=path)
        if found is not None:
            return found
    what = f"CXX={wanted!r} is not on the path" if wanted else "there is no C++ compiler (g++, c++ or clang++)"
    raise KernelBuildError(f"{what}; install g++ (Debian: apt-get install g++) or set CXX")


@dataclass(frozen=True)
class KernelBuild:
    """The library of ``sources`` for ``level``. ``extra_flags`` make another one, such as one with sanitizers.

    Without a ``compiler`` it is the one that any compiler has made of them, where there is one.
    """

    level: Level
    cache: Path
    compiler: str | None
    extra_flags: tuple[str, ...] = ()
    sources: Path = SOURCES

    @cached_property
    def path(self) -> Path:
        """Where the library lies once it is compiled. Does not change, even if the sources do."""
        start = f"{self.level.name}-{self._digest(self._files())}"
        if self.compiler is not None:
            return self.cache / f"{start}-{_version_key(self.compiler)}" / LIBRARY
        return max(self.cache.glob(f"{start}-*/{LIBRARY}"), default=self.cache / f"{start}-none" / LIBRARY)

    def is_ready(self) -> bool:
        return self.path.exists()

    def compile(self) -> Path:
        """Compile unless that is done already. Raises ``KernelBuildError`` with the compiler's own words."""
        path = self.path
        if path.exists():
            return path
        if self.compiler is None:
            raise KernelBuildError(f"{path.parent} holds no library, and there is no compiler to make one")
        kept = self.cache / OBJECTS
        self.cache.mkdir(parents=True, exist_ok=True, mode=0o700)
        _check_owner(self.cache)
        kept.mkdir(exist_ok=True, mode=0o700)
        _check_owner(kept)
        with _alone_in(kept) as lock:
            if not path.exists():
                _sweep(self.cache)
                self._compile_to(path, self.compiler, lock)
        return path

    def _compile_to(self, path: Path, compiler: str, lock: int | None) -> None:
        with tempfile.TemporaryDirectory(prefix=".building-", dir=self.cache) as folder:
            made = Path(folder) / "whole"
            made.mkdir(mode=0o700)
            self._compile_into(made, compiler, lock)
            try:
                made.rename(path.parent)
            except OSError:
                # Somebody else was faster, and theirs is the same.
                if not path.exists():
                    raise

    def check_owner(self) -> None:
        """Raise ``KernelBuildError`` when others could have put their code where the library lies."""
        for place in (self.path, self.path.parent, self.cache):
            _check_owner(place)

    def check_whole(self) -> None:
        """Raise ``KernelBuildError`` for a library whose end is missing, as after a power failure: using it is fatal.

        What a linker writes last in a file is its table of sections.
        """
        with self.path.open("rb") as file:
            header = file.read(64)
            size = os.fstat(file.fileno()).st_size
        if len(header) < 64 or not header.startswith(b"\x7fELF\x02"):
            return
        begin, width, number = *struct.unpack_from("<Q", header, 40), *struct.unpack_from("<HH", header, 58)
        if begin + width * number > size:
            raise KernelBuildError(f"{self.path} is cut short; delete its folder")

    def _flags(self) -> tuple[str, ...]:
        return (*FLAGS, *self.level.flags, f'-DHP_ISA="{self.level.name}"', *self.extra_flags)

    def _files(self) -> list[Path]:
        return sorted(path for path in self.sources.iterdir() if path.suffix in (".cpp", ".h"))

    def _digest(self, files: Sequence[Path]) -> str:
        digest = hashlib.sha256()
        for part in (platform.machine(), *self._flags()):
            digest.update(part.encode() + b"\0")
        for source in files:
            digest.update(source.name.encode() + b"\0" + source.read_bytes() + b"\0")
        return digest.hexdigest()[:20]

    def _compile_into(self, folder: Path, compiler: str, lock: int | None) -> None:
        units = [source for source in self._files() if source.suffix == ".cpp"]
        kept = self.cache / OBJECTS
        version = _version_key(compiler)

        def compile_unit(unit: Path) -> Path:
            key = self._digest(_included(unit))
            target = kept / f"{unit.stem}-{key}-{version}.o"
            if not target.exists():
                made = folder / target.name
                _make(made, [compiler, *self._flags(), "-c", str(unit)], lock)
                if self._digest(_included(unit)) != key:
                    raise KernelBuildError(f"{unit} changed while it was compiled; start again")
                made.rename(target)
            return target

        with ThreadPoolExecutor(max_workers=max(1, len(os.sched_getaffinity(0)))) as pool:
            objects = list(pool.map(compile_unit, units))
        _make(folder / LIBRARY, [compiler, *self._flags(), "-shared", *map(str, objects)], lock)


def find_build(level: Level, environment: Mapping[str, str] = os.environ, sources: Path = SOURCES) -> KernelBuild:
    """The build for ``level`` in the user's cache: with the compiler, or without one where it is compiled already.

    Raises ``KernelBuildError`` where there is neither a compiler that says its version nor a library.
    """
    cache = cache_folder(environment)
    try:
        compiler = find_compiler(environment)
        _version_key(compiler)
        return KernelBuild(level, cache, compiler, sources=sources)
    except KernelBuildError:
        found = KernelBuild(level, cache, None, sources=sources)
        if not found.is_ready():
            raise
        return found


def _check_owner(place: Path) -> None:
    facts = place.stat()
    if facts.st_uid not in (os.getuid(), 0) or facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        cure = f"chmod go-w {place}" if facts.st_uid in (os.getuid(), 0) else f"it belongs to user {facts.st_uid}"
        raise KernelBuildError(
            f"{place} can be written by other users, so the kernels in it are not used; make it yours alone "
            f"({cure}) or set XDG_CACHE_HOME to a folder that is"
        )


def _included(unit: Path) -> list[Path]:
    """``unit`` and the sources that it includes, directly or not."""
    found, ahead = {unit}, [unit]
    while ahead:
        for name in _INCLUDED.findall(ahead.pop().read_text(encoding="utf-8")):
            path = unit.parent / name
            if path not in found and path.exists():
                found.add(path)
                ahead.append(path)
    return sorted(found)


@contextlib.contextmanager
def _alone_in(folder: Path) -> Iterator[int | None]:
    """Wait until no other process, nor thread, compiles into ``folder``; a descriptor for compilers to inherit.

    The compilers of a process that was killed go on, and hold the lock as long: starts that are killed again and again
    would else leave one more compiler each. None: the file system has no locks, and work is done twice at worst.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        except OSError:
            yield None
        else:
            yield descriptor
    finally:
        os.close(descriptor)


def _sweep(cache: Path) -> None:
    """Remove what builds left that were killed."""
    for left in cache.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - left.stat().st_mtime > ABANDONED_S:
                shutil.rmtree(left, ignore_errors=True)


def _version_key(compiler: str) -> str:
    version = _run([compiler, "--version"], VERSION_TIMEOUT_S).partition("\n")[0]
    return hashlib.sha256(version.encode()).hexdigest()[:8]


def _make(target: Path, command: Sequence[str], lock: int | None) -> None:
    _run([*command, "-o", str(target)], inherited=() if lock is None else (lock,))
    if not target.exists():
        raise KernelBuildError(f"{command[0]} reported success and made no {target.name}; set CXX to a C++ compiler")


def _run(command: Sequence[str], timeout: float | None = None, inherited: Sequence[int] = ()) -> str:
    try:
        # Compilers speak the user's language, in whichever encoding.
        done = subprocess.run(
            command,
            capture_output=True,
            check=False,
            stdin=subprocess.DEVNULL,
            timeout=timeout,
            errors="replace",
            pass_fds=inherited,
        )
    except subprocess.TimeoutExpired as error:
        said = f"{' '.join(command)} gave no answer within {timeout:g} s"
        raise KernelBuildError(f"{said}; set CXX to a C++ compiler that does") from error
    except OSError as error:
        raise KernelBuildError(f"{command[0]} cannot be run: {error}; set CXX to a C++ compiler") from error
    if done.returncode != 0:
        said = "\n".join(done.stderr.strip().splitlines()[:SHOWN_LINES])
        raise KernelBuildError(f"{' '.join(command)} failed with status {done.returncode}:\n{said}")
    return done.stdout


def main(arguments: Sequence[str] = (), sources: Path = SOURCES) -> int:
    """Compile for this processor; 0 also where that cannot be done, since everything works without.

    ``--quiet``: no word where they are compiled already.
    """
    level = named_level("auto", platform.machine(), Host().cpu_flags())
    try:
        build = find_build(level, sources=sources)
        if build.is_ready() and "--quiet" in arguments:
            return 0
        path = build.compile()
    except (KernelBuildError, OSError) as error:
        print(f"CPU kernels are not compiled, plain torch will be used instead, several times slower: {error}")
        return 0
    print(f"CPU kernels for {level.name}: {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

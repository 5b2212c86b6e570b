"""What the host lets this process use: cores and memory, after affinity and control group limits. No torch."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Host", "MemoryFacts"]

_UNLIMITED_BYTES = 1 << 60
"""Control groups of the first version write a number near 2^63 where there is no limit."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """Bytes. ``limit`` is what may be used in total, ``available`` what could still be taken without swapping."""

    limit: int
    available: int

    @property
    def used(self) -> int:
        return max(0, self.limit - self.available)


@dataclass(frozen=True, slots=True)
class Host:
    """Reads ``/proc`` and ``/sys`` below ``root``, so that any machine can be fabricated from a folder of files.

    ``allowed_cpus`` are the logical CPUs of the process's affinity mask.
    """

    root: Path = Path("/")
    allowed_cpus: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(os.sched_getaffinity(0))))

    def physical_cores(self) -> tuple[int, ...]:
        """One allowed logical CPU per physical core, lowest id first; all allowed CPUs where topology is unknown."""
        first_of_core: dict[tuple[str, str], int] = {}
        for cpu in self.allowed_cpus:
            topology = self.root / f"sys/devices/system/cpu/cpu{cpu}/topology"
            package, core = _read(topology / "physical_package_id"), _read(topology / "core_id")
            if package is None or core is None:
                return self.allowed_cpus
            first_of_core.setdefault((package, core), cpu)
        return tuple(sorted(first_of_core.values()))

    def cpu_quota(self) -> float | None:
        """CPUs' worth of time the control groups grant, or None without a limit."""
        quotas = [quota for folder in self._group_folders("cpu") if (quota := _quota(folder)) is not None]
        return min(quotas, default=None)

    def memory(self) -> MemoryFacts:
        """Limits and availability now: the tightest of the machine and every control group above this process."""
        machine = self._meminfo()
        limit = machine.get("MemTotal", 0)
        available = machine.get("MemAvailable", machine.get("MemFree", 0))
        for folder in self._group_folders("memory"):
            ceiling = _first_number(folder / "memory.max", folder / "memory.limit_in_bytes")
            if ceiling is None or ceiling >= min(_UNLIMITED_BYTES, limit):
                continue
            usage = _first_number(folder / "memory.current", folder / "memory.usage_in_bytes") or 0
            limit = ceiling
            available = min(available, max(0, ceiling - max(0, usage - _reclaimable(folder))))
        return MemoryFacts(limit, min(available, limit))

    def model_name(self) -> str:
        """The processor's marketing name, or ``"cpu"``."""
        return next((value for key, value in self._cpuinfo() if key == "model name"), "cpu")

    def cpu_flags(self) -> frozenset[str]:
        """Instruction set extensions under the kernel's names (``avx2`` ...)."""
        return frozenset(next((v for k, v in self._cpuinfo() if k in ("flags", "Features")), "").split())

    def _meminfo(self) -> dict[str, int]:
        values = {}
        for line in (_read(self.root / "proc/meminfo") or "").splitlines():
            name, _, rest = line.partition(":")
            number = rest.split()
            if number and number[0].isdigit():
                values[name] = int(number[0]) * (1024 if number[1:] == ["kB"] else 1)
        return values

    def _cpuinfo(self) -> Iterator[tuple[str, str]]:
        for line in (_read(self.root / "proc/cpuinfo") or "").splitlines():
            key, separator, value = line.partition(":")
            if separator:
                yield key.strip(), value.strip()

    def _group_folders(self, controller: str) -> Iterator[Path]:
        """Existing control group folders that govern ``controller``, innermost first, both versions.

        Inside a container the path from ``/proc`` may not exist below the mount; then the mount's own folder counts.
        """
        for line in (_read(self.root / "proc/self/cgroup") or "").splitlines():
            _, _, rest = line.partition(":")
            controllers, _, path = rest.partition(":")
            if controllers and controller not in controllers.split(","):
                continue
            mount = self.root / "sys/fs/cgroup" / (controllers and controller)
            parts = [part for part in path.split("/") if part not in ("", "..")]
            for depth in range(len(parts), -1, -1):
                folder = mount.joinpath(*parts[:depth])
                if folder.is_dir():
                    yield folder


def _read(path: Path) -> str | None:
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def _first_number(*paths: Path) -> int | None:
    for path in paths:
        text = _read(path)
        if text is not None and text.isdigit():
            return int(text)
    return None


def _quota(folder: Path) -> float | None:
    text = _read(folder / "cpu.max")
    if text is None:
        text = f"{_read(folder / 'cpu.cfs_quota_us') or ''} {_read(folder / 'cpu.cfs_period_us') or ''}"
    numbers = text.split()
    if len(numbers) != 2 or not all(number.isdigit() for number in numbers) or int(numbers[1]) == 0:
        return None
    return int(numbers[0]) / int(numbers[1])


def _reclaimable(folder: Path) -> int:
    """Page cache the kernel gives back before it refuses memory; it counts as usage but is not in the way."""
    for line in (_read(folder / "memory.stat") or "").splitlines():
        name, _, value = line.partition(" ")
        if name in ("total_inactive_file", "inactive_file") and value.isdigit():
            return int(value)
    return 0

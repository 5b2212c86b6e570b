"""Reading the host from fabricated files: both control group versions, nested limits, broken or absent files."""

from __future__ import annotations

from pathlib import Path

import pytest

from hardpoint_cpu.host import Host

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return root


def meminfo(total_gib: int, available_gib: int) -> str:
    return (
        f"MemTotal: {total_gib << 20} kB\nMemFree: 1 kB\nMemAvailable: {available_gib << 20} kB\nHugePages_Total: 0\n"
    )


def topology(cores: dict[int, tuple[int, int]]) -> dict[str, str]:
    """Logical CPU to (package, core)."""
    files = {}
    for cpu, (package, core) in cores.items():
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{base}/physical_package_id"] = f"{package}\n"
        files[f"{base}/core_id"] = f"{core}\n"
    return files


def test_one_thread_per_core_across_packages(tmp_path: Path) -> None:
    write(tmp_path, topology({0: (0, 0), 1: (0, 1), 2: (1, 0), 3: (1, 1), 4: (0, 0), 5: (0, 1), 6: (1, 0), 7: (1, 1)}))
    assert Host(tmp_path, tuple(range(8))).physical_cores() == (0, 1, 2, 3)
    assert Host(tmp_path, (1, 4, 5)).physical_cores() == (1, 4)


def test_unknown_topology_counts_every_allowed_cpu(tmp_path: Path) -> None:
    assert Host(tmp_path, (2, 5)).physical_cores() == (2, 5)


def test_memory_without_control_groups_is_the_machines(tmp_path: Path) -> None:
    write(tmp_path, {"proc/meminfo": meminfo(16, 10)})
    memory = Host(tmp_path, (0,)).memory()
    assert (memory.limit, memory.available, memory.used) == (16 * GIB, 10 * GIB, 6 * GIB)


def test_the_tightest_unified_group_counts(tmp_path: Path) -> None:
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(16, 10),
            "proc/self/cgroup": "0::/pod/app\n",
            "sys/fs/cgroup/pod/memory.max": f"{4 * GIB}\n",
            "sys/fs/cgroup/pod/memory.current": f"{3 * GIB}\n",
            "sys/fs/cgroup/pod/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            "sys/fs/cgroup/pod/app/memory.max": "max\n",
            "sys/fs/cgroup/pod/app/memory.current": "5\n",
        },
    )
    memory = Host(tmp_path, (0,)).memory()
    assert (memory.limit, memory.available) == (4 * GIB, 2 * GIB)


def test_a_first_version_group_counts_and_no_limit_is_no_limit(tmp_path: Path) -> None:
    files = {
        "proc/meminfo": meminfo(16, 10),
        "proc/self/cgroup": "4:memory:/box\n2:cpu,cpuacct:/box\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{2**63 - 4096}\n",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": "100\n",
    }
    write(tmp_path, files)
    assert Host(tmp_path, (0,)).memory().limit == 16 * GIB
    write(tmp_path, {"sys/fs/cgroup/memory/box/memory.limit_in_bytes": f"{2 * GIB}\n"})
    write(tmp_path, {"sys/fs/cgroup/memory/box/memory.usage_in_bytes": f"{GIB}\n"})
    memory = Host(tmp_path, (0,)).memory()
    assert (memory.limit, memory.available) == (2 * GIB, GIB)


def test_a_path_outside_the_mount_falls_back_to_the_mount(tmp_path: Path) -> None:
    """Inside a container the host's path is often shown, while the mount holds the container's own group."""
    write(
        tmp_path,
        {
            "proc/meminfo": meminfo(16, 10),
            "proc/self/cgroup": "0::/../../kubepods/pod7\n",
            "sys/fs/cgroup/memory.max": f"{GIB}\n",
            "sys/fs/cgroup/memory.current": f"{GIB // 4}\n",
            "sys/fs/cgroup/cpu.max": "150000 100000\n",
        },
    )
    host = Host(tmp_path, (0,))
    assert host.memory().available == GIB - GIB // 4
    assert host.cpu_quota() == 1.5


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"sys/fs/cgroup/cpu.max": "max 100000"}, None),
        ({"sys/fs/cgroup/cpu.max": "50000 100000"}, 0.5),
        ({"sys/fs/cgroup/cpu.max": "rubbish"}, None),
        ({}, None),
    ],
)
def test_cpu_quota_of_the_unified_hierarchy(tmp_path: Path, files: dict[str, str], quota: float | None) -> None:
    write(tmp_path, {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/marker": ""} | files)
    assert Host(tmp_path, (0,)).cpu_quota() == quota


@pytest.mark.parametrize(("text", "quota"), [("-1", None), ("300000", 3.0)])
def test_cpu_quota_of_the_first_version(tmp_path: Path, text: str, quota: float | None) -> None:
    write(
        tmp_path,
        {
            "proc/self/cgroup": "2:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": text,
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    )
    assert Host(tmp_path, (0,)).cpu_quota() == quota


def test_processor_name_and_flags(tmp_path: Path) -> None:
    write(tmp_path, {"proc/cpuinfo": "processor : 0\nmodel name : Some CPU @ 3 GHz\nflags : fpu avx2 fma\n\n"})
    host = Host(tmp_path, (0,))
    assert host.model_name() == "Some CPU @ 3 GHz"
    assert host.cpu_flags() == {"fpu", "avx2", "fma"}


def test_a_host_without_files_is_still_described(tmp_path: Path) -> None:
    host = Host(tmp_path, (0,))
    assert host.model_name() == "cpu"
    assert host.cpu_flags() == frozenset()
    assert host.memory().limit == 0


def test_the_real_host_has_cores_and_memory() -> None:
    host = Host()
    assert 1 <= len(host.physical_cores()) <= len(host.allowed_cpus)
    memory = host.memory()
    assert 0 < memory.available <= memory.limit

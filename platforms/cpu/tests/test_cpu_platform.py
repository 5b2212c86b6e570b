"""The CPU platform's decisions on fabricated hosts."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import EngineSettings, LogicalDevice, PlatformKind, ThreadPlan
from hardpoint.interfaces.plugin import PluginContext, ProbeStatus, ProcessRole, declaration_of
from hardpoint_cpu.host import Host
from hardpoint_cpu.platform import CpuOptions, CpuPlatform, bound_spinning, bound_tokenizers, create, probe

GIB = 1 << 30
DEVICE = LogicalDevice(0)


def fabricate(root: Path, *, cpus: int = 4, siblings: bool = False, available_gib: int = 8, quota: str = "") -> Host:
    files = {"proc/meminfo": f"MemTotal: {16 << 20} kB\nMemAvailable: {available_gib << 20} kB\n"}
    for cpu in range(cpus):
        base = f"sys/devices/system/cpu/cpu{cpu}/topology"
        files[f"{base}/physical_package_id"] = "0"
        files[f"{base}/core_id"] = str(cpu // 2 if siblings else cpu)
    if quota:
        files |= {"proc/self/cgroup": "0::/", "sys/fs/cgroup/cpu.max": quota}
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
    return Host(root, tuple(range(cpus)))


@pytest.fixture
def platform(tmp_path: Path) -> CpuPlatform:
    return CpuPlatform(host=fabricate(tmp_path))


def settled(platform: CpuPlatform, **given: Any) -> EngineSettings:
    settings = EngineSettings(**given)
    platform.check_and_update(settings)
    return settings


class TestSettings:
    def test_everything_unset_is_filled(self, platform: CpuPlatform) -> None:
        settings = settled(platform)
        assert (settings.worker, settings.executor) == ("torch", "uniproc")
        assert (settings.dtype, settings.kv_cache_dtype) == ("float32", "float32")
        assert (settings.block_size, settings.preferred_block_size) == (None, 16)
        assert settings.kv_cache_bytes == int(8 * GIB * 0.4)
        assert settings.max_num_seqs is not None
        assert settings.max_num_batched_tokens is not None
        assert settings.max_num_batched_tokens >= settings.max_num_seqs

    def test_what_the_user_set_stays(self, platform: CpuPlatform) -> None:
        given = {
            "worker": "other",
            "executor": "mine",
            "dtype": "bfloat16",
            "kv_cache_dtype": "float16",
            "block_size": 32,
            "max_num_seqs": 3,
            "max_num_batched_tokens": 64,
            "kv_cache_bytes": 1000,
        }
        settings = settled(platform, **given)
        assert {name: getattr(settings, name) for name in given} == given

    def test_several_ranks_take_the_process_executor_and_share_memory(self, platform: CpuPlatform) -> None:
        settings = settled(platform, world_size=2)
        assert settings.executor == "multiproc"
        assert settings.kv_cache_bytes == int(8 * GIB * 0.4) // 2

    def test_the_cache_is_capped(self, tmp_path: Path) -> None:
        platform = CpuPlatform(host=fabricate(tmp_path, available_gib=16))
        assert settled(platform).kv_cache_bytes == 4 * GIB

    def test_the_cache_follows_the_asked_dtype(self, platform: CpuPlatform) -> None:
        settings = settled(platform, dtype="bfloat16", kv_cache_dtype="auto")
        assert settings.kv_cache_dtype == "bfloat16"

    def test_auto_means_float32(self, platform: CpuPlatform) -> None:
        assert settled(platform, dtype="auto").dtype == "float32"

    def test_many_sequences_raise_the_default_step_size(self, platform: CpuPlatform) -> None:
        assert settled(platform, max_num_seqs=5000).max_num_batched_tokens == 5000

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"dtype": "float8"}, r"'float8'.*--dtype: auto, float32, bfloat16, float16"),
            ({"world_size": 0}, "world size 0"),
            ({"block_size": 0}, "block size 0 is below 1; set --block-size"),
            ({"max_num_seqs": -1}, "--max-num-seqs"),
            ({"max_num_batched_tokens": 0}, "--max-num-batched-tokens"),
            ({"kv_cache_bytes": 0}, "--kv-cache-memory"),
        ],
    )
    def test_impossible_settings_name_the_option(
        self, platform: CpuPlatform, given: dict[str, Any], message: str
    ) -> None:
        with pytest.raises(ConfigError, match=message):
            settled(platform, **given)


class TestThreads:
    def test_one_thread_per_core(self, platform: CpuPlatform) -> None:
        assert platform.thread_plan(1, {}) == ThreadPlan(compute_threads=4, api_threads=1, cores=())

    def test_sibling_threads_are_left_idle_by_pinning(self, tmp_path: Path) -> None:
        platform = CpuPlatform(host=fabricate(tmp_path, cpus=8, siblings=True))
        assert platform.thread_plan(1, {}) == ThreadPlan(compute_threads=4, cores=(0, 2, 4, 6))

    @pytest.mark.parametrize(("quota", "threads"), [("150000 100000", 2), ("100 100000", 1), ("max 100000", 4)])
    def test_the_quota_bounds_the_threads(self, tmp_path: Path, quota: str, threads: int) -> None:
        platform = CpuPlatform(host=fabricate(tmp_path, quota=quota))
        assert platform.thread_plan(1, {}).compute_threads == threads

    def test_ranks_share_the_cores(self, platform: CpuPlatform) -> None:
        assert platform.thread_plan(2, {}).compute_threads == 2
        assert platform.thread_plan(9, {}).compute_threads == 1

    @pytest.mark.parametrize(("text", "threads"), [("3", 3), ("2,4", 2), (" 1 ", 1)])
    def test_the_operator_decides(self, platform: CpuPlatform, text: str, threads: int) -> None:
        assert platform.thread_plan(1, {"OMP_NUM_THREADS": text}).compute_threads == threads

    @pytest.mark.parametrize("text", ["0", "many", "-2", ",", "²", "4097", "9" * 5000])
    def test_a_bad_thread_count_is_named(self, platform: CpuPlatform, text: str) -> None:
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
            platform.thread_plan(1, {"OMP_NUM_THREADS": text})

    @pytest.mark.parametrize(
        ("environment", "expected"),
        [({}, "1000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "active"}, None)],
    )
    def test_spinning_is_bounded_unless_the_operator_decides(
        self, environment: dict[str, str], expected: str | None
    ) -> None:
        bound_spinning(environment, 1000)
        assert environment.get("GOMP_SPINCOUNT") == expected

    @pytest.mark.parametrize(("environment", "expected"), [({}, "false"), ({"TOKENIZERS_PARALLELISM": "true"}, "true")])
    def test_tokenizers_have_no_threads_unless_the_operator_decides(
        self, environment: dict[str, str], expected: str
    ) -> None:
        bound_tokenizers(environment)
        assert environment["TOKENIZERS_PARALLELISM"] == expected


class TestDevice:
    def test_memory_is_the_hosts(self, platform: CpuPlatform) -> None:
        assert platform.memory_budget(DEVICE) == 16 * GIB
        assert platform.memory_used(DEVICE) == 8 * GIB
        assert platform.describe(DEVICE).memory_bytes == 16 * GIB
        assert platform.capabilities()["physical_cores"] == 4

    def test_attention_candidates_are_configurable(self, tmp_path: Path) -> None:
        platform = CpuPlatform(CpuOptions(attention_backends=("a", "b")), fabricate(tmp_path))
        assert platform.attention_candidates() == ("a", "b")
        assert CpuPlatform(host=fabricate(tmp_path)).attention_candidates() == ("cpu_paged", "torch_reference")

    def test_init_worker_sets_the_pools(self) -> None:
        """In a process of its own: the pools are fixed once used."""
        code = (
            "import torch\n"
            "from hardpoint.interfaces.platform import LogicalDevice, ThreadPlan\n"
            "from hardpoint_cpu.platform import CpuPlatform\n"
            "platform = CpuPlatform()\n"
            "device = platform.init_worker(LogicalDevice(0), ThreadPlan(compute_threads=1))\n"
            "again = platform.init_worker(LogicalDevice(0), ThreadPlan(compute_threads=1))\n"
            "print(device, again, torch.get_num_threads(), torch.get_num_interop_threads())\n"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
        assert done.stdout.split() == ["cpu", "cpu", "1", "1"]


class TestPlugin:
    def test_it_is_declared_as_the_fallback_with_a_probe(self) -> None:
        declaration = declaration_of(create)
        assert declaration is not None
        assert (declaration.kind, declaration.probe) == ("platform", probe)
        assert declaration.capabilities["fallback"] is True
        assert probe().status is ProbeStatus.AVAILABLE

    def test_the_factory_gives_the_platform(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("GOMP_SPINCOUNT", "5")
        ctx = PluginContext("cpu", 1, frozenset({ProcessRole.ENGINE}))
        platform = create(ctx, CpuOptions(block_size=8))
        assert (platform.kind, platform.device_type, platform.options.block_size) == (PlatformKind.CPU, "cpu", 8)

    def test_unknown_options_are_refused(self) -> None:
        with pytest.raises(ValidationError):
            CpuOptions(kv_fraction=0.2)  # type: ignore[call-arg]

    def test_everything_but_init_worker_works_without_torch(self) -> None:
        code = (
            "import sys\n"
            "from hardpoint.interfaces.platform import EngineSettings, LogicalDevice\n"
            "from hardpoint_cpu.platform import CpuPlatform, probe\n"
            "platform = CpuPlatform()\n"
            "probe(); platform.check_and_update(EngineSettings()); platform.thread_plan(1, {})\n"
            "platform.describe(LogicalDevice(0)); platform.capabilities(); platform.attention_candidates()\n"
            "assert 'torch' not in sys.modules\n"
        )
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

"""What every platform of graphics processors decides, over fabricated devices and a framework that takes notes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from types import ModuleType
from typing import Any, ClassVar

import pytest

from gpu_doubles import GIB, FabricatedLibrary, RecordingDevice, gpu
from hardpoint.errors import ConfigError
from hardpoint.interfaces import DeviceDescription, EngineSettings, LogicalDevice, PlatformKind, ThreadPlan
from hardpoint.testing.platform_suite import PlatformSuite
from hardpoint_gpu.inventory import GpuFacts, LibraryFault, Link, LinkKind
from hardpoint_gpu.platform import GpuPlatform
from hardpoint_gpu.settings import GpuOptions

MASK = "SOME_VISIBLE_DEVICES"
FIRST, SECOND = LogicalDevice(0), LogicalDevice(1)


class SomePlatform(GpuPlatform):
    kind: ClassVar[PlatformKind] = PlatformKind.OUT_OF_TREE
    name: ClassVar[str] = "some"
    visibility_variable: ClassVar[str] = MASK

    def features(self, device: GpuFacts) -> frozenset[str]:
        return frozenset({device.architecture})

    def attention_priorities(self, device: GpuFacts | None) -> Sequence[str]:
        return ("plain",) if device is None else ("fast", "plain")


def platform(
    *devices: GpuFacts, environment: Mapping[str, str] | None = None, options: GpuOptions | None = None, **library: Any
) -> SomePlatform:
    return SomePlatform(options or GpuOptions(), FabricatedLibrary(devices, **library), environment or {})


def settled(on: SomePlatform, **given: Any) -> EngineSettings:
    settings = EngineSettings(**given)
    on.check_and_update(settings)
    return settings


class TestFabricated(PlatformSuite):
    """The kit, over two devices of which nothing is real."""

    def create_platform(self, ctx: Any) -> SomePlatform:
        return platform(gpu(0), gpu(1), environment={MASK: "1,0"})


class TestSettings:
    @pytest.mark.parametrize(
        ("devices", "dtype", "tokens"),
        [
            ((gpu(0),), "bfloat16", 8192),
            ((gpu(0, memory_bytes=24 * GIB),), "bfloat16", 2048),
            ((gpu(0), gpu(1, capability=(7, 5), architecture="sm_75", memory_bytes=16 * GIB)), "float16", 2048),
            ((), "float16", 2048),
        ],
    )
    def test_the_least_of_the_devices_decides(self, devices: Any, dtype: str, tokens: int) -> None:
        settings = settled(platform(*devices))
        assert (settings.dtype, settings.kv_cache_dtype, settings.max_num_batched_tokens) == (dtype, dtype, tokens)
        assert (settings.worker, settings.executor, settings.kv_cache_bytes) == ("torch", "uniproc", None)

    def test_many_sequences_raise_the_step(self) -> None:
        assert settled(platform(gpu(0)), max_num_seqs=10_000).max_num_batched_tokens == 10_000

    def test_options_fill_what_is_open(self) -> None:
        options = GpuOptions(block_size=64, max_num_seqs=7, max_num_batched_tokens=99, attention_backends=("mine",))
        on = platform(gpu(0), options=options)
        settings = settled(on)
        assert (settings.block_size, settings.preferred_block_size) == (None, 64)
        assert (settings.max_num_seqs, settings.max_num_batched_tokens) == (7, 99)
        assert on.attention_candidates() == ("mine",)

    def test_more_ranks_than_devices(self) -> None:
        on = platform(gpu(0), gpu(1))
        assert settled(on, world_size=2).executor == "multiproc"
        with pytest.raises(ConfigError, match=r"3 ranks .* 2 some devices are visible.*--tensor-parallel-size"):
            settled(on, world_size=3)
        assert settled(on, world_size=16, executor="external_launcher").world_size == 16

    def test_masked_devices_do_not_count(self) -> None:
        on = platform(gpu(0), gpu(1), environment={MASK: "1"})
        with pytest.raises(ConfigError, match="2 ranks .* 1 some devices"):
            settled(on, world_size=2)

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ({"dtype": "float64"}, "'float64'.*--dtype: auto, bfloat16"),
            ({"dtype": "bfloat16"}, "sm_75.*--dtype float16"),
        ],
    )
    def test_dtypes_that_do_not_run(self, given: dict[str, Any], message: str) -> None:
        with pytest.raises(ConfigError, match=message):
            settled(platform(gpu(0, capability=(7, 5), architecture="sm_75")), **given)


class TestDevices:
    def test_a_description_follows_the_mask(self) -> None:
        """R12.31, R12.32."""
        on = platform(gpu(0), gpu(1, name="Other", capability=(8, 0), architecture="sm_80"), environment={MASK: "1,0"})
        assert on.describe(FIRST) == DeviceDescription(
            device_type="cuda", name="Other", capability=(8, 0), memory_bytes=80 * GIB, features=frozenset({"sm_80"})
        )
        assert on.attention_candidates() == ("fast", "plain")

    def test_uuids_name_devices(self) -> None:
        """R12.37."""
        on = platform(gpu(0), gpu(1), environment={MASK: "GPU-00000001"})
        assert on.facts(FIRST).number == 1
        assert on.devices.logical_to_visible(FIRST) == 0
        with pytest.raises(ConfigError, match="'GPU-9' is no known device"):
            platform(gpu(0), environment={MASK: "GPU-9"}).facts(FIRST)

    def test_a_library_that_fails_is_named(self) -> None:
        on = platform(fault=LibraryFault("it refuses"))
        for ask in (on.describe, on.memory_budget, on.memory_used):
            with pytest.raises(ConfigError, match="cannot be asked: it refuses"):
                ask(FIRST)
        assert on.attention_candidates() == ("plain",)
        assert on.capabilities() == {"fault": "the devices of platform 'some' cannot be asked: it refuses"}

    def test_the_library_is_asked_once(self) -> None:
        library = FabricatedLibrary((gpu(0),))
        on = SomePlatform(GpuOptions(), library, {})
        for _ in range(3):
            on.describe(FIRST)
            on.attention_candidates()
        assert library.num_questions == 1

    def test_diagnosis_tells_links_and_nodes(self) -> None:
        links = (Link(first=0, second=1, kind=LinkKind.NVLINK, is_direct=True),)
        found = platform(gpu(0, numa_node=1), gpu(1), found_links=links).capabilities()
        assert found["links"] == {"0-1": "nvlink"}
        assert found["numa_nodes"] == {"0": 1, "1": None}

    def test_memory_is_what_all_use_and_what_was_needed_at_worst(self, framework: RecordingDevice) -> None:
        on = platform(gpu(0), options=GpuOptions(memory_fraction=0.5, reserve_bytes=GIB), used=4 * GIB)
        assert (on.memory_budget(FIRST), on.memory_used(FIRST)) == (39 * GIB, 4 * GIB)
        on.bound = on.devices.logical_to_visible(FIRST)
        assert on.memory_used(FIRST) == 4 * GIB + framework.peak - framework.reserved


class TestThreads:
    def test_the_host_helps_with_few_threads(self) -> None:
        cores = len(os.sched_getaffinity(0))
        assert platform().thread_plan(1, {}) == ThreadPlan(compute_threads=max(1, min(4, cores)))
        assert platform().thread_plan(cores + 1, {}).compute_threads == 1
        assert platform().thread_plan(1, {"OMP_NUM_THREADS": "7,2"}).compute_threads == 7

    @pytest.mark.parametrize("text", ["0", "many", "-2"])
    def test_a_bad_count_is_named(self, text: str) -> None:
        with pytest.raises(ConfigError, match="OMP_NUM_THREADS"):
            platform().thread_plan(1, {"OMP_NUM_THREADS": text})


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    """A framework whose module of the device takes notes."""
    device = RecordingDevice()
    module: Any = ModuleType("torch")
    module.cuda = device
    module.__version__ = "0.0"
    module.set_num_threads = lambda count: device.calls.append(("threads", count))
    module.device = lambda kind, index: f"{kind}:{index}"
    monkeypatch.setitem(sys.modules, "torch", module)
    monkeypatch.setattr(GpuPlatform, "_graph_pool", None)
    return device


class TestBinding:
    def test_a_process_is_bound_to_the_visible_ordinal(self, framework: RecordingDevice) -> None:
        """R12.34, R12.35: what the runtime calls it, not what the management library does."""
        on = platform(gpu(0), gpu(1), gpu(2), environment={MASK: "2,0"})
        for _ in range(2):
            assert str(on.init_worker(SECOND, ThreadPlan(compute_threads=3))) == "cuda:1"
        assert framework.calls == [("threads", 3), ("set_device", 1)] * 2
        on.synchronize(SECOND)
        assert framework.calls[-1] == ("synchronize", 1)
        with pytest.raises(RuntimeError, match="bound to device 1, not 0"):
            on.init_worker(FIRST, ThreadPlan(compute_threads=1))

    def test_nothing_is_waited_for_before(self, framework: RecordingDevice) -> None:
        platform(gpu(0)).synchronize(FIRST)
        assert framework.calls == []

    def test_a_framework_without_the_device_says_where_to_look(self, framework: RecordingDevice) -> None:
        framework.available = False
        with pytest.raises(ConfigError, match=r"torch 0.0 reaches no some device.*plugins doctor"):
            platform(gpu(0)).init_worker(FIRST, ThreadPlan(compute_threads=1))

    def test_fewer_devices_than_the_mask_says(self, framework: RecordingDevice) -> None:
        framework.count = 1
        with pytest.raises(ConfigError, match=f"sees 1 devices, and rank 1 needs ordinal 1; {MASK}"):
            platform(gpu(0), gpu(1)).init_worker(SECOND, ThreadPlan(compute_threads=1))


class TestGraphPool:
    def test_the_pool_is_made_once(self, framework: RecordingDevice) -> None:
        """R12.22."""
        pools = [platform().graph_pool(), SomePlatform.graph_pool()]
        assert pools[0] is pools[1]
        assert framework.calls == ["graph_pool_handle"]

    def test_without_the_device_there_is_none(self, framework: RecordingDevice) -> None:
        framework.available = False
        with pytest.raises(TypeError, match="'some' captures no graphs"):
            SomePlatform.graph_pool()

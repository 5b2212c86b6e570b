"""The kit for platforms accepts the fake device and fails each mutant; the fake device behaves as it says."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    DeviceDescription,
    DeviceMap,
    EngineSettings,
    LogicalDevice,
    PhysicalDevice,
    Platform,
    PlatformKind,
    PluginContext,
    ProbeStatus,
    ThreadPlan,
)
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.platform_selection import select_platform
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing import plugin_suite
from hardpoint.testing.fake_platform import (
    FakeGraphPool,
    FakePlatform,
    FakePlatformOptions,
    install_fake_platform,
    probe,
)
from hardpoint.testing.platform_suite import PlatformSuite
from hardpoint.testing.suite_runner import run_suite


def make_suite(kind: type[Platform]) -> type[PlatformSuite]:
    class Suite(PlatformSuite):
        def create_platform(self, ctx: PluginContext) -> Platform:
            return kind()

    return Suite


class TestFakePlatform(make_suite(FakePlatform)):  # type: ignore[misc]
    """The rules that need no installed plugin."""


class NoWorker(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.worker = None


class OwnWorker(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.worker = "mine"


class OwnDtype(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.dtype = "bfloat16"


class OwnBlockSize(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.block_size = 64


class MuteRefusal(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        if settings.attention_backend is not None:
            raise ConfigError("this attention backend cannot be used")
        super().check_and_update(settings)


class NoDtype(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        if settings.dtype is not None:
            raise ConfigError(f"dtype {settings.dtype} cannot be used")
        super().check_and_update(settings)


class EditsTheModel(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.model.setdefault("nested", {})["factor"] = 2.0


class HalvesMemory(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.max_num_seqs = (settings.max_num_seqs or 128) // 2 if settings.worker else None


class SmallSteps(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        settings.max_num_seqs = settings.max_num_seqs or 256
        settings.max_num_batched_tokens = settings.max_num_batched_tokens or 64


class AcceptsAnything(FakePlatform):
    def check_and_update(self, settings: EngineSettings) -> None:
        settings.worker = settings.worker or "torch"


class NoThreads(FakePlatform):
    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        return ThreadPlan(compute_threads=4 // world_size)


class MoreThreads(FakePlatform):
    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        return ThreadPlan(compute_threads=world_size)


class SameCoreTwice(FakePlatform):
    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        return ThreadPlan(compute_threads=2, cores=(0, 0))


class EditsTheEnvironment(FakePlatform):
    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        environment["OMP_NUM_THREADS"] = "1"  # type: ignore[index]
        return ThreadPlan(compute_threads=1)


class OneBackendAsText(FakePlatform):
    def attention_candidates(self) -> Sequence[str]:
        return "flash"


class SameBackendTwice(FakePlatform):
    def attention_candidates(self) -> Sequence[str]:
        return ("flash", "flash")


class OneKernelAsText(FakePlatform):
    kernel_candidates: ClassVar[Mapping[str, Sequence[str]]] = {"linear": "acme"}


class AlienDescription(FakePlatform):
    def describe(self, device: LogicalDevice) -> DeviceDescription:
        return DeviceDescription(device_type="npu", name="alien")


class HandlesInTheDescription(FakePlatform):
    def describe(self, device: LogicalDevice) -> DeviceDescription:
        return DeviceDescription(device_type="cpu", name="fake", features=frozenset({self.describe}))  # type: ignore[arg-type]


class MemoryInGigabytes(FakePlatform):
    def memory_budget(self, device: LogicalDevice) -> int:
        return 0.9  # type: ignore[return-value]


class MoreThanThereIs(FakePlatform):
    def memory_budget(self, device: LogicalDevice) -> int:
        return 1 << 50


class NegativeUse(FakePlatform):
    def memory_used(self, device: LogicalDevice) -> int:
        return -1


class IgnoresTheMask(FakePlatform):
    def device_map(self, environment: Mapping[str, str], assigned: Sequence[PhysicalDevice] | None = None) -> DeviceMap:
        return DeviceMap("", environment, assigned)


class HoldsALock(FakePlatform):
    def __init__(self) -> None:
        super().__init__()
        self.lock = threading.Lock()


class ForwardsEverything(FakePlatform):
    def __getattr__(self, name: str) -> Any:
        return getattr(getattr(sys.modules["torch"], self.device_type), name)


class ForwardsNothing(FakePlatform):
    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"platform {self.name} has no {name}, and torch.cpu is not asked")


class ShortError(FakePlatform):
    def __getattr__(self, name: str) -> Any:
        namespace = getattr(sys.modules["torch"], self.device_type)
        if name.startswith("__") or not hasattr(namespace, name):
            raise AttributeError(name)
        return getattr(namespace, name)


class NoName(FakePlatform):
    name: ClassVar[str] = ""


class ListAsText(FakePlatform):
    supported_quantization: ClassVar[Sequence[str]] = "fp8"


class WrongPredicate(FakePlatform):
    @property
    def is_cuda(self) -> bool:
        return True


class OddCapabilities(FakePlatform):
    def capabilities(self) -> Mapping[str, Any]:
        return {"handle": object()}


class PoolForEveryone(FakePlatform):
    @classmethod
    def graph_pool(cls) -> Any:
        return cls.create_graph_pool()


class MuteAboutGraphs(FakePlatform):
    @classmethod
    def create_graph_pool(cls) -> FakeGraphPool:
        raise TypeError("no graphs")


def nested() -> type[Platform]:
    class Local(FakePlatform):
        """No other process can find it."""

    return Local


MUTANTS: list[tuple[type[Platform], str]] = [
    (NoWorker, "test_it_names_a_worker"),
    (OwnWorker, "test_what_the_user_chose_stays_or_is_refused"),
    (OwnDtype, "test_what_the_user_chose_stays_or_is_refused"),
    (OwnBlockSize, "test_what_the_user_chose_stays_or_is_refused"),
    (MuteRefusal, "test_what_the_user_chose_stays_or_is_refused"),
    (NoDtype, "test_some_dtype_is_accepted"),
    (EditsTheModel, "test_what_it_only_reads_stays"),
    (HalvesMemory, "test_settling_again_changes_nothing"),
    (SmallSteps, "test_what_it_fills_in_is_possible"),
    (AcceptsAnything, "test_the_impossible_is_refused"),
    (NoThreads, "test_the_thread_plan_is_sane"),
    (MoreThreads, "test_the_thread_plan_is_sane"),
    (SameCoreTwice, "test_the_thread_plan_is_sane"),
    (EditsTheEnvironment, "test_the_thread_plan_is_sane"),
    (OneBackendAsText, "test_attention_candidates_are_names"),
    (SameBackendTwice, "test_attention_candidates_are_names"),
    (OneKernelAsText, "test_kernel_candidates_are_names_by_seam"),
    (AlienDescription, "test_the_description_is_plain_data"),
    (HandlesInTheDescription, "test_the_description_is_plain_data"),
    (MemoryInGigabytes, "test_memory_numbers_are_bytes"),
    (MoreThanThereIs, "test_memory_numbers_are_bytes"),
    (NegativeUse, "test_memory_numbers_are_bytes"),
    (IgnoresTheMask, "test_device_ids_go_by_its_variable"),
    (HoldsALock, "test_it_can_be_copied"),
    (nested(), "test_it_can_be_copied"),
    (ForwardsEverything, "test_only_plain_names_are_forwarded"),
    (ForwardsEverything, "test_it_can_be_copied"),
    (ForwardsNothing, "test_only_plain_names_are_forwarded"),
    (ShortError, "test_a_name_in_neither_place_names_both"),
    (NoName, "test_its_attributes_say_what_it_is"),
    (ListAsText, "test_its_attributes_say_what_it_is"),
    (WrongPredicate, "test_its_attributes_say_what_it_is"),
    (OddCapabilities, "test_capabilities_can_be_shown"),
    (PoolForEveryone, "test_the_graph_pool_is_one"),
    (MuteAboutGraphs, "test_the_graph_pool_is_one"),
]


@pytest.mark.parametrize(("mutant", "test"), MUTANTS, ids=lambda value: getattr(value, "__name__", ""))
def test_each_mutant_is_caught(mutant: type[Platform], test: str) -> None:
    assert test in run_suite(make_suite(mutant), only=test).failed


SOURCE = """
{prelude}
from hardpoint.interfaces import NoOptions, ProbeResult, ProbeStatus, plugin
from hardpoint.testing.fake_platform import FakePlatform

class Acme(FakePlatform):
    name = "acme"

    def init_worker(self, device, threads):
        {bind}
        return super().init_worker(device, threads)

def probe():
    {probe}
    return ProbeResult(ProbeStatus.AVAILABLE, {reason!r})

@plugin("platform", options=NoOptions, probe={probe_name})
def create(ctx, options):
    {create}
    return Acme()
"""
SOUND = {"prelude": "", "bind": "pass", "probe": "pass", "reason": "one card", "probe_name": "probe", "create": "pass"}
LEAK = "import os; globals().setdefault('handle', os.open('/dev/zero', os.O_RDONLY))"
INSTALLED_MUTANTS = [
    ({"prelude": "import torch"}, "test_nothing_is_initialized_before_the_worker"),
    ({"probe": "import torch"}, "test_nothing_is_initialized_before_the_worker"),
    ({"create": "import torch"}, "test_nothing_is_initialized_before_the_worker"),
    ({"probe": LEAK}, "test_nothing_is_initialized_before_the_worker"),
    ({"create": LEAK}, "test_nothing_is_initialized_before_the_worker"),
    ({"probe": "import os; os.environ['ACME'] = '1'"}, "test_nothing_is_initialized_before_the_worker"),
    ({"probe": "raise OSError('driver fault')"}, "test_the_probe_answers"),
    ({"probe": "return True"}, "test_the_probe_answers"),
    ({"reason": ""}, "test_the_probe_answers"),
    ({"probe_name": "None"}, "test_the_probe_answers"),
    (
        {"probe": "import time; return ProbeResult(ProbeStatus.AVAILABLE, str(time.time_ns()))"},
        "test_the_probe_answers",
    ),
    ({"bind": "if self.bound is not None: raise RuntimeError('again')"}, "test_a_worker_can_be_bound"),
    ({"bind": "self.used_bytes[device] = -5"}, "test_a_worker_can_be_bound"),
    ({"prelude": "import torch"}, "test_importing_it_changes_nothing"),
]


class AcmeSuite(PlatformSuite):
    plugin: ClassVar[str | None] = "acme"
    device_present: ClassVar[bool] = True
    device_nodes: ClassVar[Sequence[str]] = ("/dev/zero",)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for installed packages, with a framework that costs nothing to import."""
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    (tmp_path / "torch.py").write_text("")
    plugin_suite._plan.cache_clear()
    yield tmp_path
    for name in ("acme_platform", "torch"):
        sys.modules.pop(name, None)
    plugin_suite._plan.cache_clear()


def install(site: Path, **changes: str) -> None:
    (site / "acme_platform.py").write_text(SOURCE.format(**{**SOUND, **changes}))
    folder = site / "acme_platform-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(
        "Metadata-Version: 2.3\nName: acme-platform\nVersion: 1.0\nRequires-Dist: hardpoint-core<1\n"
    )
    (folder / "entry_points.txt").write_text("[hardpoint.platform.v1]\nacme = acme_platform:create\n")


def test_a_sound_installed_platform_passes(site: Path) -> None:
    """R12.30, L12.23: a toy platform from outside the tree passes the whole suite."""
    install(site)
    outcome = run_suite(AcmeSuite)
    assert outcome.failed == {}
    assert outcome.skipped == {}


@pytest.mark.parametrize(("changes", "test"), INSTALLED_MUTANTS)
def test_each_installed_mutant_is_caught(site: Path, changes: dict[str, str], test: str) -> None:
    """L12.10, R12.25."""
    install(site, **changes)
    assert test in run_suite(AcmeSuite, only=test).failed


class TestFakeDevice:
    def platform(self, visible: str = "", **options: Any) -> FakePlatform:
        return FakePlatform(FakePlatformOptions(**options), {"FAKE_VISIBLE_DEVICES": visible})

    def test_devices_follow_the_mask(self) -> None:
        platform = self.platform("3,1", num_devices=4)
        assert [platform.describe(LogicalDevice(i)).name for i in (0, 1)] == ["fake-3", "fake-1"]
        for world_size in (1, 2):
            platform.check_and_update(EngineSettings(world_size=world_size))
        with pytest.raises(ConfigError, match="logical device 2 does not exist.*FAKE_VISIBLE_DEVICES='3,1'"):
            platform.check_and_update(EngineSettings(world_size=3))

    def test_there_are_no_more_than_it_has(self) -> None:
        with pytest.raises(ConfigError, match="fake device 2 does not exist; there are 2"):
            self.platform().check_and_update(EngineSettings(world_size=3))

    def test_a_process_is_bound_to_one(self) -> None:
        platform = self.platform()
        plan = platform.thread_plan(2, {})
        for _ in range(2):
            assert "cpu" in str(platform.init_worker(LogicalDevice(1), plan))
        with pytest.raises(RuntimeError, match="bound to fake device 1, not 0"):
            platform.init_worker(LogicalDevice(0), plan)

    def test_memory_is_what_the_test_says(self) -> None:
        platform = self.platform(memory_bytes=100)
        platform.used_bytes[LogicalDevice(1)] = 60
        assert [platform.memory_used(LogicalDevice(i)) for i in (0, 1)] == [0, 60]
        assert platform.memory_budget(LogicalDevice(1)) == 100

    def test_it_has_graphs(self) -> None:
        assert isinstance(FakePlatform.graph_pool(), FakeGraphPool)
        assert FakePlatform.graph_pool() is self.platform().graph_pool()

    @pytest.mark.parametrize("state", list(ProbeStatus))
    def test_its_probe_answers_as_told(self, state: ProbeStatus, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FAKE_DEVICE_STATE", state)
        assert probe().status is state

    def test_it_is_chosen_where_it_is_installed(self, site: Path) -> None:
        install_fake_platform(site)
        found = discover([str(site)])
        assert select_platform(build_plan(found, PluginSelection()), installed=found)[0] == "fake"
        assert FakePlatform.kind is PlatformKind.OUT_OF_TREE

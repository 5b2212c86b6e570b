"""A device that exists only in tests: an out-of-tree platform with several devices, all of them this host's memory.

It has what a real one has (its own visibility variable, several devices, graphs) and needs neither hardware nor a
framework, so third parties can test against it what the CPU platform never shows.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    DeviceDescription,
    EngineSettings,
    LogicalDevice,
    Platform,
    PlatformKind,
    PluginContext,
    ProbeResult,
    ProbeStatus,
    ThreadPlan,
    plugin,
)

if TYPE_CHECKING:
    import torch

__all__ = ["FakeGraphPool", "FakePlatform", "FakePlatformOptions", "create", "install_fake_platform", "probe"]

STATE_VARIABLE = "FAKE_DEVICE_STATE"
"""Makes :func:`probe` answer ``absent`` or ``broken``."""


class FakePlatformOptions(BaseModel):
    """Options under ``plugins.platform.fake``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    num_devices: int = Field(default=2, ge=1, description="devices on this host, masked ones included")
    memory_bytes: int = Field(default=1 << 30, gt=0, description="memory of one device")
    block_size: int = Field(default=16, gt=0, description="least tokens per KV block where `cache.block_size` is unset")
    worker: str = Field(default="torch", description="the `worker` plugin to run on the device")
    attention_backends: tuple[str, ...] = Field(
        default=("torch_reference",), description="`attention_backend` plugins to choose from, the best first"
    )


class FakeGraphPool:
    """Counts what captured graphs hold. ``bytes_in_use`` is kept by the graph backend."""

    def __init__(self) -> None:
        self.bytes_in_use = 0


def probe() -> ProbeResult:
    """Available unless ``FAKE_DEVICE_STATE`` says otherwise."""
    state = ProbeStatus(os.environ.get(STATE_VARIABLE, ProbeStatus.AVAILABLE))
    return ProbeResult(state, f"the fake device is {state}")


class FakePlatform(Platform):
    """``environment`` holds the visibility variable; by default the process's own.

    Attributes:
        bound: the logical device of :meth:`init_worker`, or None.
        used_bytes: what :meth:`memory_used` reports per logical device; tests set it.
    """

    kind: ClassVar[PlatformKind] = PlatformKind.OUT_OF_TREE
    name: ClassVar[str] = "fake"
    cluster_resource_key: ClassVar[str] = "FAKE"
    visibility_variable: ClassVar[str] = "FAKE_VISIBLE_DEVICES"
    mask_suppressing_variables: ClassVar[Sequence[str]] = ("FAKE_KEEP_VISIBLE_DEVICES",)
    collective_backend: ClassVar[str] = "gloo"

    def __init__(
        self, options: FakePlatformOptions | None = None, environment: Mapping[str, str] | None = None
    ) -> None:
        self.options = options or FakePlatformOptions()
        self.devices = self.device_map(os.environ if environment is None else environment)
        self.bound: LogicalDevice | None = None
        self.used_bytes: dict[LogicalDevice, int] = {}

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        """Raises ``ConfigError`` for a device that is masked or does not exist."""
        number = self.devices.logical_to_physical(device)
        if number >= self.options.num_devices:
            raise ConfigError(f"fake device {number} does not exist; there are {self.options.num_devices}")
        return DeviceDescription(
            device_type=self.device_type,
            name=f"fake-{number}",
            capability=(1, number),
            memory_bytes=self.options.memory_bytes,
            features=frozenset({"graphs"}),
        )

    def check_and_update(self, settings: EngineSettings) -> None:
        if settings.world_size < 1:
            raise ConfigError(f"world size {settings.world_size} is below 1; set the parallel sizes to 1 or more")
        self.describe(LogicalDevice(settings.world_size - 1))
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
            value = getattr(settings, field)
            if value is not None and value < 1:
                raise ConfigError(f"{field} {value} is below 1; set it to a positive number")
        settings.worker = settings.worker or self.options.worker
        settings.executor = settings.executor or ("uniproc" if settings.world_size == 1 else "multiproc")
        settings.dtype = settings.dtype or "float32"
        settings.kv_cache_dtype = settings.kv_cache_dtype or settings.dtype
        settings.preferred_block_size = self.options.block_size
        settings.kv_cache_bytes = settings.kv_cache_bytes or self.options.memory_bytes // 2

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        del world_size, environment  # the device computes, one thread per rank drives it
        return ThreadPlan(compute_threads=1)

    def attention_candidates(self) -> Sequence[str]:
        return self.options.attention_backends

    def memory_budget(self, device: LogicalDevice) -> int:
        return self.describe(device).memory_bytes

    def memory_used(self, device: LogicalDevice) -> int:
        return self.used_bytes.get(device, 0)

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> torch.device:
        """The host as a device of the framework; its name as text where no framework is loaded.

        Raises ``RuntimeError`` when the process is bound to another device.
        """
        del threads
        self.describe(device)
        if self.bound not in (None, device):
            raise RuntimeError(f"this process is bound to fake device {self.bound}, not {device}")
        self.bound = device
        framework: Any = sys.modules.get("torch")
        return cast("torch.device", self.device_type if framework is None else framework.device(self.device_type))

    @classmethod
    def create_graph_pool(cls) -> FakeGraphPool:
        return FakeGraphPool()


@plugin("platform", options=FakePlatformOptions, probe=probe)
def create(ctx: PluginContext, options: FakePlatformOptions) -> FakePlatform:
    """Factory of the plugin ``fake``."""
    del ctx
    return FakePlatform(options)


def install_fake_platform(folder: Path, *, name: str = "fake") -> None:
    """Make ``folder`` (which must be on ``sys.path``) hold a distribution whose platform plugin ``name`` is this."""
    metadata = folder / "hardpoint_fake_platform-1.0.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    headers = "Metadata-Version: 2.1\nName: hardpoint-fake-platform\nVersion: 1.0\nRequires-Dist: hardpoint-core\n"
    (metadata / "METADATA").write_text(headers)
    (metadata / "entry_points.txt").write_text(f"[hardpoint.platform.v1]\n{name} = {__name__}:create\n")
    importlib.invalidate_caches()

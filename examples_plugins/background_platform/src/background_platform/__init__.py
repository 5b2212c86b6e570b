"""A platform for hosts that have other work: few threads, the lowest priority, a small cache.

The device is the host's processor, as the framework knows it; everything the platform decides differs from the default
one. It counts as present where ``BACKGROUND_CORES`` says how many cores may be used.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

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

CORES = "BACKGROUND_CORES"
DTYPES = ("float32", "bfloat16")
LOWEST_PRIORITY = 19


class Options(BaseModel):
    """Options under ``plugins.platform.background``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_bytes: int = Field(default=2 << 30, gt=0, description="memory that the model and its cache may take in all")
    max_num_seqs: int = Field(default=8, ge=1, description="requests computed at the same time")


def cores(environment: Mapping[str, str]) -> int:
    """Raises ``ConfigError`` for anything but a positive number."""
    text = environment.get(CORES, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(f"{CORES}={text!r} is not a positive number; set it to the number of cores to use")
    return int(text)


def probe() -> ProbeResult:
    """Says what is there without touching it: no framework is imported, no device opened."""
    if CORES not in os.environ:
        return ProbeResult(ProbeStatus.ABSENT, f"{CORES} is not set")
    try:
        return ProbeResult(ProbeStatus.AVAILABLE, f"{cores(os.environ)} cores to spare")
    except ConfigError as error:
        # There, but not usable: this must never end in a silent fall back to another platform.
        return ProbeResult(ProbeStatus.BROKEN, str(error))


class BackgroundPlatform(Platform):
    kind: ClassVar[PlatformKind] = PlatformKind.OUT_OF_TREE
    name: ClassVar[str] = "background"
    device_type: ClassVar[str] = "cpu"
    collective_backend: ClassVar[str] = "gloo"
    extra_environment: ClassVar[Sequence[str]] = (CORES,)

    def __init__(self, options: Options) -> None:
        self.options = options

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        return DeviceDescription(device_type="cpu", name="spare cores", memory_bytes=self.options.memory_bytes)

    def check_and_update(self, settings: EngineSettings) -> None:
        """Fills in what the user left open; refuses what cannot be; never overrules."""
        if settings.world_size != 1:
            raise ConfigError(f"spare cores hold one rank, not {settings.world_size}; set --tensor-parallel-size 1")
        if settings.dtype not in (None, *DTYPES):
            raise ConfigError(f"dtype {settings.dtype!r} is not for spare cores; set --dtype to {' or '.join(DTYPES)}")
        for field in ("block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
            value = getattr(settings, field)
            if value is not None and value < 1:
                raise ConfigError(f"{field} {value} is below 1; set it to a positive number or leave it unset")
        settings.worker = settings.worker or "torch"
        settings.executor = settings.executor or "uniproc"
        settings.dtype = settings.dtype or "float32"
        settings.kv_cache_dtype = settings.kv_cache_dtype or settings.dtype
        settings.max_num_seqs = settings.max_num_seqs or self.options.max_num_seqs
        settings.max_num_batched_tokens = settings.max_num_batched_tokens or max(128, settings.max_num_seqs)
        settings.kv_cache_bytes = settings.kv_cache_bytes or self.options.memory_bytes // 4
        # The block size is left to the attention backends: the smallest that all of them take, from here on.
        settings.preferred_block_size = 16

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        return ThreadPlan(compute_threads=cores(environment))

    def attention_candidates(self) -> Sequence[str]:
        return ("torch_reference", "numpy")

    def memory_budget(self, device: LogicalDevice) -> int:
        return self.options.memory_bytes

    def memory_used(self, device: LogicalDevice) -> int:
        with open("/proc/self/statm", encoding="ascii") as stream:
            return int(stream.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> torch.device:
        """The only method that may touch the device, and the first to import the framework."""
        import torch

        os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
        torch.set_num_threads(threads.compute_threads)
        return torch.device(self.device_type)


@plugin("platform", options=Options, probe=probe)
def create(ctx: PluginContext, options: Options) -> BackgroundPlatform:
    return BackgroundPlatform(options)

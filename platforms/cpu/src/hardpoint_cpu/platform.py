"""The CPU platform: the default and the fallback. Importing it, probing it and asking it need no torch."""

from __future__ import annotations

import logging
import math
import os
import platform
import sys
from collections.abc import Mapping, MutableMapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import (
    DeviceDescription,
    EngineSettings,
    LogicalDevice,
    Platform,
    PlatformKind,
    ThreadPlan,
)
from hardpoint.interfaces.plugin import PluginContext, ProbeResult, ProbeStatus, plugin
from hardpoint_cpu.host import Host
from hardpoint_cpu.kernels import KernelProvider, find_report
from hardpoint_cpu.native.levels import best_level

if TYPE_CHECKING:
    import torch

    from hardpoint.interfaces.model_source import WeightTensor

__all__ = ["CpuOptions", "CpuPlatform", "bound_spinning", "bound_tokenizers", "create", "probe"]

DTYPES = ("float32", "bfloat16", "float16")
THREADS_VARIABLE = "OMP_NUM_THREADS"
TOKENIZERS_VARIABLE = "TOKENIZERS_PARALLELISM"
SPIN_VARIABLE = "GOMP_SPINCOUNT"
WAIT_VARIABLE = "OMP_WAIT_POLICY"
_AUTO = (None, "auto")
_MOST_THREADS = 4096
"""More than any machine has cores; far more cannot be started, which ends the process."""


class CpuOptions(BaseModel):
    """Options under ``plugins.platform.cpu``: mostly what the platform fills in where the user set nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kv_cache_fraction: float = Field(
        default=0.4, gt=0, le=1, description="share of the memory free at start that the KV cache takes"
    )
    kv_cache_max_bytes: int = Field(default=4 << 30, gt=0, description="most bytes the KV cache takes by itself")
    block_size: int = Field(default=16, gt=0, description="least tokens per KV block where `cache.block_size` is unset")
    max_num_seqs: int = Field(default=128, gt=0, description="where `scheduler.max_num_seqs` is unset")
    max_num_batched_tokens: int = Field(
        default=512, gt=0, description="where `scheduler.max_num_batched_tokens` is unset"
    )
    attention_backends: tuple[str, ...] = Field(
        default=("cpu_paged", "torch_reference"),
        description="`attention_backend` plugins to choose from, the best first",
    )
    kernels: Literal["auto", "off"] = Field(
        default="auto", description="`off`: plain torch instead of compiled kernels, several times slower"
    )
    kernel_level: str = Field(
        default="auto",
        description="processor level that kernels are compiled for, such as `avx2`; `auto`: the best that runs here",
    )
    kernel_build: Literal["background", "wait", "off"] = Field(
        default="background",
        description="where no kernels are compiled yet: compile them while plain torch computes (`background`), before "
        "anything else (`wait`), or do without (`off`)",
    )
    spin_count: int = Field(default=1000, ge=0, description="polls of an OpenMP thread for work before it sleeps")


def probe() -> ProbeResult:
    """A host always has a processor; only an operating system without affinity calls is refused."""
    if not hasattr(os, "sched_getaffinity"):
        return ProbeResult(ProbeStatus.ABSENT, f"no CPU affinity on {sys.platform}; Linux is supported")
    found = find_report(best_level(platform.machine(), Host().cpu_flags()))
    place = f": {found.reason}" if found.path is None else f" in {found.path.parent}"
    what = f"{len(os.sched_getaffinity(0))} logical CPUs, kernels for {found.level} {found.state}{place}"
    return ProbeResult(ProbeStatus.AVAILABLE, what, found.facts())


class CpuPlatform(Platform):
    """One logical device: the host. ``host`` can be fabricated.

    Attributes:
        kernels: the compiled kernels of this process, for whoever computes with them.
        default_compiler: the ``compiler`` plugin of workers whose operator names none.
    """

    kind: ClassVar[PlatformKind] = PlatformKind.CPU
    name: ClassVar[str] = "cpu"
    device_type: ClassVar[str] = "cpu"
    dispatch_key: ClassVar[str] = "CPU"
    collective_backend: ClassVar[str] = "gloo"
    default_compiler: ClassVar[str] = "cpu_native"
    extra_environment: ClassVar[Sequence[str]] = (THREADS_VARIABLE, SPIN_VARIABLE, WAIT_VARIABLE)

    def __init__(
        self, options: CpuOptions | None = None, host: Host | None = None, logger: logging.Logger | None = None
    ) -> None:
        self.options = options or CpuOptions()
        self.host = host or Host()
        self.kernels = KernelProvider(
            self.host,
            level=self.options.kernel_level,
            build=self.options.kernel_build,
            is_enabled=self.options.kernels != "off",
            logger=logger,
        )

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        del device  # all logical devices are this host
        return DeviceDescription(
            device_type="cpu",
            name=self.host.model_name(),
            memory_bytes=self.host.memory().limit,
            features=self.host.cpu_flags(),
        )

    def check_and_update(self, settings: EngineSettings) -> None:
        if settings.world_size < 1:
            raise ConfigError(f"world size {settings.world_size} is below 1; set the parallel sizes to 1 or more")
        settings.worker = settings.worker or "torch"
        settings.executor = settings.executor or ("uniproc" if settings.world_size == 1 else "multiproc")
        settings.dtype = self._dtype(settings.dtype)
        if settings.kv_cache_dtype in _AUTO:
            settings.kv_cache_dtype = settings.dtype
        if settings.block_size is not None:
            _positive("block size", settings.block_size, self.options.block_size, "--block-size")
        settings.preferred_block_size = self.options.block_size
        settings.max_num_seqs = _positive(
            "number of sequences", settings.max_num_seqs, self.options.max_num_seqs, "--max-num-seqs"
        )
        # Every running sequence must be able to advance by one token in a step.
        default_tokens = max(self.options.max_num_batched_tokens, settings.max_num_seqs)
        settings.max_num_batched_tokens = _positive(
            "tokens per step", settings.max_num_batched_tokens, default_tokens, "--max-num-batched-tokens"
        )
        settings.kv_cache_bytes = _positive(
            "KV cache size", settings.kv_cache_bytes, self._kv_cache_bytes(settings.world_size), "--kv-cache-memory"
        )

    def unpack(self, tensor: WeightTensor) -> torch.Tensor | None:
        """See ``UnpackingPlatform``: rows of GGUF blocks, once there are kernels."""
        from hardpoint_cpu.unpacking import unpack_rows

        library = self.kernels.library()
        return None if library is None else unpack_rows(library, tensor)

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        """Threads per worker: one per allowed physical core within the CPU quota, shared out among the ranks.

        ``OMP_NUM_THREADS`` overrides the count. Threads are pinned only where a core has several hardware threads.
        """
        cores = self.host.physical_cores()
        given = environment.get(THREADS_VARIABLE)
        if given:
            return ThreadPlan(compute_threads=_threads(given))
        quota = self.host.cpu_quota()
        usable = len(cores) if quota is None else min(len(cores), math.ceil(quota))
        has_siblings = len(cores) < len(self.host.allowed_cpus)
        return ThreadPlan(
            compute_threads=max(1, usable // max(1, world_size)),
            cores=cores if has_siblings and usable == len(cores) else (),
        )

    def attention_candidates(self) -> Sequence[str]:
        return self.options.attention_backends

    def memory_budget(self, device: LogicalDevice) -> int:
        del device
        return self.host.memory().limit

    def memory_used(self, device: LogicalDevice) -> int:
        del device
        return self.host.memory().used

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> torch.device:
        """Size torch's pools. Raises ``ConfigError`` when the process used torch before and the pools are fixed."""
        import torch

        if threads.cores:
            os.sched_setaffinity(0, threads.cores)
        self.kernels.bind(threads)
        torch.set_num_threads(threads.compute_threads)
        if torch.get_num_interop_threads() != 1:
            try:
                torch.set_num_interop_threads(1)
            except RuntimeError as error:
                raise ConfigError(
                    f"the inter-operator pool already runs {torch.get_num_interop_threads()} threads: the process used "
                    "torch before the worker started; start the engine in a process of its own"
                ) from error
        return torch.device("cpu")

    def capabilities(self) -> Mapping[str, Any]:
        memory = self.host.memory()
        return {
            "physical_cores": len(self.host.physical_cores()),
            "cpu_quota": self.host.cpu_quota(),
            "memory_limit_bytes": memory.limit,
            "memory_available_bytes": memory.available,
            **self.kernels.report().facts(),
        }

    def _dtype(self, wanted: str | None) -> str:
        # Half formats are storage formats on a processor: computing in float32 is exact and not slower.
        if wanted in _AUTO:
            return "float32"
        if wanted not in DTYPES:
            raise ConfigError(f"dtype {wanted!r} cannot run on the CPU; allowed for --dtype: auto, {', '.join(DTYPES)}")
        return wanted

    def _kv_cache_bytes(self, world_size: int) -> int:
        share = int(self.host.memory().available * self.options.kv_cache_fraction) // world_size
        return max(1, min(self.options.kv_cache_max_bytes, share))


def _positive(what: str, value: int | None, default: int, option: str) -> int:
    if value is None:
        return default
    if value < 1:
        raise ConfigError(f"{what} {value} is below 1; set {option} to a positive number")
    return value


def _threads(text: str) -> int:
    # OpenMP allows a list with one number per nesting level; the first level is ours.
    first = text.split(",")[0].strip()
    if not first.isdecimal() or len(first) > len(str(_MOST_THREADS)) or not 1 <= int(first) <= _MOST_THREADS:
        raise ConfigError(
            f"{THREADS_VARIABLE}={text!r} is not a positive number of at most {_MOST_THREADS:,}; unset it or set it to "
            "a thread count"
        )
    return int(first)


def bound_spinning(environment: MutableMapping[str, str], spin_count: int) -> None:
    """Let OpenMP threads sleep soon after they run out of work, unless the operator decided.

    By default they poll for about a millisecond. Whoever else needs the core meanwhile (the front end, another
    server) then stops every parallel region of ours until the scheduler takes the core away: decoding was seen to
    become ten times slower, while sleeping early costs a few percent on an idle machine. The OpenMP runtime reads the
    variable when torch loads it, so this must come before; child processes inherit it.
    """
    if SPIN_VARIABLE not in environment and WAIT_VARIABLE not in environment:
        environment[SPIN_VARIABLE] = str(spin_count)


def bound_tokenizers(environment: MutableMapping[str, str]) -> None:
    """Let tokenizers work in the thread that calls them, unless the operator decided.

    Their library would otherwise keep a pool of as many threads as there are cores, beside the one that computes. It
    reads the variable at every call.
    """
    environment.setdefault(TOKENIZERS_VARIABLE, "false")


@plugin("platform", options=CpuOptions, probe=probe, capabilities={"fallback": True})
def create(ctx: PluginContext, options: CpuOptions) -> CpuPlatform:
    bound_spinning(os.environ, options.spin_count)
    bound_tokenizers(os.environ)
    return CpuPlatform(options, logger=ctx.logger)

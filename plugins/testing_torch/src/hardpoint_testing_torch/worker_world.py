"""Everything around a worker under test: a tiny model on disk, a platform without settings, and plugins on top of the
installed ones. There is no engine and no scheduler."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
import torch

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces.kv_cache import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVCacheTensor,
    LayerSpec,
    spec_from_wire,
)
from hardpoint.interfaces.kv_cache_specs import SlidingWindowSpec
from hardpoint.interfaces.platform import DeviceDescription, EngineSettings, LogicalDevice, Platform, ThreadPlan
from hardpoint.interfaces.plugin import PluginAccess, PluginContext, ProcessRole
from hardpoint.interfaces.worker import Worker, WorkerConfig, WorkerContext
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.local_driver import worker_config
from hardpoint_testing_torch.parity import TIE_GAP
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_testing_torch.state_dict_loader import StateDictLoader
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_testing_torch.worker_driver import WorkerDriver

__all__ = ["KitPlatform", "KitPlugins", "WorkerWorld", "check_greedy", "installed_plugins", "plan_kv", "start_driver"]

ATTENTION = "kit_attention"
LOADER = "kit_checkpoint"


class _WorkerProcess(PluginSuite):
    kind: ClassVar[str] = "worker"
    plugin: ClassVar[str | None] = "any"


def installed_plugins() -> PluginAccess:
    """What a worker process of this environment could load."""
    return _WorkerProcess().runtime()


class KitPlatform(Platform):
    """The CPU with as many threads as the plan says; memory is what the fields say."""

    budget: int = 1 << 30
    used: int = 1 << 20

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        del device
        return DeviceDescription(device_type="cpu", name="the host of the conformance kit")

    def check_and_update(self, settings: EngineSettings) -> None:
        del settings

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        del world_size, environment
        return ThreadPlan(compute_threads=1)

    def attention_candidates(self) -> Sequence[str]:
        return (ATTENTION,)

    def memory_budget(self, device: LogicalDevice) -> int:
        del device
        return self.budget

    def memory_used(self, device: LogicalDevice) -> int:
        del device
        return self.used

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> torch.device:
        del device
        # More threads than asked for only get into each other's way over tensors as small as these.
        torch.set_num_threads(threads.compute_threads)
        return torch.device("cpu")


@dataclass(frozen=True, slots=True)
class KitPlugins:
    """``PluginAccess`` in which ``own`` factories, called with the context alone, come before the installed ones."""

    installed: PluginAccess
    own: dict[tuple[str, str], Callable[[Any], Any]] = field(default_factory=dict)

    def names(self, kind: str) -> tuple[str, ...]:
        mine = tuple(name for known, name in self.own if known == kind)
        return (*mine, *(name for name in self.installed.names(kind) if name not in mine))

    def context(self, kind: str, name: str) -> PluginContext:
        if (kind, name) in self.own or name not in self.installed.names(kind):
            return PluginContext(
                name, 1, frozenset({ProcessRole.WORKER}), logger=logging.getLogger(f"hardpoint.plugin.{kind}.{name}")
            )
        return self.installed.context(kind, name)

    def create(self, kind: str, name: str, context: PluginContext) -> Any:
        if (kind, name) in self.own:
            return self.own[kind, name](context)
        if name not in self.installed.names(kind):
            raise PluginNotFoundError(f"no {kind} plugin {name!r}; there are {', '.join(self.names(kind)) or 'none'}")
        return self.installed.create(kind, name, context)

    def fingerprint(self) -> str:
        return self.installed.fingerprint()

    def notify(self, hook: str, **arguments: Any) -> None:
        self.installed.notify(hook, **arguments)


@dataclass(frozen=True, slots=True)
class WorkerWorld:
    """What a worker is created from. ``tiny`` is the model it shall load, and the oracle."""

    tiny: TinyModel
    plugins: KitPlugins
    platform: Platform
    config: WorkerConfig

    @classmethod
    def create(cls, tiny: TinyModel, installed: PluginAccess, platform: Platform, **changes: Any) -> WorkerWorld:
        """``changes`` replace fields of the worker's configuration."""
        tensors = tiny.tensors()
        plugins = KitPlugins(
            installed,
            {
                ("attention_backend", ATTENTION): lambda ctx: PlainAttentionBackend(),
                ("weight_loader", LOADER): lambda ctx: StateDictLoader(tensors),
            },
        )
        info = msgspec.structs.replace(tiny.info, loader=LOADER)
        config = msgspec.structs.replace(worker_config(info), **changes)
        return cls(tiny, plugins, platform, config)

    def context(self, name: str) -> WorkerContext:
        """What an executor hands to the factory of the worker ``name``."""
        base = self.plugins.context("worker", name)
        return WorkerContext(
            name=name,
            api_version=base.api_version,
            roles=base.roles,
            rank=self.config.parallel.rank,
            platform=self.platform,
            logger=base.logger,
            plugins=self.plugins,
            config=self.config,
        )


def start_driver(worker: Worker, config: WorkerConfig, *, num_blocks: int = 120, warm_up: bool = False) -> WorkerDriver:
    """Take a new worker through its start, in the order of :class:`Worker`, and be its scheduler."""
    worker.init_device()
    worker.load_model()
    plan = plan_kv(worker.kv_cache_specs(), num_blocks)
    worker.kv_cache_budget()
    worker.initialize_kv_cache(plan)
    if warm_up:
        worker.warm_up()
    return WorkerDriver(worker, config, num_groups=len(plan.groups), num_blocks=num_blocks)


def plan_kv(
    layers: Sequence[LayerSpec], num_blocks: int, classes: Mapping[str, type[KVCacheSpec]] | None = None
) -> KVCacheConfig:
    """One group and one buffer for each distinct spec, all of ``num_blocks`` blocks (the null block included).

    ``classes`` are the specs known by name, by default those of decoders with and without windows.
    """
    known = classes or {spec.kind: spec for spec in (FullAttentionSpec, SlidingWindowSpec)}
    names: dict[Any, list[str]] = {}
    for layer in layers:
        names.setdefault(layer.spec, []).append(layer.layer_name)
    groups, tensors = [], []
    for wire, members in names.items():
        page = spec_from_wire(wire, known).page_size_bytes
        groups.append(KVCacheGroup(tuple(members), wire))
        tensors.append(
            KVCacheTensor(
                size=page * num_blocks * len(members),
                layer_names=tuple(members),
                layer_stride=page * num_blocks,
                block_stride=page,
            )
        )
    return KVCacheConfig(num_blocks=num_blocks, groups=tuple(groups), tensors=tuple(tensors))


def check_greedy(tiny: TinyModel, prompt: Sequence[int], generated: Sequence[int], what: str = "greedy tokens") -> None:
    """``generated`` is what the oracle would choose after ``prompt``, near-ties excused.

    The oracle is fed the generated tokens, so that one near-tie does not make everything after it differ.
    """
    logits = tiny.logits([*prompt, *generated[:-1]])[len(prompt) - 1 :]
    best = logits.topk(2, dim=-1)
    gap = (best.values[:, 0] - best.values[:, 1]) / (logits.amax(-1) - logits.amin(-1))
    differs = (best.indices[:, 0] != torch.tensor(list(generated))) & (gap > TIE_GAP)
    if bool(differs.any()):
        at = int(differs.nonzero()[0])
        raise AssertionError(
            f"{what}: token {at} after a prompt of {len(prompt)} is {generated[at]}, the oracle says "
            f"{int(best.indices[at, 0])} (generated: {list(generated)})"
        )

"""Attention backends of one worker: the selection of a start, and the same on a device that need not be there."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.attention import AttentionBackend, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription, Platform
from hardpoint.interfaces.plugin import PluginAccess, PluginDeclaration, ProbeStatus
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.attention_needs import attention_need, bare_need, describe_need, layer_needs
from hardpoint_torch_runtime.backend_selection import AttentionChoice, AttentionSelector, Needs, Verdict
from hardpoint_torch_runtime.layers.context_shards import ContextShards
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.toolkit import LayerToolkit
from hardpoint_torch_runtime.model_choice import ModelChoice
from hardpoint_torch_runtime.model_loading import create_model, torch_dtype
from hardpoint_torch_runtime.plugin_access import create_in_worker

__all__ = ["AttentionReport", "LayersReport", "attention_for_layers", "attention_report"]


KIND = "attention_backend"


@runtime_checkable
class DeclaredPlugins(Protocol):
    """Access to plugins that also tells what they declare of themselves."""

    def load_factory(self, kind: str, name: str) -> Any:
        """A record whose ``declaration`` is a ``PluginDeclaration``."""


@dataclass(frozen=True, slots=True)
class LayersReport:
    """Layers that ask for the same. ``need`` is for people."""

    layers: tuple[str, ...]
    need: str


@dataclass(frozen=True, slots=True)
class AttentionReport:
    """What a start on a device would decide.

    Attributes:
        device: its name.
        layers: the distinct needs; of no layers where these are not known.
        candidates: all of them with their answers, in the order of preference.
        chosen: the plugin that would compute; None: none accepts, and a start would fail.
        block_size, kernel_block_size: tokens of a KV cache block, and of those that kernels see of it.
        notes: what kept the report from saying more, and which plugin runs a model that has none of its own.
    """

    device: str
    layers: tuple[LayersReport, ...]
    candidates: tuple[Verdict, ...]
    chosen: str | None
    block_size: int
    kernel_block_size: int | None
    notes: tuple[str, ...] = ()


def attention_for_layers(
    plugins: PluginAccess,
    platform: Platform,
    config: WorkerConfig,
    described: DeviceDescription,
    device: torch.device,
    logger: logging.Logger,
) -> Callable[[LayerToolkit], AttentionChoice]:
    """What binds a model's layers to a backend, once they exist. The first rank tells ``logger`` of the candidates.

    Raises as :meth:`AttentionSelector.choose` does, before the model takes memory, when no backend will do whatever the
    layers turn out to be.
    """
    selector = _selector(plugins, platform, config, device, logger if config.parallel.rank == 0 else None)
    base = attention_need(config, described)
    selector.choose({bare_need(base): ()})
    return lambda toolkit: selector.serve(toolkit, base)


def attention_report(
    plugins: PluginAccess,
    platform: Platform,
    config: WorkerConfig,
    described: DeviceDescription,
    context_shards: ContextShards | None = None,
    model: ModelChoice | None = None,
) -> AttentionReport:
    """The decision for ``described`` without binding a device, allocating a model or reading a weight.

    Raises ``UnsupportedModelError`` or ``ModelFormatError``, as a start would, for a model that nothing can run: which
    backend would compute it is no question then.
    """
    selector = _selector(plugins, platform, config, None)
    base = attention_need(config, described)
    # Backends may bring KV cache dtypes along, which layers look up when they are created.
    selector.examine({bare_need(base): ()})
    notes = []
    if model is not None and (line := model.told_of(config.model.architecture)):
        notes.append(line)
    needs: Needs = {base: ()}
    try:
        needs = _needs_of_model(plugins, config, base, context_shards, model)
    except (ModelFormatError, UnsupportedModelError):
        raise
    except HardpointError as error:
        notes.append(f"layers could not be created, so this goes by the model's configuration alone: {error}")
    verdicts = selector.examine(needs)
    choice = selector.choose(needs) if any(verdict.is_chosen for verdict in verdicts) else None
    return AttentionReport(
        described.name,
        tuple(LayersReport(tuple(names), describe_need(need)) for need, names in needs.items()),
        verdicts,
        None if choice is None else choice.name,
        config.block_size,
        None if choice is None else choice.kernel_block_size(config.block_size),
        tuple(notes),
    )


def _needs_of_model(
    plugins: PluginAccess,
    config: WorkerConfig,
    base: AttentionNeed,
    context_shards: ContextShards | None,
    model: ModelChoice | None,
) -> Needs:
    """Of layers on torch's device without memory. Ranks are not there, and no layer computes."""
    parallel = TensorParallel(0, config.parallel.tensor_parallel_size)
    meta, dtype = torch.device("meta"), torch_dtype(config.dtype)
    toolkit = LayerToolkit(config, meta, dtype, None, None, parallel, context_shards=context_shards)
    create_model(plugins, config, toolkit, model)
    return layer_needs(base, toolkit.attention_layers.values()) or {bare_need(base): ()}


def _selector(
    plugins: PluginAccess,
    platform: Platform,
    config: WorkerConfig,
    device: torch.device | None,
    logger: logging.Logger | None = None,
) -> AttentionSelector:
    def create(name: str) -> AttentionBackend:
        backend: AttentionBackend = create_in_worker(plugins, KIND, name, config, device)
        return backend

    return AttentionSelector(
        create,
        platform.attention_candidates(),
        absence=lambda name: _absence(plugins, name),
        installed=plugins.names(KIND),
        forced=config.attention_backend,
        logger=logger,
    )


def _absence(plugins: PluginAccess, name: str) -> str | None:
    """What the plugin's probe says against it: a package or a driver may be missing that no need is about."""
    asked: object = plugins
    if not isinstance(asked, DeclaredPlugins):
        return None
    declaration: PluginDeclaration = asked.load_factory(KIND, name).declaration
    if declaration.probe is None:
        return None
    try:
        answer = declaration.probe()
    except Exception as error:
        return f"its probe raised {type(error).__name__}: {error}"
    return None if answer.status is ProbeStatus.AVAILABLE else f"it is {answer.status}: {answer.reason}"

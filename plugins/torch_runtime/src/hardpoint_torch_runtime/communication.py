"""The communicator of a worker that computes a share of every layer."""

from __future__ import annotations

import hashlib

import msgspec
import torch

from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.plugin import PluginAccess
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.plugin_access import create_in_worker

__all__ = ["create_communicator", "require_alike", "smallest"]

_OWN_TO_A_RANK = frozenset({"model", "parallel", "threads", "show_progress", "kv_cache_bytes"})
# Launchers that size the cache by free memory see different amounts; ranks go by the least (:func:`smallest`).


def create_communicator(
    plugins: PluginAccess, platform: Platform, config: WorkerConfig, device: torch.device, name: str | None = None
) -> Communicator | None:
    """The plugin ``name``, or the one that the platform prefers; None for a rank that shares no layer with others.

    Returns when all ranks of the group are there. Raises ``ConfigError`` where neither says which one,
    ``PluginNotFoundError`` for one that is not installed, and what the plugin raises.
    """
    size = config.parallel.tensor_parallel_size
    if size == 1:
        return None
    name = name or platform.communicator or platform.collective_backend
    if not name:
        raise ConfigError(
            f"tensor_parallel_size is {size}, but platform {platform.name!r} names no communicator; set "
            f"plugins.worker.<name>.communicator to one of {', '.join(plugins.names('communicator')) or 'none'}, or "
            "--tensor-parallel-size 1"
        )
    try:
        communicator: Communicator = create_in_worker(plugins, "communicator", name, config, device)
    except PluginNotFoundError as error:
        raise PluginNotFoundError(
            f"tensor_parallel_size is {size}, and the ranks need a communicator: {error}; or set "
            "--tensor-parallel-size 1"
        ) from error
    return communicator


def smallest(value: int, communicator: Communicator | None, device: torch.device) -> int:
    """The least ``value`` of all ranks that share layers; all of them must call this."""
    if communicator is None:
        return value
    return int(communicator.all_gather(torch.tensor([value], dtype=torch.int64, device=device), 0).min())


def require_alike(config: WorkerConfig, communicator: Communicator | None, device: torch.device) -> None:
    """Raises ``ConfigError`` on every rank where ranks that share layers were given settings that differ.

    A launcher may start each with a command line of its own. They would compute different steps: wait for each other
    for good where shapes differ, and mix the activations of different tokens where they do not.
    """
    if communicator is None:
        return
    settings = {name: getattr(config, name) for name in config.__struct_fields__ if name not in _OWN_TO_A_RANK}
    # Not where the files lie: hosts may keep them in different folders.
    settings["model"] = (config.model.architecture, config.model.config)
    mine = torch.tensor([[_digest(value) for value in settings.values()]], dtype=torch.int64, device=device)
    differs = (communicator.all_gather(mine, 0) != mine).any(0).tolist()
    names = [name for name, is_other in zip(settings, differs, strict=True) if is_other]
    if names:
        raise ConfigError(
            f"ranks that share layers were started with different settings: {', '.join(names)} of rank "
            f"{config.parallel.rank} are not those of all others; give every rank the same model and settings"
        )


def _digest(value: object) -> int:
    """The same in every process, unlike ``hash``."""
    encoded = msgspec.json.encode(value, order="deterministic")
    return int.from_bytes(hashlib.sha256(encoded).digest()[:8], "little", signed=True)

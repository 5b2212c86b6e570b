"""``custom_op`` plugins by name: created once a process and rank, registered, and handed out as callables."""

from __future__ import annotations

from dataclasses import replace

import torch

from hardpoint.interfaces.custom_op import ANY_DEVICE, CustomOps
from hardpoint.interfaces.plugin import PluginAccess
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.ops.registry import OPERATORS, OperatorSet
from hardpoint_torch_runtime.plugin_access import create_in_worker

__all__ = ["load_custom_ops"]


def load_custom_ops(
    plugins: PluginAccess, name: str, *, config: WorkerConfig | None = None, device: torch.device | None = None
) -> OperatorSet:
    """The operators of the ``custom_op`` plugin ``name``, registered if they are not yet.

    Models, attention backends and other plugins inside a worker get their operators here, usually in their factory.
    With ``device`` operators without an implementation for it count as missing.

    Raises the errors of ``PluginAccess.create`` and ``OperatorRegistry.register``.
    """
    ops: CustomOps = create_in_worker(plugins, "custom_op", name, config, device)
    found = OPERATORS.register(ops, plugins.context("custom_op", name).distribution)
    if device is None:
        return found
    elsewhere = {
        operator.name: f"it runs on {', '.join(sorted(operator.implementations))}, not on {device.type}"
        for operator in ops.operators
        if operator.name in found.operators and not {device.type, ANY_DEVICE} & set(operator.implementations)
    }
    here = {key: operator for key, operator in found.operators.items() if key not in elsewhere}
    return replace(found, operators=here, missing={**found.missing, **elsewhere})

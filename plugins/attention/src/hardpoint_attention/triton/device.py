"""What launches depend on of the device that tensors lie on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from hardpoint_attention.triton.configs import Target, target_for

__all__ = ["DeviceFacts", "device_facts"]

INTERPRETED_PROCESSORS = 4
"""The interpreter runs one program after another; taken for a few, so that parts are made of long rows here as well."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """``processors``: programs that run side by side without sharing one (multiprocessors, compute units)."""

    target: Target
    processors: int


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Asked once per device."""
    if device.type == "cpu":
        return DeviceFacts(Target.INTERPRETER, INTERPRETED_PROCESSORS)
    found = torch.cuda.get_device_properties(device)
    target = target_for((found.major, found.minor), is_hip=torch.version.hip is not None)
    return DeviceFacts(target, found.multi_processor_count)

"""What launches depend on of the device that tensors lie on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch

from hardpoint_attention.triton.configs import Target, target_for
from hardpoint_torch_runtime.float8_support import converts_e4m3

__all__ = ["DeviceFacts", "device_facts"]

INTERPRETED_PROCESSORS = 4
"""The interpreter runs one program after another; taken for a few, so that parts are made of long rows here as well."""


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """``processors``: programs that run side by side without sharing one (multiprocessors, compute units).
    ``converts_e4m3``: float8_e4m3fn is a type there; elsewhere kernels take its codes apart."""

    target: Target
    processors: int
    converts_e4m3: bool = True


@cache
def device_facts(device: torch.device) -> DeviceFacts:
    """Asked once per device."""
    if device.type == "cpu":
        return DeviceFacts(Target.INTERPRETER, INTERPRETED_PROCESSORS, converts_e4m3(None, is_hip=False))
    found = torch.cuda.get_device_properties(device)
    capability, is_hip = (found.major, found.minor), torch.version.hip is not None
    target = target_for(capability, is_hip=is_hip)
    return DeviceFacts(target, found.multi_processor_count, converts_e4m3(capability, is_hip=is_hip))

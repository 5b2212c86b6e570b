"""Factory of the plugin ``flash_attn``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.block_size import BLOCK_SIZES_CAPABILITY
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_attention.flash.backend import FlashBackend, FlashSurroundings
from hardpoint_attention.flash.capabilities import KINDS
from hardpoint_attention.flash.installed import installed_kernels, probe
from hardpoint_attention.flash.options import FlashOptions

__all__ = ["DeviceFacts", "create", "facts_from", "facts_of"]


@plugin(
    "attention_backend",
    options=FlashOptions,
    probe=probe,
    capabilities={
        "returns_lse": True,
        "kinds": [kind.value for kind in KINDS],
        "mla": False,
        BLOCK_SIZES_CAPABILITY: {"multiple_of": 16},
    },
)
def create(ctx: WorkerContext, options: FlashOptions) -> AttentionBackend:
    """Imports no kernel yet: generations are loaded with the first layer that runs on them."""
    config = ctx.config
    facts = facts_of(ctx.device)
    surroundings = FlashSurroundings(
        device=facts.description,
        installed=installed_kernels(),
        batch_invariant=config is not None and config.batch_invariant,
        num_processors=facts.num_processors,
        logger=ctx.logger,
    )
    return FlashBackend(surroundings, options)


@dataclass(frozen=True, slots=True)
class DeviceFacts:
    """The worker's device, as kernels are chosen by it."""

    description: DeviceDescription
    num_processors: int = 1


def facts_of(device: object) -> DeviceFacts:
    """Of the device that a worker is bound to; no other one has kernels, so that nothing is asked about these."""
    if not isinstance(device, torch.device) or device.type != "cuda":
        kind = device.type if isinstance(device, torch.device) else "cpu"
        return DeviceFacts(DeviceDescription(device_type=kind, name=f"this process's device ({device})"))
    return facts_from(torch.cuda.get_device_properties(device), is_hip=torch.version.hip is not None)


def facts_from(properties: Any, *, is_hip: bool) -> DeviceFacts:
    """Of what torch says about a device; ``is_hip``: it is AMD's, although torch calls it CUDA too."""
    description = DeviceDescription(
        device_type="rocm" if is_hip else "cuda",
        name=properties.name,
        capability=(properties.major, properties.minor),
        memory_bytes=properties.total_memory,
    )
    return DeviceFacts(description, properties.multi_processor_count)

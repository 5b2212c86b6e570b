"""Factory of the plugin ``flash_attn``."""

from __future__ import annotations

from typing import Any

import torch

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.block_size import BLOCK_SIZES_CAPABILITY
from hardpoint.interfaces.devices import LogicalDevice
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_attention.flash.backend import FlashBackend, FlashSurroundings
from hardpoint_attention.flash.capabilities import KINDS
from hardpoint_attention.flash.installed import installed_kernels, probe
from hardpoint_attention.flash.options import FlashOptions

__all__ = ["create"]


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
    surroundings = FlashSurroundings(
        device=_description(ctx),
        installed=installed_kernels(),
        batch_invariant=config is not None and config.batch_invariant,
        num_processors=_num_processors(ctx.device),
        logger=ctx.logger,
    )
    return FlashBackend(surroundings, options)


def _description(ctx: WorkerContext) -> DeviceDescription:
    device = ctx.device
    if ctx.platform is None or not isinstance(device, torch.device):
        return DeviceDescription(device_type="cpu", name="no device")
    return ctx.platform.describe(LogicalDevice(device.index or 0))


def _num_processors(device: Any) -> int:
    if not isinstance(device, torch.device) or device.type != "cuda":
        return 1
    return int(torch.cuda.get_device_properties(device).multi_processor_count)

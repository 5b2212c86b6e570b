"""Attention by the FlashAttention packages, generations 2 to 4; none of them is imported before a layer needs it."""

from hardpoint_attention.flash.backend import FlashBackend, FlashSurroundings
from hardpoint_attention.flash.capabilities import InstalledKernels
from hardpoint_attention.flash.options import FlashOptions
from hardpoint_attention.flash.plugin import create

__all__ = ["FlashBackend", "FlashOptions", "FlashSurroundings", "InstalledKernels", "create"]

"""Which generations are installed, found without importing any of them, and the probe's answer."""

from __future__ import annotations

import importlib.util
from importlib import metadata
from importlib.machinery import ModuleSpec
from pathlib import Path

from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus
from hardpoint_attention.flash.capabilities import PACKAGES, InstalledKernels

__all__ = ["PACKAGES", "installed_kernels", "probe"]

PAGE_MULTIPLES = {2: 256}
"""The published kernels of generation 2 read pages of a multiple of 256 tokens only."""


def installed_kernels() -> InstalledKernels:
    """What this environment has. A package that shares its name with another generation is told by its files."""
    found: dict[int, str] = {}
    package = _spec("flash_attn")
    folders = [] if package is None else [Path(place) for place in package.submodule_search_locations or ()]
    if any((folder / "flash_attn_interface.py").exists() for folder in folders):
        version = _version("flash-attn") or ""
        if version.startswith("2."):
            found[2] = version
    if _spec("flash_attn_interface") is not None:
        found[3] = _version("flash-attn-3", "flash_attn_3") or "3"
    if any((folder / "cute" / "interface.py").exists() for folder in folders):
        found[4] = _version("flash-attn-4", "flash-attn-cute") or "4"
    return InstalledKernels(found, PAGE_MULTIPLES)


def probe() -> ProbeResult:
    """Available with the versions found, or absent with what to install."""
    versions = installed_kernels().versions
    if not versions:
        wanted = ", ".join(f"{name} (generation {number})" for number, name in PACKAGES.items())
        return ProbeResult(ProbeStatus.ABSENT, f"no FlashAttention kernels are installed; install one of {wanted}")
    said = ", ".join(f"{PACKAGES[number]} {version}" for number, version in sorted(versions.items()))
    return ProbeResult(ProbeStatus.AVAILABLE, said, {PACKAGES[number]: text for number, text in versions.items()})


def _spec(module: str) -> ModuleSpec | None:
    try:
        return importlib.util.find_spec(module)
    except ValueError:
        # The module is loaded but was never found through a finder.
        return None


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None

"""Whether the kernels can be used here, found out without importing Triton or touching a device."""

from __future__ import annotations

import importlib.util
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from hardpoint.errors import PluginError
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus

__all__ = ["device_types", "is_interpreted", "probe", "require_triton"]

_HOW_TO_INSTALL = "pip install 'hardpoint-triton-kernels[triton]', or a torch build for GPUs, which brings its own"
_COMPILED_FOR = frozenset({"cuda"})
"""The framework's name for devices of both vendors."""


def probe() -> ProbeResult:
    """Of every plugin in this distribution."""
    if importlib.util.find_spec("triton") is None:
        return ProbeResult(ProbeStatus.ABSENT, f"triton is not installed: {_HOW_TO_INSTALL}")
    try:
        found = version("triton")
    except PackageNotFoundError:
        found = "of unknown version"
    return ProbeResult(ProbeStatus.AVAILABLE, f"triton {found}")


def require_triton() -> None:
    """Raises ``PluginError`` where the probe finds none."""
    answer = probe()
    if answer.status is not ProbeStatus.AVAILABLE:
        raise PluginError(answer.reason)


def is_interpreted(kernel: Any) -> bool:
    """Whether ``kernel`` was defined under ``TRITON_INTERPRET=1`` and so runs on host memory, slowly."""
    return type(kernel).__name__ == "InterpretedFunction"


def device_types(kernel: Any) -> frozenset[str]:
    """Where ``kernel`` runs: on GPUs, or interpreted on the host as well."""
    return _COMPILED_FOR | {"cpu"} if is_interpreted(kernel) else _COMPILED_FOR

"""Devices that are only described: what ``--device "cuda sm_90 80GiB"`` stands for."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import DeviceDescription, LogicalDevice, Platform

__all__ = ["DescribedDevice", "FabricatingPlatform", "described_on", "parse_device"]

_FORM = 'PLATFORM [ARCHITECTURE] [FEATURE ...] [SIZE], such as "cuda sm_90 80GiB", "rocm gfx942 192GiB" or "cpu avx2"'
_SIZE = re.compile(r"(\d+(?:\.\d+)?)([KMGT])(i?)B", re.IGNORECASE)
_POWERS = {"K": 1, "M": 2, "G": 3, "T": 4}
_LARGEST = 1 << 60
_SIZE_LIKE = re.compile(r"\d.*b", re.IGNORECASE)
_WORD = re.compile(r"[A-Za-z][A-Za-z0-9_.+-]*")
_ARCHITECTURES = (
    # Digits as compilers write them: the last one, or the last two, are minor and stepping.
    (re.compile(r"sm_?(\d{1,3})(\d)[af]?"), "sm_ followed by the compute capability without its dot (sm_90 is 9.0)"),
    (re.compile(r"gfx(\d{1,3})([0-9a-f])[0-9a-f]"), "gfx followed by major, minor and stepping (gfx942 is 9.4)"),
)
_ARCHITECTURE_LIKE = re.compile(r"(sm_?|gfx)[0-9].*", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class DescribedDevice:
    """``platform`` is a plugin's name; ``description`` has no device type yet, which only the platform knows."""

    platform: str
    description: DeviceDescription


@runtime_checkable
class FabricatingPlatform(Protocol):
    """A platform whose decisions depend on what its devices are, and that can be asked about others."""

    def with_device(self, device: DeviceDescription, count: int) -> Platform:
        """A platform like this one on a host that has ``count`` such devices and no others.

        Of ``device`` the capability, the memory and the features (the architecture is among them) count; the
        platform's own :meth:`~hardpoint.interfaces.platform.Platform.describe` says the rest. Touches no device.
        """


def parse_device(text: str) -> DescribedDevice:
    """Raises ``ConfigError`` that says what is allowed."""
    words = text.split()
    if not words or not _WORD.fullmatch(words[0]):
        raise ConfigError(f"--device {text!r} names no platform; write {_FORM}")
    memory: int | None = None
    capability: tuple[int, int] | None = None
    features = []
    for word in words[1:]:
        if _SIZE_LIKE.fullmatch(word):
            if memory is not None:
                raise ConfigError(f"--device {text!r} has two sizes; write {_FORM}")
            memory = _bytes(word)
            continue
        if not _WORD.fullmatch(word):
            raise ConfigError(f"--device {text!r}: {word!r} is neither a feature nor a size; write {_FORM}")
        if _ARCHITECTURE_LIKE.fullmatch(word):
            if capability is not None:
                raise ConfigError(f"--device {text!r} has two architectures; write {_FORM}")
            capability = _capability(word)
        features.append(word)
    return DescribedDevice(
        words[0],
        DeviceDescription(
            device_type="",
            name=" ".join(words),
            capability=capability,
            memory_bytes=memory or 0,
            features=frozenset(features),
        ),
    )


def described_on(platform: Platform, device: DeviceDescription, count: int) -> tuple[Platform, DeviceDescription]:
    """``platform`` as if it had ``count`` such devices, and what it says of one under the name that it was given."""
    asked: object = platform
    if not isinstance(asked, FabricatingPlatform):
        return platform, msgspec.structs.replace(device, device_type=platform.device_type)
    made = asked.with_device(device, count)
    return made, msgspec.structs.replace(made.describe(LogicalDevice(0)), name=device.name)


def _bytes(word: str) -> int:
    found = _SIZE.fullmatch(word)
    size = 0.0
    if found is not None:
        size = float(found[1]) * (1024 if found[3] else 1000) ** _POWERS[found[2].upper()]
    if not 1 <= size <= _LARGEST:
        raise ConfigError(f"--device: {word!r} is no size of a memory; write 80GiB, 512MiB or 24GB")
    return int(size)


def _capability(word: str) -> tuple[int, int]:
    for pattern, _ in _ARCHITECTURES:
        found = pattern.fullmatch(word)
        if found is not None:
            return int(found[1]), int(found[2], 16)
    forms = " or ".join(form for _, form in _ARCHITECTURES)
    raise ConfigError(f"--device: {word!r} is no architecture; write {forms}")

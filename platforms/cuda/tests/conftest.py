"""A management library that answers from tables by the names and codes its documentation gives, and takes notes."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

GIB = 1 << 30
NOT_SUPPORTED, NOT_FOUND = 3, 6


class NvmlError(Exception):
    """As the package raises it: the code is in ``value``."""

    def __init__(self, value: int) -> None:
        super().__init__(f"code {value}")
        self.value = value


@dataclass
class Card:
    """One handle. ``parts`` are its partitions by place; None where a place is empty."""

    name: str = "NVIDIA H100 80GB HBM3"
    uuid: str = "GPU-11111111-2222"
    total: int = 80 * GIB
    free: int = 70 * GIB
    capability: tuple[int, int] = (9, 0)
    bus: str = "00000000:1B:00.0"
    minor: int = 0
    mode: int = 0
    processes: int = 0
    mig: bool | None = False
    parts: tuple[Card | None, ...] = ()
    lacks: frozenset[str] = frozenset()
    ancestors: dict[str, int] = field(default_factory=dict)
    peers: dict[str, tuple[int, ...]] = field(default_factory=dict)
    """By UUID of the other: which accesses (0 read, 1 write, 2 NVLink) are possible."""


class RecordingNvml:
    """``sessions`` counts how often it is open; ``init_fault`` and ``fault`` are codes to fail with."""

    NVMLError = NvmlError

    def __init__(self, *cards: Card, as_bytes: bool = False) -> None:
        self.cards, self.as_bytes = cards, as_bytes
        self.init_fault: int | None = None
        self.fault: int | None = None
        self.sessions = 0
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("nvml"):
            raise AttributeError(name)
        answer = getattr(_Answers(self), name)

        def call(*arguments: Any) -> Any:
            self.calls.append(name)
            assert self.sessions > 0, f"{name} was called outside a session"
            if self.fault is not None:
                raise NvmlError(self.fault)
            for card in arguments:
                if isinstance(card, Card) and name in card.lacks:
                    raise NvmlError(NOT_SUPPORTED)
            found = answer(*arguments)
            return found.encode() if self.as_bytes and isinstance(found, str) else found

        return call

    def nvmlInit(self) -> None:
        if self.init_fault is not None:
            raise NvmlError(self.init_fault)
        self.sessions += 1

    def nvmlShutdown(self) -> None:
        self.sessions -= 1


class _Answers:
    def __init__(self, library: RecordingNvml) -> None:
        self.library = library

    def nvmlDeviceGetCount(self) -> int:
        return len(self.library.cards)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Card:
        return self.library.cards[index]

    def nvmlSystemGetNVMLVersion(self) -> str:
        return "12.550.54"

    def nvmlSystemGetDriverVersion(self) -> str:
        return "550.54.14"

    def nvmlSystemGetCudaDriverVersion_v2(self) -> int:
        return 12040

    def nvmlDeviceGetName(self, card: Card) -> str:
        return card.name

    def nvmlDeviceGetUUID(self, card: Card) -> str:
        return card.uuid

    def nvmlDeviceGetCudaComputeCapability(self, card: Card) -> tuple[int, int]:
        return card.capability

    def nvmlDeviceGetPciInfo(self, card: Card) -> Any:
        bus = card.bus.encode() if self.library.as_bytes else card.bus
        return SimpleNamespace(busId=bus)

    def nvmlDeviceGetMinorNumber(self, card: Card) -> int:
        return card.minor

    def nvmlDeviceGetComputeMode(self, card: Card) -> int:
        return card.mode

    def nvmlDeviceGetComputeRunningProcesses(self, card: Card) -> list[object]:
        return [object()] * card.processes

    def nvmlDeviceGetMemoryInfo(self, card: Card) -> Any:
        return SimpleNamespace(total=card.total, free=card.free, used=card.total - card.free - GIB)

    def nvmlDeviceGetMigMode(self, card: Card) -> list[int]:
        if card.mig is None:
            raise NvmlError(NOT_SUPPORTED)
        return [int(card.mig), int(card.mig)]

    def nvmlDeviceGetMaxMigDeviceCount(self, card: Card) -> int:
        return len(card.parts)

    def nvmlDeviceGetMigDeviceHandleByIndex(self, card: Card, place: int) -> Card:
        part = card.parts[place]
        if part is None:
            raise NvmlError(NOT_FOUND)
        return part

    def nvmlDeviceGetTopologyCommonAncestor(self, first: Card, second: Card) -> int:
        return first.ancestors[second.uuid]

    def nvmlDeviceGetP2PStatus(self, first: Card, second: Card, what: int) -> int:
        return 0 if what in first.peers.get(second.uuid, ()) else 5


@pytest.fixture
def two_cards() -> RecordingNvml:
    """Two equal devices behind a switch of their own, joined by NVLink."""
    first = Card(uuid="GPU-aaaa-1", bus="00000000:1B:00.0", minor=0)
    second = Card(uuid="GPU-bbbb-2", bus="00000000:2C:00.0", minor=3)
    first.ancestors, first.peers = {second.uuid: 30}, {second.uuid: (0, 1, 2)}
    return RecordingNvml(first, second)


@pytest.fixture
def divided() -> RecordingNvml:
    """A device in two partitions with an empty place between them, and a whole one behind it."""
    parts = tuple(
        Card(name=f"NVIDIA A100 MIG {size}g", uuid=f"MIG-{size}", total=size * 10 * GIB, free=size * 10 * GIB, mig=None)
        for size in (3, 2)
    )
    whole = Card(name="NVIDIA A100", uuid="GPU-a", capability=(8, 0), mig=True, parts=(parts[0], None, parts[1]))
    return RecordingNvml(whole, Card(name="NVIDIA A100", uuid="GPU-b", capability=(8, 0), minor=1))

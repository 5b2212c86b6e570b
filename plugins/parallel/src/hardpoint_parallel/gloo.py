"""The communicator ``gloo``: ranks on processors, over TCP."""

from __future__ import annotations

from datetime import timedelta
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, Field
from torch.distributed import ProcessGroupGloo

from hardpoint.errors import ConfigError
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_parallel.process_group import ProcessGroupCommunicator
from hardpoint_parallel.rendezvous import GroupPlace, meet

__all__ = ["GlooOptions", "create"]

_LOOPBACK = "127.0.0.1"
_LOCAL_HOSTS = ("localhost", _LOOPBACK, "::1")
_LONGEST_S = 1_000_000.0
"""The framework counts milliseconds in 32 bits."""


class GlooOptions(BaseModel):
    """Options under ``plugins.communicator.gloo``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(
        default=300.0,
        gt=0,
        le=_LONGEST_S,
        description="seconds after which a collective that some rank does not join fails",
    )
    meeting_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=_LONGEST_S,
        description="seconds that a rank waits at the start for the others to appear",
    )
    interface: str | None = Field(
        default=None,
        description="network interface for connections between ranks; by default loopback where ranks meet at a file "
        "or at a local address, else the one of the host's name",
    )


@plugin("communicator", options=GlooOptions)
def create(ctx: WorkerContext, options: GlooOptions) -> ProcessGroupCommunicator:
    """Waits until every rank of the group is there.

    Raises ``ConfigError`` for a context without configuration, a missing address, an unknown interface, and when ranks
    stay away.
    """
    if ctx.config is None:
        raise ConfigError("communicator 'gloo' was created without a worker configuration in its context")
    parallel = ctx.config.parallel
    place = GroupPlace.of(parallel)
    store = meet(parallel, options.meeting_timeout_s)
    settings = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    settings._timeout = timedelta(seconds=options.meeting_timeout_s)
    settings._devices = [_device(options.interface, parallel.init_method or "")]
    settings._threads = 1
    try:
        group = ProcessGroupGloo(store, place.rank, place.size, settings)
    except RuntimeError as error:
        raise ConfigError(
            f"rank {place.rank} of {place.label} has not found the others within {options.meeting_timeout_s:g} s: "
            f"{error}; see why they did not start, or raise plugins.communicator.gloo.meeting_timeout_s"
        ) from error
    group._set_default_timeout(timedelta(seconds=options.timeout_s))
    advice = f"a rank ended, or was slower than plugins.communicator.gloo.timeout_s ({options.timeout_s:g} s)"
    return ProcessGroupCommunicator(group, place, advice)


def _device(interface: str | None, address: str) -> ProcessGroupGloo.Device:
    """Ranks of one host talk over loopback, where nobody else can listen or connect."""
    try:
        if interface is not None:
            return ProcessGroupGloo.create_device(interface=interface)
        parts = urlsplit(address)
        if parts.scheme == "file" or parts.hostname in _LOCAL_HOSTS:
            return ProcessGroupGloo.create_device(hostname=_LOOPBACK)
        return ProcessGroupGloo.create_default_device()
    except RuntimeError as error:
        raise ConfigError(
            f"no connections between ranks over interface {interface!r}: {error}; set "
            "plugins.communicator.gloo.interface to one of this host's"
        ) from error

"""Streams and events of a device, as far as asynchronous output needs them. Nothing else talks to a device's queues.

The *main* stream is the one that forwards run on. On the CPU work is done when it is submitted, and nothing waits.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

from hardpoint_torch_runtime.runner.buffers import is_host_memory

__all__ = ["CopyStream", "DeviceEvent", "DeviceStreams", "ImmediateStreams", "StreamPlatform", "device_streams"]


class DeviceEvent(Protocol):
    """A place in a stream's order of work."""

    def synchronize(self) -> None:
        """Wait until everything before it is done; a blocking event lets the thread sleep meanwhile."""

    def query(self) -> bool:
        """Whether everything before it is done, without waiting."""


class CopyStream(Protocol):
    """A stream of its own for copies to the host."""

    def wait_for_main(self) -> None:
        """What is submitted here from now on starts after everything that was submitted to the main stream so far."""

    def copy_to_host(self, source: torch.Tensor) -> torch.Tensor:
        """Submit a copy. Its contents are defined once an event recorded afterwards is done, and only if ``source`` is
        kept until then."""

    def record_event(self, *, blocking: bool) -> DeviceEvent: ...


class DeviceStreams(Protocol):
    """What a device offers."""

    def create_copy_stream(self) -> CopyStream: ...

    def record_main(self) -> DeviceEvent:
        """A blocking event behind everything that was submitted to the main stream so far."""


@runtime_checkable
class StreamPlatform(Protocol):
    """A platform that brings streams of its own."""

    def create_device_streams(self, device: torch.device) -> DeviceStreams: ...


def device_streams(platform: object, device: torch.device) -> DeviceStreams:
    """The platform's streams, or those of the framework's module for the device."""
    if isinstance(platform, StreamPlatform):
        return platform.create_device_streams(device)
    return ImmediateStreams() if is_host_memory(device) else _ModuleStreams(device)


class _Done:
    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True


class ImmediateStreams:
    """For devices whose work is done when it is submitted; also their copy stream."""

    def create_copy_stream(self) -> ImmediateStreams:
        return self

    def record_main(self) -> DeviceEvent:
        return _Done()

    def wait_for_main(self) -> None: ...

    def copy_to_host(self, source: torch.Tensor) -> torch.Tensor:
        return source.clone()

    def record_event(self, *, blocking: bool) -> DeviceEvent:
        del blocking
        return _Done()


class _ModuleStreams:
    """Over ``torch.<device type>``: streams and events have the same names in all of these modules."""

    def __init__(self, device: torch.device) -> None:
        self._module: Any = torch.get_device_module(device)
        self._device = device

    def create_copy_stream(self) -> CopyStream:
        return _ModuleCopyStream(self._module, self._device)

    def record_main(self) -> DeviceEvent:
        event: DeviceEvent = self._module.current_stream(self._device).record_event(self._module.Event(blocking=True))
        return event


class _ModuleCopyStream:
    def __init__(self, module: Any, device: torch.device) -> None:
        self._module, self._device = module, device
        self._stream: Any = module.Stream(device)

    def wait_for_main(self) -> None:
        self._stream.wait_stream(self._module.current_stream(self._device))

    def copy_to_host(self, source: torch.Tensor) -> torch.Tensor:
        host = torch.empty(source.shape, dtype=source.dtype, pin_memory=True)
        with self._module.stream(self._stream):
            host.copy_(source, non_blocking=True)
        return host

    def record_event(self, *, blocking: bool) -> DeviceEvent:
        event: DeviceEvent = self._stream.record_event(self._module.Event(blocking=blocking))
        return event

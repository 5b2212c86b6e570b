"""Device ids. One device has three numbers, each a type of its own, so that a mix-up fails type checking:

- logical: the local rank, an index into the list of devices this instance was assigned;
- visible: the ordinal the device runtime gives it after masking by the visibility variable;
- physical: the id that topology and management interfaces use, whatever is masked.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import NewType

from hardpoint.errors import ConfigError

LogicalDevice = NewType("LogicalDevice", int)
VisibleDevice = NewType("VisibleDevice", int)
PhysicalDevice = NewType("PhysicalDevice", int)

# One for all maps: a map with a lock inside could be neither copied nor sent.
_ASSIGNING = threading.Lock()


class DeviceMap:
    """Translates between the three numbers.

    ``variable`` is the platform's visibility variable (empty: it has none) and is read from ``environment`` once, here;
    an empty value counts as unset, since launchers of processes without devices set it so. ``resolver`` turns items of
    the variable that are no numbers (such as UUIDs) into physical ids; it raises ``ValueError`` or ``LookupError`` for
    those it does not know. ``assigned`` lists this instance's devices by local rank; None while nobody assigned any.
    """

    def __init__(
        self,
        variable: str,
        environment: Mapping[str, str],
        assigned: Sequence[PhysicalDevice] | None = None,
        resolver: Callable[[str], int] | None = None,
    ) -> None:
        self.variable = variable
        self.assigned: tuple[PhysicalDevice, ...] | None = None
        self._value = environment.get(variable, "").strip()
        self._resolver = resolver
        if assigned is not None:
            self.set_assigned(assigned)

    def set_assigned(self, devices: Sequence[PhysicalDevice]) -> None:
        """Fix the assignment. The same list again changes nothing.

        Raises ``RuntimeError`` for another one, since ranks may already use their devices, and ``ConfigError`` for a
        list in which a device occurs twice or is negative. Threads may call this at once: one list wins.
        """
        wanted = tuple(devices)
        _check_distinct(wanted, f"the assigned devices {list(wanted)}")
        with _ASSIGNING:
            if self.assigned not in (None, wanted):
                raise RuntimeError(f"devices {list(self.assigned or ())} are assigned; {list(wanted)} came too late")
            self.assigned = wanted

    def logical_to_physical(self, device: LogicalDevice) -> PhysicalDevice:
        """The ``device``-th assigned device, else the ``device``-th visible one, else the number itself.

        Raises ``ConfigError`` for an index out of range or a visibility variable that cannot be understood.
        """
        # Numbers in the variable are physical, like assigned ones.
        known = self._visible() if self.assigned is None else self.assigned
        if device < 0 or (known is not None and device >= len(known)):
            raise ConfigError(f"logical device {device} does not exist; devices: {self._origin()}")
        return PhysicalDevice(device) if known is None else known[device]

    def physical_to_visible(self, device: PhysicalDevice) -> VisibleDevice:
        """The ordinal of ``device`` in the visibility variable; the id itself where the variable is unset.

        Raises ``RuntimeError`` for a device that is masked, ``ConfigError`` for a variable that cannot be understood.
        """
        visible = self._visible()
        if visible is not None and device not in visible:
            raise RuntimeError(f"physical device {device} is not visible to this process; devices: {self._origin()}")
        return VisibleDevice(device if visible is None else visible.index(device))

    def logical_to_visible(self, device: LogicalDevice) -> VisibleDevice:
        """What the device runtime calls the logical ``device``. Raises as the two steps do."""
        return self.physical_to_visible(self.logical_to_physical(device))

    def _visible(self) -> tuple[PhysicalDevice, ...] | None:
        if not self._value:
            return None
        devices = tuple(PhysicalDevice(self._physical(item.strip())) for item in self._value.split(","))
        _check_distinct(devices, f"{self.variable}={self._value!r}")
        return devices

    def _physical(self, item: str) -> int:
        try:
            return int(item) if item.isdecimal() or self._resolver is None else self._resolver(item)
        except (ValueError, LookupError) as error:
            fault = f"{self.variable}={self._value!r}: {item!r} is no known device ({error})"
            raise ConfigError(f"{fault}; list device numbers from 0 on") from error

    def _origin(self) -> str:
        masked = f"{self.variable}={self._value!r}" if self._value else f"{self.variable or 'visibility'} is unset"
        return masked if self.assigned is None else f"{list(self.assigned)} are assigned, {masked}"


def _check_distinct(devices: tuple[PhysicalDevice, ...], origin: str) -> None:
    if len(set(devices)) < len(devices) or any(device < 0 for device in devices):
        raise ConfigError(f"{origin}: name each device once, by a number from 0 on")

"""Plugin kind ``custom_op``: operators that a distribution adds to the tensor framework.

The factory takes a ``WorkerContext`` and returns :class:`CustomOps`; it registers nothing itself. The worker registers
the operators under the namespace of the plugin's distribution before the model is created, once per process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.interfaces.plugin import ProbeResult

ANY_DEVICE = "any"


@dataclass(frozen=True, slots=True)
class CustomOperator:
    """One operator, called as ``<namespace>::<name>``. It computes without gradients.

    Attributes:
        name: a lower-case identifier, unique within the namespace.
        implementations: callables by device type (``cpu``, ``cuda``); :data:`ANY_DEVICE` serves all others. They may
            not return an argument or a view of one (R10.40): results are new tensors, or written to ``mutates``.
        fake: takes the same arguments and returns empty tensors that agree with the real outputs in number, shape,
            dtype, device and stride (R10.32). It reads no data.
        samples: argument tuples on a device type, of several sizes, on which the kit compares the real operator with
            its fake.
        schema: such as ``(Tensor x, Tensor(a!) out, float eps=1e-6) -> ()``; None: from the annotations of the first
            implementation.
        mutates: names of the arguments that are written to; must be all of them and no others.
        probe: whether the native part is there. Absent: the operator exists by name and says so when called; broken:
            the start stops.
    """

    name: str
    implementations: Mapping[str, Callable[..., Any]]
    fake: Callable[..., Any]
    samples: Callable[[str], Iterable[tuple[Any, ...]]]
    schema: str | None = None
    mutates: tuple[str, ...] = ()
    probe: Callable[[], ProbeResult] | None = None


@dataclass(frozen=True, slots=True)
class CustomOps:
    """What the factory returns.

    ``namespace`` None: the distribution's name with underscores (``acme-kernels``: ``acme_kernels``); one that is given
    must begin with that, so that no distribution takes another's.
    """

    operators: tuple[CustomOperator, ...]
    namespace: str | None = None

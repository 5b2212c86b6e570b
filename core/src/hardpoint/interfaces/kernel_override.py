"""Plugin kind ``kernel_override``: another kernel at a seam that the worker declares.

The factory takes a ``WorkerContext`` and returns a :class:`KernelOverride`. Overrides are never found by installation:
an operator names one per seam. The seams, their signatures and shapes are the worker's; its documentation lists them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class KernelCase:
    """What a seam will be used with for the worker's whole life. ``dtype`` is the compute dtype by name.

    ``batch_invariant``: a row's result may not depend on its neighbors.
    """

    seam: str
    device_type: str
    dtype: str
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class KernelOverride:
    """What the factory returns.

    Attributes:
        seam: name of the seam that is replaced.
        function: takes the seam's parameters, by the same names in the same order, and keeps its contract, including
            what is written in place. Called with any number of tokens, 0 included, unless the seam says otherwise.
        device_types: such as ``cpu``; other devices are refused.
        dtypes: compute dtypes by name, such as ``bfloat16``; others are refused.
        refuse: a further reason against a case, or None; a pure function of its argument.
        is_batch_invariant: whether it may be used where batch invariance is asked for.
    """

    seam: str
    function: Callable[..., Any]
    device_types: frozenset[str]
    dtypes: frozenset[str]
    refuse: Callable[[KernelCase], str | None] | None = None
    is_batch_invariant: bool = False

    def refusal(self, case: KernelCase) -> str | None:
        """Why this override does not serve ``case``, or None."""
        if case.seam != self.seam:
            return f"it replaces the seam {self.seam!r}, not {case.seam!r}"
        if case.device_type not in self.device_types:
            return f"it runs on {', '.join(sorted(self.device_types)) or 'no device'}, not on {case.device_type}"
        if case.dtype not in self.dtypes:
            return f"it computes {', '.join(sorted(self.dtypes)) or 'no dtype'}, not {case.dtype}"
        if case.batch_invariant and not self.is_batch_invariant:
            return "batch invariance is asked for, and it does not declare it"
        return self.refuse(case) if self.refuse is not None else None

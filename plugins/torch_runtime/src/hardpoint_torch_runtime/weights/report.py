"""What loading found, and the one error it ends in when the files and the model do not fit."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact

__all__ = ["PartialModel", "Problems", "WeightReport"]

MAX_LISTED = 8


@dataclass(frozen=True, slots=True)
class WeightReport:
    """Outcome of a successful load. ``num_bytes`` counts stored bytes that went into this rank's parameters;
    what a stack holds is counted one by one."""

    num_tensors: int
    num_bytes: int
    seconds: float
    ignored: tuple[str, ...]


@runtime_checkable
class PartialModel(Protocol):
    """A pipeline stage: some stored tensors belong to other stages."""

    def holds(self, parameter: str) -> bool:
        """False for parameters that the whole model has but this stage leaves to another."""


@dataclass(slots=True)
class Problems:
    """Collected while loading, so that one message tells everything that is wrong."""

    missing: Sequence[str] = ()
    unexpected: Sequence[str] = ()
    ill_shaped: Sequence[str] = ()
    without_rule: Sequence[str] = ()
    ill_typed: Sequence[str] = ()

    def raise_if_any(self, artifact: ModelArtifact) -> None:
        """Raise ``ModelFormatError`` naming the artifact and every kind of problem."""
        parts = [
            _listed("missing", self.missing),
            _listed("unexpected", self.unexpected),
            _listed("with a shape the configuration does not allow", self.ill_shaped),
            _listed("of whole numbers where the model computes with fractions (quantized?)", self.ill_typed),
            _listed("parameters without a weight rule in the model plugin:", self.without_rule, noun=""),
        ]
        found = [part for part in parts if part]
        if found:
            raise ModelFormatError(
                f"the weights of {artifact.name!r} in {artifact.root} ({', '.join(artifact.files[:3])}"
                f"{', …' if len(artifact.files) > 3 else ''}) do not fit the model: {'; '.join(found)}. "
                "Check that config and weights belong together and that no file of the model is left out"
            )


def _listed(what: str, names: Sequence[str], noun: str = "tensors ") -> str:
    if not names:
        return ""
    rest = f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else ""
    return f"{len(names)} {noun}{what} {', '.join(names[:MAX_LISTED])}{rest}"

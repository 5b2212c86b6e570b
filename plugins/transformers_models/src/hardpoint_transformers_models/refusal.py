"""What every refusal of this plugin says."""

from __future__ import annotations

from hardpoint.errors import UnsupportedModelError

__all__ = ["OWN_ATTENTION", "first_sentence", "reason_of", "refusal", "told"]

OWN_ATTENTION = "its attention is its own code, not a function that can be replaced"
MAX_TOLD = 300
_BEGINNING = " cannot be run by transformers here: "
_ADVICE = "; to run it, install a distribution that provides the entry point hardpoint.model.v1:"


def refusal(architecture: str, reason: str) -> UnsupportedModelError:
    """To be raised for a model that must not run this way; ``reason`` goes on after a colon."""
    return UnsupportedModelError(f"{architecture}{_BEGINNING}{reason}{_ADVICE}{architecture}")


def reason_of(error: UnsupportedModelError) -> str:
    """What :func:`refusal` was given, if the ``error`` is one of its own; otherwise all that it says."""
    return str(error).partition(_BEGINNING)[2].partition(_ADVICE)[0] or str(error)


def told(error: Exception) -> str:
    """What the library says, in one line: it shows whole values, on lines of their own."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return said if len(said) <= MAX_TOLD else f"{said[:MAX_TOLD]}..."


def first_sentence(error: Exception) -> str:
    """What went wrong, without the advice to programmers that torch appends."""
    return told(error).partition(". ")[0].rstrip(".")

"""What every refusal of this plugin begins with."""

from __future__ import annotations

from hardpoint.errors import UnsupportedModelError

__all__ = ["refusal", "told"]

MAX_TOLD = 300


def refusal(architecture: str, reason: str) -> UnsupportedModelError:
    """To be raised for a model that must not run this way; ``reason`` goes on after a colon."""
    return UnsupportedModelError(f"{architecture} cannot be run by transformers here: {reason}")


def told(error: Exception) -> str:
    """What the library says, in one line: it shows whole values, on lines of their own."""
    said = f"{type(error).__name__}: {' '.join(str(error).split())}"
    return said if len(said) <= MAX_TOLD else f"{said[:MAX_TOLD]}..."

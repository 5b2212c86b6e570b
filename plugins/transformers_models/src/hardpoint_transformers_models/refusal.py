"""What every refusal of this plugin begins with."""

from __future__ import annotations

from hardpoint.errors import UnsupportedModelError

__all__ = ["refusal"]


def refusal(architecture: str, reason: str) -> UnsupportedModelError:
    """To be raised for a model that must not run this way; ``reason`` goes on after a colon."""
    return UnsupportedModelError(f"{architecture} cannot be run by transformers here: {reason}")

"""The core's version, importable without the package's public face."""

from __future__ import annotations

__version__ = "0.1.0"

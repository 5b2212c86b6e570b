"""Hardpoint: a plugin-first LLM inference platform."""

from hardpoint.version import __version__ as __version__

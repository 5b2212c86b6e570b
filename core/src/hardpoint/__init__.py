"""Hardpoint: a plugin-first LLM inference platform."""

__version__ = "0.1.0"

"""Attention backends for Hardpoint."""

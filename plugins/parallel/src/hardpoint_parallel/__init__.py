"""Collectives between the ranks of a model for Hardpoint."""

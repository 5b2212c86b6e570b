"""Torch part of the Hardpoint conformance kit."""

"""Benchmark command for Hardpoint."""

"""CUDA platform for Hardpoint."""

"""Kernels and models on a graphics processor: are they right, and how far from what the device can do.

``python -m hardpoint_testing_torch.gpu_bench`` measures the device at hand; ``make bench-gpu`` writes the page as well.
"""

"""Attention in Triton for GPUs of any vendor: one paged kernel for prefills and decodes of a mixed batch.

Nothing here imports Triton until a layer computes, so the plugin can be listed and asked where it is not installed.
"""

from hardpoint_attention.triton.backend import TritonBackend, TritonOptions, create
from hardpoint_attention.triton.impl import TritonImpl
from hardpoint_attention.triton.metadata import TritonMetadata, TritonMetadataBuilder

__all__ = ["TritonBackend", "TritonImpl", "TritonMetadata", "TritonMetadataBuilder", "TritonOptions", "create"]

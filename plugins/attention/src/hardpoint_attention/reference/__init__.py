"""Attention in plain torch over the block table: the backend every device can run, and the yardstick for kernels."""

from hardpoint_attention.reference.backend import ReferenceBackend, ReferenceOptions, create
from hardpoint_attention.reference.impl import ReferenceImpl
from hardpoint_attention.reference.metadata import ReferenceMetadata, ReferenceMetadataBuilder

__all__ = [
    "ReferenceBackend",
    "ReferenceImpl",
    "ReferenceMetadata",
    "ReferenceMetadataBuilder",
    "ReferenceOptions",
    "create",
]

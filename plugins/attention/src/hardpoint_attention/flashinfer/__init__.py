"""Attention by the FlashInfer package, which is not imported before the first step is planned."""

from hardpoint_attention.flashinfer.backend import FlashInferBackend, FlashInferOptions, create

__all__ = ["FlashInferBackend", "FlashInferOptions", "create"]

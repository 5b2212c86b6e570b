"""What FlashInfer can compute where: a pure function of a need. It neither touches a device nor imports the package."""

from __future__ import annotations

from hardpoint.interfaces.attention import AttentionKind, AttentionNeed, BlockSizeRule

__all__ = ["BLOCK_SIZES", "KINDS", "refuse"]

ACTIVATION_DTYPES = ("float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "fp8", "fp8_e5m2")
HEAD_SIZES = (64, 128, 256)
BLOCK_SIZES = BlockSizeRule(exact=(16, 32, 64))
KINDS = (AttentionKind.DECODER, AttentionKind.ENCODER, AttentionKind.ENCODER_ONLY, AttentionKind.ENCODER_DECODER)


def refuse(need: AttentionNeed) -> str | None:
    """Reason why FlashInfer cannot serve ``need``, or None."""
    return _device_fault(need) or _dtype_fault(need) or _shape_fault(need) or _feature_fault(need)


def _device_fault(need: AttentionNeed) -> str | None:
    device = need.device
    if device.device_type != "cuda" or device.capability is None:
        return f"FlashInfer needs a CUDA device, not {device.device_type}"
    if "rocm" in device.features:  # which the framework calls by CUDA's name
        return f"FlashInfer needs a CUDA device, and {device.name} is one of ROCm"
    if device.capability < (8, 0):
        return f"compute capability {device.capability[0]}.{device.capability[1]} is below 8.0"
    return None


def _dtype_fault(need: AttentionNeed) -> str | None:
    if need.dtype not in ACTIVATION_DTYPES:
        return f"dtype {need.dtype} is not one of {', '.join(ACTIVATION_DTYPES)}"
    stored = need.kv_cache_dtype
    if stored in FP8_DTYPES:
        capability = need.device.capability
        is_old = capability is not None and capability < (8, 9)
        return "an 8-bit cache needs compute capability 8.9" if is_old else None
    if stored not in ("auto", need.dtype):
        return f"KV cache dtype {stored} is not one of auto, {need.dtype}, {', '.join(FP8_DTYPES)}"
    return None


def _shape_fault(need: AttentionNeed) -> str | None:
    if need.num_kv_heads < 1 or need.num_heads % need.num_kv_heads:
        return f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} key/value heads"
    if need.head_size not in HEAD_SIZES:
        return f"head size {need.head_size} is not one of {', '.join(map(str, HEAD_SIZES))}"
    size = need.block_size
    if size is not None and not any(size % page == 0 for page in BLOCK_SIZES.exact):
        return f"blocks of {size} tokens cannot be read in pages of {BLOCK_SIZES}; set --block-size accordingly"
    return None


def _feature_fault(need: AttentionNeed) -> str | None:
    is_decoder = need.kind is AttentionKind.DECODER
    faults = (
        (need.uses_mla, "latent attention (MLA) has wrappers of its own"),
        (need.uses_sparse, "sparse attention has wrappers of its own"),
        (need.uses_alibi, "it takes no ALiBi slopes, only ones of its own"),
        (need.chunk_size is not None, "it has no chunked local attention"),
        (need.keeps_prompt, "it keeps no prompts beyond a window"),
        (need.uses_mm_prefix, "masks of multimodal prefixes would have to be laid out for each step"),
        (need.uses_row_causality, "causality is one for all rows of a call"),
        (need.sliding_window is not None and not is_decoder, "its windows look back only, an encoder's both ways"),
        (need.dcp_size > 1, "it reads no cache that is dealt out among ranks"),
    )
    return next((text for is_fault, text in faults if is_fault), None)

"""Capability answers of the Triton backend: pure functions of a need."""

from __future__ import annotations

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import AttentionKind, AttentionNeed, BlockSizeRule
from hardpoint.interfaces.kv_dtypes import KVQuantization, KVStorage, kv_storage

__all__ = ["BLOCK_SIZES", "COMPUTE_DTYPES", "KINDS", "MAX_HEAD_SIZE", "MAX_LATENT_SIZE", "refuse"]

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
FLOAT8_DTYPES = ("float8_e4m3fn", "float8_e5m2")
KINDS = tuple(AttentionKind)
BLOCK_SIZES = BlockSizeRule(multiple_of=1)
MAX_HEAD_SIZE = 256
MAX_LATENT_SIZE = 640
CACHELESS = (AttentionKind.ENCODER, AttentionKind.ENCODER_ONLY)


def refuse(need: AttentionNeed, *, is_interpreted: bool) -> str | None:
    """Reason why the kernels cannot serve ``need``, or None. ``is_interpreted``: they run on the CPU."""
    return _refuse_device(need, is_interpreted) or _refuse_storage(need) or _refuse_shape(need) or _refuse_masks(need)


def _refuse_device(need: AttentionNeed, is_interpreted: bool) -> str | None:
    device = need.device
    if device.device_type == "cpu":
        if is_interpreted:
            return None
        return "Triton has no compiler for the CPU; set TRITON_INTERPRET=1 to run its kernels by interpreter, slowly"
    if device.device_type not in ("cuda", "rocm", "hip"):
        return f"Triton's kernels are compiled for CUDA and ROCm devices, not for {device.device_type}"
    if device.device_type == "cuda" and device.capability is not None and device.capability < (8, 0):
        major, minor = device.capability
        return f"its kernels need compute capability 8.0, {device.name} has {major}.{minor}"
    return None


def _refuse_storage(need: AttentionNeed) -> str | None:
    if need.dtype not in COMPUTE_DTYPES:
        return f"dtype {need.dtype} is not one of {', '.join(COMPUTE_DTYPES)}"
    if need.kv_cache_dtype == "auto" or need.kind in CACHELESS:
        return None
    try:
        storage = kv_storage(need.kv_cache_dtype)
    except ConfigError as error:
        return str(error)
    if storage.quantization is KVQuantization.NONE and storage.dtype in COMPUTE_DTYPES:
        return None
    return _refuse_quantized(need, storage)


def _refuse_quantized(need: AttentionNeed, storage: KVStorage) -> str | None:
    # The elements decide: the plain name of an 8-bit float means one scale per tensor as well. Devices without the type
    # take its codes apart.
    if storage.dtype in FLOAT8_DTYPES and storage.quantization is not KVQuantization.PER_TOKEN_HEAD:
        return None
    if storage.dtype == "int8" and storage.quantization is KVQuantization.PER_TOKEN_HEAD:
        if need.uses_mla:
            return f"latents (MLA) have no place for the scales of KV cache dtype {need.kv_cache_dtype}"
        if need.head_size % 2:
            return f"with KV cache dtype {need.kv_cache_dtype}, scales would not be aligned behind heads of odd size"
        return None
    return f"KV cache dtype {need.kv_cache_dtype} is none of {', '.join(COMPUTE_DTYPES)}, fp8, int8_per_token_head"


def _refuse_shape(need: AttentionNeed) -> str | None:
    if need.num_kv_heads < 1 or need.num_heads % need.num_kv_heads:
        return f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} key/value heads"
    limit = MAX_LATENT_SIZE if need.uses_mla else MAX_HEAD_SIZE
    if not 1 <= need.head_size <= limit:
        return f"head size {need.head_size} is above {limit}, beyond which a block's tiles find no room"
    if need.uses_mla and need.num_kv_heads != 1:
        return f"latent attention (MLA) has one latent that all heads share, not {need.num_kv_heads}"
    if need.uses_mla and need.kind is not AttentionKind.DECODER:
        return f"latent attention (MLA) reads a cache, which attention kind {need.kind.value} has not"
    return None


def _refuse_masks(need: AttentionNeed) -> str | None:
    """Windows, chunks, ranges and the like are one predicate, so that any of them go together, with few exceptions."""
    if need.kind is AttentionKind.ENCODER_DECODER and (need.sliding_window or need.chunk_size or need.uses_alibi):
        return "queries of cross-attention have no place among its keys that windows, chunks or ALiBi could count from"
    if need.kind is AttentionKind.ENCODER_DECODER and need.uses_row_causality:
        return "queries of cross-attention see all keys, so that rows cannot differ in causality"
    if need.keeps_prompt and need.sliding_window is None:
        return "keeping the prompt means beside a sliding window; there is none"
    if need.keeps_prompt and need.kind is not AttentionKind.DECODER:
        return f"keeping the prompt beside a window is for decoders, not for attention kind {need.kind.value}"
    if need.keeps_prompt and need.chunk_size is not None:
        return "a prompt that stays visible (keeps_prompt) contradicts attention in chunks (chunk_size)"
    return None

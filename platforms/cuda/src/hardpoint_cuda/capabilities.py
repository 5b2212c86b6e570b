"""What a compute capability means: pure functions of it, so that every decision can be tested without a device."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["attention_priorities", "features", "least_block_size", "supported_quantization"]

Capability = tuple[int, int]

_FLASH, _FLASHINFER, _TRITON, _REFERENCE = "flash_attn", "flashinfer", "triton", "torch_reference"
_OLDEST_TENSOR_KERNELS: Capability = (8, 0)
_OLDEST_COMPILED: Capability = (7, 0)

_FEATURES: Sequence[tuple[Capability, str]] = (
    ((7, 0), "tensor_cores"),
    ((8, 0), "bf16"),
    ((8, 0), "async_copy"),
    ((8, 9), "fp8"),
    ((9, 0), "tma"),
    ((10, 0), "fp4"),
)
_QUANTIZATION: Sequence[tuple[Capability, tuple[str, ...]]] = (
    ((0, 0), ("gguf", "int8", "int4")),
    ((8, 0), ("awq", "gptq", "compressed-tensors")),
    ((8, 9), ("fp8",)),
)


def attention_priorities(capability: Capability | None) -> tuple[str, ...]:
    """Attention backends to try, the best first; None stands for a device that cannot be asked.

    - 10.x: FlashInfer carries the generation's own kernels for plain attention.
    - 9.x and 8.x: FlashAttention leads (its third generation on 9.0).
    - older: its packages do not run there, and Triton compiles from 7.0 on.
    - 12.x has tensor cores of 8.x's kind with less shared memory than 10.x, and takes 8.x's order.

    Every list ends with the reference, which needs nothing but the framework. What a layer asks for beside the device
    changes no order: backends refuse what they cannot do, as all before Triton do latent attention (MLA).
    """
    if capability is None or capability < _OLDEST_COMPILED:
        return (_TRITON, _REFERENCE) if capability is None else (_REFERENCE,)
    if capability < _OLDEST_TENSOR_KERNELS:
        return (_TRITON, _REFERENCE)
    if capability[0] in (10, 11):
        return (_FLASHINFER, _TRITON, _FLASH, _REFERENCE)
    return (_FLASH, _FLASHINFER, _TRITON, _REFERENCE)


def least_block_size(capability: Capability | None, kv_cache_dtype: str) -> int:
    """Tokens of a KV block below which the backends that lead on the device refuse; 1: they take any.

    An 8-bit cache is read on 9.0 in pages of exactly 64 tokens, which larger blocks can be divided into.
    """
    is_hopper = capability is not None and capability[0] == 9
    return 64 if is_hopper and kv_cache_dtype.startswith(("fp8", "float8")) else 1


def features(capability: Capability | None) -> frozenset[str]:
    """What kernels may ask for: the maker's name, the architecture, and abilities that came with a generation."""
    if capability is None:
        return frozenset({"cuda"})
    abilities = {name for since, name in _FEATURES if capability >= since}
    if capability == (9, 0):
        abilities.add("wgmma")
    return frozenset({"cuda", f"sm_{capability[0]}{capability[1]}", *abilities})


def supported_quantization(capability: Capability | None) -> tuple[str, ...]:
    """Names of ``quantization`` plugins that may be used; empty, which means any, where the device is unknown."""
    if capability is None:
        return ()
    return tuple(name for since, names in _QUANTIZATION if capability >= since for name in names)

"""What FlashAttention can compute where: pure functions of a need, a device description and the installed generations.

A *generation* is a family of kernels with an interface of its own: 2 (``flash_attn``, from compute capability 8.0),
3 (``flash_attn_interface``, Hopper) and 4 (``flash_attn.cute``, Hopper and Blackwell). Nothing here touches a device or
imports one of these packages.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from hardpoint.interfaces.attention import AttentionKind, AttentionNeed, BlockSizeRule
from hardpoint.interfaces.platform import DeviceDescription

__all__ = [
    "FP8_DTYPES",
    "KINDS",
    "PACKAGES",
    "InstalledKernels",
    "Resolution",
    "block_sizes",
    "is_head_256_path",
    "needs_generation_2",
    "preferred_generations",
    "refuse",
    "resolve",
]

PACKAGES = {2: "flash-attn", 3: "flash-attn-3", 4: "flash-attn-4"}
"""What to ask the package installer for, by generation."""

ACTIVATION_DTYPES = ("float16", "bfloat16")
FP8_DTYPES = ("float8_e4m3fn", "float8_e5m2", "fp8", "fp8_e5m2")
E5M2_DTYPES = ("float8_e5m2", "fp8_e5m2")
KINDS = (AttentionKind.DECODER, AttentionKind.ENCODER, AttentionKind.ENCODER_ONLY, AttentionKind.ENCODER_DECODER)
FP8_HEAD_MULTIPLE = 16
"""Heads of 8-bit entries lie at multiples of 16 bytes from each other only so (R5.42); their strides are not of size
one, so that nothing could make them canonical."""
HEAD_256_PAGE = 128
"""Tokens of a page of the kernel made for heads of 256 entries; it takes no other size."""

_Rule = Callable[[AttentionNeed], str | None]


@dataclass(frozen=True, slots=True)
class InstalledKernels:
    """Version by generation of what is installed; can be fabricated. ``page_multiples`` by generation, where the
    package asks for more than the usual 16 tokens."""

    versions: Mapping[int, str]
    page_multiples: Mapping[int, int]

    @property
    def generations(self) -> tuple[int, ...]:
        return tuple(sorted(self.versions))

    def page_multiple(self, generation: int) -> int:
        return self.page_multiples.get(generation, 16)


@dataclass(frozen=True, slots=True)
class Resolution:
    """The generation that serves a need, or None with the ``reason`` why none does."""

    generation: int | None
    reason: str | None = None


def preferred_generations(device: DeviceDescription) -> tuple[int, ...]:
    """Generations whose kernels run on the device, the best first."""
    if device.capability is None:
        return ()
    if "rocm" in device.features:  # which the framework calls by CUDA's name; only this generation is made for it
        return (2,)
    major = device.capability[0]
    by_major = {8: (2,), 9: (3, 4, 2), 10: (4, 2), 11: (4, 2), 12: (2,)}
    return by_major.get(major, (2,) if major > 12 else ())


def refuse(need: AttentionNeed, installed: InstalledKernels) -> str | None:
    """Reason why FlashAttention cannot serve ``need``, or None (R5.12)."""
    for rule in _RULES:
        reason = rule(need)
        if reason is not None:
            return reason
    resolution = resolve(need, installed)
    if resolution.generation is None:
        return resolution.reason
    if (fault := _encoder_fault(need, resolution.generation, installed)) is not None:
        return fault
    rule_of_blocks = block_sizes(need, installed)
    if need.block_size is not None and not _splits(need.block_size, rule_of_blocks):
        return (
            f"blocks of {need.block_size} tokens cannot be read in pages of FlashAttention {resolution.generation} "
            f"({rule_of_blocks}); set --block-size accordingly"
        )
    return None


def resolve(need: AttentionNeed, installed: InstalledKernels) -> Resolution:
    """The best installed generation that can do all that is needed at once."""
    preferred = preferred_generations(need.device)
    faults = []
    for generation in preferred:
        if generation not in installed.versions:
            faults.append(f"generation {generation} is not installed ({PACKAGES[generation]})")
            continue
        fault = _generation_fault(need, generation)
        if fault is None:
            return Resolution(generation)
        faults.append(f"generation {generation} {fault}")
    return Resolution(None, f"no FlashAttention kernels for {need.device.name}: {'; '.join(faults) or 'none exist'}")


def block_sizes(need: AttentionNeed, installed: InstalledKernels) -> BlockSizeRule:
    """R5.15: what the KV manager's blocks may be, or be split into."""
    generation = resolve(need, installed).generation
    if is_head_256_path(need, generation):
        return BlockSizeRule(exact=(HEAD_256_PAGE,))
    if need.kv_cache_dtype in FP8_DTYPES and _major(need) == 9:
        return BlockSizeRule(exact=(64,))
    return BlockSizeRule(multiple_of=16 if generation is None else installed.page_multiple(generation))


def is_head_256_path(need: AttentionNeed, generation: int | None) -> bool:
    """Whether the kernel made for heads of 256 entries would run: generation 4 on Blackwell."""
    return generation == 4 and need.head_size == 256 and _major(need) in (10, 11)


def needs_generation_2(need: AttentionNeed, generation: int) -> bool:
    """R5.61: windows over an encoder's own keys are beyond the kernel for heads of 256 entries."""
    is_encoder = need.kind is not AttentionKind.DECODER and need.sliding_window is not None
    return is_encoder and is_head_256_path(need, generation)


def _encoder_fault(need: AttentionNeed, generation: int, installed: InstalledKernels) -> str | None:
    """Why generation 2 cannot stand in for ``generation`` where it would have to, or None."""
    if not needs_generation_2(need, generation):
        return None
    what = "windows over an encoder's keys in heads of 256 entries run on generation 2"
    if 2 not in installed.versions:
        return f"{what}, which is not installed; install {PACKAGES[2]} beside it"
    # An encoder reads no cache, whatever that is stored as.
    fault = _generation_fault(replace(need, kv_cache_dtype="auto"), 2)
    return None if fault is None else f"{what}, which {fault}"


def _major(need: AttentionNeed) -> int | None:
    return None if need.device.capability is None else need.device.capability[0]


def _splits(block_size: int, rule: BlockSizeRule) -> bool:
    return any(rule.accepts(size) for size in range(1, block_size + 1) if block_size % size == 0)


def _fp8(need: AttentionNeed) -> bool:
    return need.kv_cache_dtype in FP8_DTYPES


def _generation_fault(need: AttentionNeed, generation: int) -> str | None:
    """What of the need the generation lacks, as the rest of a sentence; None: nothing."""
    faults: Sequence[tuple[bool, str]] = (
        (need.head_size > 256 and generation != 4, f"has no heads of {need.head_size} entries (256 at most)"),
        (need.uses_alibi and generation != 2, "takes no ALiBi slopes"),
        (need.uses_sinks and generation == 2, "has no attention sinks"),
        (need.uses_mm_prefix and generation != 4, "takes no masks for multimodal prefixes"),
        (need.keeps_prompt and generation != 4, "takes no masks for prompts kept beyond a window"),
        (need.chunk_size is not None and generation == 2, "has no chunked local attention"),
        (need.per_head_scales and generation < 3, "takes no scales per head"),
        (_fp8(need) and _major(need) == 9 and generation != 3, "reads no 8-bit cache on this device"),
        (_fp8(need) and _major(need) in (10, 11) and generation != 4, "reads no 8-bit cache on this device"),
        (_fp8(need) and generation == 2, "reads no 8-bit cache"),
        (
            _fp8(need) and need.head_size % FP8_HEAD_MULTIPLE != 0,
            f"reads an 8-bit cache only of heads of a multiple of {FP8_HEAD_MULTIPLE} entries",
        ),
        (need.kv_cache_dtype in E5M2_DTYPES, "computes with float8_e4m3fn, not with float8_e5m2"),
        (need.batch_invariant and generation == 2, "cannot fix the number of splits (batch-invariant mode)"),
        (need.dcp_size > 1 and generation == 2, "reads no cache that is dealt out among ranks"),
    )
    return next((text for is_fault, text in faults if is_fault), None)


def _device_rule(need: AttentionNeed) -> str | None:
    device = need.device
    if device.device_type != "cuda" or device.capability is None:
        return f"FlashAttention needs a CUDA device, not {device.device_type}"
    if device.capability < (8, 0):
        return f"compute capability {device.capability[0]}.{device.capability[1]} is below 8.0"
    return None


def _dtype_rule(need: AttentionNeed) -> str | None:
    if need.dtype not in ACTIVATION_DTYPES:
        return f"dtype {need.dtype} is not one of {', '.join(ACTIVATION_DTYPES)}"
    stored = need.kv_cache_dtype
    if stored in FP8_DTYPES or stored == "auto":
        return None
    if stored not in ACTIVATION_DTYPES:
        return f"KV cache dtype {stored} is not one of auto, {', '.join((*ACTIVATION_DTYPES, *FP8_DTYPES))}"
    if stored != need.dtype:
        return f"KV cache dtype {stored} differs from the computation's {need.dtype}"
    return None


def _shape_rule(need: AttentionNeed) -> str | None:
    if need.num_kv_heads < 1 or need.num_heads % need.num_kv_heads:
        return f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} key/value heads"
    if need.head_size % 8:
        return f"head size {need.head_size} is no multiple of 8"
    if need.head_size > 512:
        return f"head size {need.head_size} is above 512"
    return None


def _feature_rule(need: AttentionNeed) -> str | None:
    if need.uses_mla:
        return "latent attention (MLA) has kernels of its own"
    if need.uses_sparse:
        return "sparse attention has kernels of its own"
    if need.uses_row_causality:
        return "causality that differs per row is not supported by any generation"
    if need.uses_alibi and need.kind is not AttentionKind.DECODER:
        return f"ALiBi biases are causal here and do not fit attention kind {need.kind.value}"
    if need.uses_sinks and need.device.capability is not None and need.device.capability < (9, 0):
        return "attention sinks need compute capability 9.0"
    if _fp8(need) and need.uses_mm_prefix and _major(need) == 9:
        return "an 8-bit cache together with multimodal prefixes is left to the Triton backend on this device"
    if need.chunk_size is not None and need.sliding_window is not None:
        return "a sliding window within chunks is not supported"
    if need.keeps_prompt and need.chunk_size is not None:
        return "a prompt that stays visible (keeps_prompt) contradicts attention in chunks (chunk_size)"
    if need.dcp_size > 1 and (need.sliding_window is not None or need.chunk_size is not None or need.uses_mm_prefix):
        return "a cache that is dealt out among ranks has no windows, chunks or multimodal prefixes"
    if need.dcp_size > 1 and _fp8(need):
        return "an 8-bit cache that is dealt out among ranks would round a step's own tokens for later steps only"
    if need.dcp_size > 1 and need.kind is not AttentionKind.DECODER:
        return f"contexts that are dealt out among ranks are a decoder's, not attention kind {need.kind.value}'s"
    return None


def _kind_rule(need: AttentionNeed) -> str | None:
    if need.kind not in KINDS:
        return f"attention kind {need.kind} is not one of {', '.join(kind.value for kind in KINDS)}"
    if need.kind is not AttentionKind.DECODER and (need.chunk_size is not None or need.keeps_prompt):
        return f"chunks and kept prompts are causal and do not fit attention kind {need.kind.value}"
    if need.kind is AttentionKind.ENCODER_DECODER and need.sliding_window is not None:
        return "queries of cross-attention have no place among its keys that a sliding window could count from"
    if need.kind is not AttentionKind.DECODER and need.sliding_window is not None and need.uses_mm_prefix:
        return f"multimodal prefixes beside a sliding window are a decoder's, not attention kind {need.kind.value}'s"
    return None


_RULES: tuple[_Rule, ...] = (_device_rule, _dtype_rule, _shape_rule, _kind_rule, _feature_rule)

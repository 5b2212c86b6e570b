"""What platforms of graphics processors fill in where the user left something open, and what they refuse."""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import EngineSettings
from hardpoint_gpu.inventory import GpuFacts

__all__ = ["DTYPES", "GpuOptions", "fill_settings"]

DTYPES = ("bfloat16", "float16", "float32")
_AUTO = (None, "auto")
_LARGE_BYTES = 60 << 30
_SPREADING_EXECUTORS = ("external_launcher", "ray")
"""These place ranks on several hosts, of which this one sees its own devices only."""


class GpuOptions(BaseModel):
    """Options that these platforms share."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    memory_fraction: float = Field(
        default=0.9, gt=0, le=1, description="share of a device's memory that may be used, by weights, KV cache and all"
    )
    reserve_bytes: int = Field(
        default=512 << 20,
        ge=0,
        description="bytes of that share which the KV cache leaves free, for captured graphs and libraries' workspaces",
    )
    block_size: int = Field(default=16, gt=0, description="least tokens per KV block where `cache.block_size` is unset")
    max_num_seqs: int = Field(default=256, gt=0, description="where `scheduler.max_num_seqs` is unset")
    max_num_batched_tokens: int | None = Field(
        default=None,
        gt=0,
        description="where `scheduler.max_num_batched_tokens` is unset; by default 8192 for devices of 60 GiB or more, "
        "else 2048",
    )
    attention_backends: tuple[str, ...] | None = Field(
        default=None,
        description="`attention_backend` plugins to choose from, the best first; by default by the device's generation",
    )
    host_threads: int = Field(
        default=4,
        gt=0,
        description="most threads of the host per rank, for what is computed there; fewer where cores are",
    )


def fill_settings(settings: EngineSettings, options: GpuOptions, devices: Sequence[GpuFacts], label: str) -> None:
    """``devices`` are those that this process may use; empty where none can be asked, which leaves out what depends on
    them. Raises ``ConfigError`` for what cannot be."""
    _check_world(settings, devices, label)
    settings.worker = settings.worker or "torch"
    settings.executor = settings.executor or ("uniproc" if settings.world_size == 1 else "multiproc")
    settings.dtype = _dtype(settings.dtype, devices, label)
    if settings.kv_cache_dtype in _AUTO:
        settings.kv_cache_dtype = settings.dtype
    settings.preferred_block_size = options.block_size
    for name, option in (("block_size", "--block-size"), ("kv_cache_bytes", "--kv-cache-memory")):
        _positive(name, getattr(settings, name), option)
    _positive("max_num_seqs", settings.max_num_seqs, "--max-num-seqs")
    _positive("max_num_batched_tokens", settings.max_num_batched_tokens, "--max-num-batched-tokens")
    settings.max_num_seqs = settings.max_num_seqs or options.max_num_seqs
    # Every running sequence must be able to advance by one token in a step.
    tokens = max(options.max_num_batched_tokens or _step_tokens(devices), settings.max_num_seqs)
    settings.max_num_batched_tokens = settings.max_num_batched_tokens or tokens


def _check_world(settings: EngineSettings, devices: Sequence[GpuFacts], label: str) -> None:
    size = settings.world_size
    if size < 1:
        raise ConfigError(f"world size {size} is below 1; set the parallel sizes to 1 or more")
    if devices and size > len(devices) and settings.executor not in _SPREADING_EXECUTORS:
        raise ConfigError(
            f"{size} ranks were asked for, but {len(devices)} {label} devices are visible here; lower "
            "--tensor-parallel-size, unmask devices, or spread ranks over hosts with --executor external_launcher"
        )


def _dtype(wanted: str | None, devices: Sequence[GpuFacts], label: str) -> str:
    if wanted in _AUTO or wanted is None:
        # All ranks compute alike, so the least of the devices decides.
        return "bfloat16" if devices and all(_has_bfloat16(one) for one in devices) else "float16"
    if wanted not in DTYPES:
        raise ConfigError(f"dtype {wanted!r} cannot run on {label}; allowed for --dtype: auto, {', '.join(DTYPES)}")
    if wanted == "bfloat16" and not all(_has_bfloat16(one) for one in devices):
        old = next(one for one in devices if not _has_bfloat16(one))
        raise ConfigError(
            f"dtype 'bfloat16' is slow to the point of uselessness on {old.name} ({old.architecture}); set --dtype "
            "float16"
        )
    return wanted


def _has_bfloat16(device: GpuFacts) -> bool:
    return device.capability is None or device.capability >= (8, 0)


def _step_tokens(devices: Sequence[GpuFacts]) -> int:
    return 8192 if devices and all(one.memory_bytes >= _LARGE_BYTES for one in devices) else 2048


def _positive(name: str, value: int | None, option: str) -> None:
    if value is not None and value < 1:
        raise ConfigError(f"{name} {value} is below 1; set {option} to a positive number")

"""Chooses the attention backend at start-up, so that no unsupported combination waits in the first forward (R5.5)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from hardpoint.errors import ConfigError, ModelFormatError, PluginError
from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.worker import WorkerConfig

__all__ = ["AttentionChoice", "attention_need", "require_kinds", "select_attention_backend"]


@dataclass(frozen=True, slots=True)
class AttentionChoice:
    """The chosen backend with the candidates refused before it, each with its reason."""

    backend: AttentionBackend
    refused: tuple[tuple[str, str], ...] = ()

    def table(self) -> str:
        """Every candidate looked at with what became of it, on one line for the log."""
        return "; ".join(f"{name}: {reason}" for name, reason in (*self.refused, (self.backend.name, "chosen")))


def attention_need(config: WorkerConfig, device: DeviceDescription) -> AttentionNeed:
    """What this rank's attention layers will ask for, from the model's configuration.

    Raises ``ModelFormatError`` when head counts are missing or do not fit.
    """
    fields = config.model.config
    heads = _count(fields, "num_attention_heads")
    kv_heads = _count(fields, "num_key_value_heads", heads)
    head_size = _count(fields, "head_dim", max(1, _count(fields, "hidden_size") // heads))
    latent_rank = fields.get("kv_lora_rank")
    if latent_rank is not None:
        kv_heads, head_size = 1, _count(fields, "kv_lora_rank") + _count(fields, "qk_rope_head_dim")
    ranks = config.parallel.tensor_parallel_size
    uses_window = fields.get("use_sliding_window", True)
    return AttentionNeed(
        num_heads=max(1, heads // ranks),
        num_kv_heads=max(1, kv_heads // ranks),
        head_size=head_size,
        dtype=config.dtype,
        kv_cache_dtype=config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        device=device,
        block_size=config.block_size,
        sliding_window=fields.get("sliding_window") if uses_window else None,
        logits_soft_cap=fields.get("attn_logit_softcapping"),
        uses_mla=latent_rank is not None,
        batch_invariant=config.batch_invariant,
    )


def select_attention_backend(
    create: Callable[[str], AttentionBackend],
    candidates: Sequence[str],
    need: AttentionNeed,
    *,
    installed: Sequence[str] = (),
    forced: str | None = None,
    logger: logging.Logger | None = None,
) -> AttentionChoice:
    """The first candidate that accepts ``need``; with ``forced`` that one and no other. ``create`` loads one by name.

    Raises ``ConfigError`` naming every candidate's reason when none is left, or the reason of the forced one. A forced
    backend that is not installed or fails to load raises its ``PluginError``.
    """
    refused: list[tuple[str, str]] = []
    for name in (forced,) if forced is not None else candidates:
        try:
            backend = create(name)
        except PluginError as error:
            if forced is not None:
                raise
            refused.append((name, str(error)))
            continue
        reason = backend.refuse(need)
        if reason is None:
            choice = AttentionChoice(backend, tuple(refused))
            if logger is not None:
                logger.info("attention backend: %s", choice.table())
            return choice
        refused.append((name, reason))
    if forced is not None:
        raise ConfigError(
            f"attention backend {forced!r} was asked for but refuses: {refused[0][1]}; choose another one with "
            f"--attention-backend, or leave it unset for an automatic choice"
        )
    raise ConfigError(
        f"no attention backend can serve this model on {need.device.name}:\n{_table(refused)}\n"
        f"installed: {', '.join(installed) or 'none'}; name one with --attention-backend"
    )


def require_kinds(backend: AttentionBackend, need: AttentionNeed, kinds: Iterable[AttentionKind]) -> None:
    """Ask ``backend`` once more, about the kinds of layers that the model turned out to have: a configuration does not
    tell an encoder. Raises ``ConfigError`` with its reason."""
    for kind in sorted(set(kinds) - {need.kind}):
        reason = backend.refuse(replace(need, kind=kind))
        if reason is not None:
            raise ConfigError(
                f"attention backend {backend.name!r} was chosen, but refuses the model's layers of kind "
                f"{kind.value!r}: {reason}; choose another one with --attention-backend"
            )


def _table(rows: Sequence[tuple[str, str]]) -> str:
    width = max((len(name) for name, _ in rows), default=0)
    return "\n".join(f"  {name:<{width}}  {reason}" for name, reason in rows) or "  no candidates"


def _count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFormatError(f"the model's configuration has {name} = {value!r}; a positive whole number is needed")
    return value

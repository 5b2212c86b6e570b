"""The limit of a workload: what the machine needs at least to compute it, from what it reaches at its best.

A workload is a prefill and decode steps. Each takes at least the time of its arithmetic at the measured peak, or that
of reading what it has to read at the measured rate, whichever is longer. Counted are matrix products (2 operations per
weight and token), attention (4 per query, key and channel, over the positions a query sees), every weight once per
phase or step, and keys and values of earlier positions in float32. Nothing else is: no limit that is reached is wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from hardpoint_bench.workloads import Workload

__all__ = ["Geometry", "Limits", "Machine", "Stored", "limits_of"]

_OPS_PER_WEIGHT = 2
_OPS_PER_KEY = 4
_FLOAT32 = 4
_NEEDED = ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "vocab_size")
_OTHER_KINDS = ("num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank")


@dataclass(frozen=True, slots=True)
class Geometry:
    """Sizes of a dense decoder with gated feed-forward layers."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    wide: int
    vocab: int
    tied: bool

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Geometry | None:
        """From fields in the spelling of Hugging Face; None for a model whose operations are others."""
        if any(name not in config for name in _NEEDED) or any(config.get(name) for name in _OTHER_KINDS):
            return None
        heads = config["num_attention_heads"]
        return cls(
            hidden=config["hidden_size"],
            layers=config["num_hidden_layers"],
            heads=heads,
            kv_heads=config.get("num_key_value_heads") or heads,
            head_dim=config.get("head_dim") or config["hidden_size"] // heads,
            wide=config["intermediate_size"],
            vocab=config["vocab_size"],
            tied=bool(config.get("tie_word_embeddings")),
        )

    @property
    def layer_weights(self) -> int:
        """Those of all layers, without norms."""
        attention = self.hidden * self.head_dim * (2 * self.heads + 2 * self.kv_heads)
        return self.layers * (attention + 3 * self.hidden * self.wide)

    @property
    def head_weights(self) -> int:
        return self.vocab * self.hidden

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * _FLOAT32

    def attention_ops(self, queries: int, before: int) -> float:
        """Of ``queries`` positions that follow ``before`` others."""
        seen = queries * (before + (queries + 1) / 2)
        return _OPS_PER_KEY * self.layers * self.heads * self.head_dim * seen


@dataclass(frozen=True, slots=True)
class Stored:
    """Bytes of weights: of all layers, and of the output matrix. ``bytes_in_use`` also counts an embedding apart."""

    layers: int
    head: int
    tied: bool = True

    @classmethod
    def at(cls, geometry: Geometry, bytes_per_weight: float) -> Stored:
        layers, head = geometry.layer_weights * bytes_per_weight, geometry.head_weights * bytes_per_weight
        return cls(round(layers), round(head), geometry.tied)

    @property
    def bytes_in_use(self) -> int:
        return self.layers + self.head * (1 if self.tied else 2)


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured: bytes and operations per second, with all threads."""

    memory_read: float
    fp32: float
    int8: float

    @classmethod
    def best_of(cls, measured: Sequence[Mapping[str, float]]) -> Machine:
        """A machine that was disturbed once has not become another one."""
        return cls(**{one.name: max(rates[one.name] for rates in measured) for one in fields(cls)})


@dataclass(frozen=True, slots=True)
class Limits:
    """Least seconds of the whole workload, of its prefill and of all its decode steps; ``figures`` at that speed."""

    prefill_s: float
    decode_s: float
    figures: Mapping[str, float]


def limits_of(workload: Workload, geometry: Geometry, stored: Stored, machine: Machine, precision: str) -> Limits:
    """``precision``: class of the linear layers; all but ``fp32`` multiply in 8 bits. Attention is in float32."""
    linear_peak = machine.fp32 if precision == "fp32" else machine.int8
    rows = workload.num_requests

    def seconds(linear: float, attention: float, read: float) -> float:
        return max(_OPS_PER_WEIGHT * linear / linear_peak + attention / machine.fp32, read / machine.memory_read)

    def prefill() -> float:
        """The shared part once, then what each request has of its own; logits of the last positions."""
        tokens = workload.shared + rows * workload.own
        linear = tokens * geometry.layer_weights + rows * geometry.head_weights
        attention = geometry.attention_ops(workload.shared, 0)
        attention += rows * geometry.attention_ops(workload.own, workload.shared)
        return seconds(linear, attention, stored.layers + stored.head)

    def step(context: int) -> float:
        """One further token of each request, ``context`` positions in the cache before it."""
        linear = rows * (geometry.layer_weights + geometry.head_weights)
        attention = rows * geometry.attention_ops(1, context)
        kept = workload.shared + rows * (context - workload.shared)
        return seconds(linear, attention, stored.layers + stored.head + kept * geometry.kv_bytes)

    prefill_s = prefill()
    decode_s = sum(step(workload.prompt_length + done) for done in range(workload.output - 1))
    total = prefill_s + decode_s
    figures = {
        "wall_s": total,
        "output_tokens_per_s": rows * workload.output / total,
        "prompt_tokens_per_s": rows * workload.prompt_length / total,
    }
    if decode_s:
        figures["decode_tokens_per_s"] = (workload.output - 1) / decode_s
    return Limits(prefill_s, decode_s, figures)

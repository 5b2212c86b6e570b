"""What the decoders with layer norms and plain feed-forward blocks read from a configuration, as one frozen record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import WeightRule
from hardpoint_models.config_fields import MAX_INTEGER, ConfigFields, shown
from hardpoint_torch_runtime.layers import ACTIVATIONS, RopeParameters

__all__ = [
    "ClassicConfig",
    "Flow",
    "LearnedPositions",
    "alibi_slopes",
    "require_activation",
    "require_even_heads",
    "size",
    "spelled",
]

Flow = Literal["sequential", "parallel", "post_norm"]
"""How the two blocks of a layer follow one another: each after a norm and added to the residual stream; both on the
same stream, with one sum; or each normalized once it is added."""


@dataclass(frozen=True, slots=True)
class LearnedPositions:
    """A table with a row for each of ``count`` positions, the first of them at row ``offset``."""

    count: int
    offset: int = 0


@dataclass(frozen=True, slots=True)
class ClassicConfig:
    """Sizes are those of the whole model.

    Attributes:
        embedding_size: of token embeddings, which are projected where that is not ``hidden_size``.
        flow: see ``Flow``.
        has_second_norm: in a parallel layer, the feed-forward block has a norm of its own.
        has_final_norm: the hidden states are normalized behind the last layer.
        norm_bias: norms end with a bias.
        has_embedding_norm: what enters the first layer is normalized.
        rope, positions, alibi_slopes: rotation, a table added to the embeddings, slopes per head: where positions come
            from. Empty slopes: none.
        attention_scales, windows: one entry per layer; a window None is full attention.
        qkv_clip: bound on the absolute values of queries, keys and values, or None.
        head_bias: of the head, which is then not tied.
        rules: where checkpoints keep the weights.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    norm_eps: float
    is_tied: bool
    activation: str
    attention_scales: tuple[float, ...]
    rules: tuple[WeightRule, ...]
    head_size: int
    embedding_size: int
    qkv_bias: bool = True
    output_bias: bool = True
    mlp_bias: bool = True
    flow: Flow = "sequential"
    has_second_norm: bool = True
    has_final_norm: bool = True
    norm_bias: bool = True
    has_embedding_norm: bool = False
    rope: RopeParameters | None = None
    positions: LearnedPositions | None = None
    alibi_slopes: tuple[float, ...] = ()
    windows: tuple[int | None, ...] = ()
    qkv_clip: float | None = None
    head_bias: bool = False


def size(fields: ConfigFields, *names: str, default: int | None = None, most: int = MAX_INTEGER) -> int:
    """A positive integer that configurations give under one of ``names``.

    Raises ``ModelFormatError`` where it is absent without ``default``, anything else, or differs between names.
    """
    given = [name for name in names if fields.raw.get(name) is not None] or [names[0]]
    values = {name: fields.integer(name, default, most) for name in given}
    if len(set(values.values())) > 1:
        told = " and ".join(f"{name}={value}" for name, value in values.items())
        raise ModelFormatError(f"{fields.architecture}: {told} are one size by two names; remove the wrong one")
    return values[given[0]]


def require_even_heads(fields: ConfigFields, hidden_size: int, num_heads: int) -> int:
    """The size of a head. Raises ``ModelFormatError`` where heads do not share the hidden size evenly."""
    head_size, rest = divmod(hidden_size, num_heads)
    if rest:
        raise ModelFormatError(
            f"{fields.architecture}: the hidden size {hidden_size} is no multiple of the {num_heads} attention heads"
        )
    return head_size


def require_activation(fields: ConfigFields, name: str, default: str) -> str:
    """Raises ``UnsupportedModelError`` for a function not in the library, ``ModelFormatError`` for what is no name."""
    given = fields.raw.get(name)
    if given is not None and not isinstance(given, str):
        raise ModelFormatError(
            f"{fields.architecture}: config field {name!r} is {shown(given)}; the name of an activation is needed"
        )
    fields.require(name, tuple(ACTIVATIONS), default)
    return default if given is None else given


def alibi_slopes(num_heads: int, steepest: float = 8.0) -> tuple[float, ...]:
    """Slopes [H] of the ALiBi paper (arXiv 2108.12409): powers of 2 ** (-steepest / n) for a power of two n.

    Other numbers of heads take the slopes of half the next power of two, and then every other one of that power.
    """
    full = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-steepest * step / full) for step in range(1, full + 1)]
    return tuple(slopes if full == num_heads else (slopes[1::2] + slopes[::2])[:num_heads])


def spelled(
    prefixes: Sequence[str],
    layers: str,
    outer: Mapping[str, str | None],
    inner: Mapping[str, str | tuple[str, str] | None],
) -> tuple[WeightRule, ...]:
    """Rules for checkpoints that keep the model under one of ``prefixes``.

    ``outer`` maps stored names below a prefix to parameters of the model, ``inner`` those below ``layers.<number>`` to
    parameters of a layer, or to such a parameter and its part. None is ignored.
    """

    def rules() -> Iterator[WeightRule]:
        for prefix in prefixes:
            for stored, held in outer.items():
                yield WeightRule(f"{prefix}{stored}", held)
            for stored, place in inner.items():
                held, shard = place if isinstance(place, tuple) else (place, None)
                target = None if held is None else f"model.layers.*.{held}"
                yield WeightRule(f"{prefix}{layers}.*.{stored}", target, shard)

    return tuple(rules())

"""KV cache specs: what one layer stores. All page arithmetic is here and nowhere else.

Specs are frozen, hashable and compare by value, so layers, scheduler and workers share one object. A page is one block
of one layer::

    unpadded page bytes = heads * (block_size / tokens_per_state) * content_bytes

Sizes of blocks are in tokens, of pages and contents in bytes.
"""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping, Sequence
from fractions import Fraction
from math import prod
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.interfaces.kv_dtypes import KVQuantization, dtype_bytes

if TYPE_CHECKING:
    TokensPerState = int | Fraction
else:
    # The codec takes no union with a fraction; whole numbers arrive as fractions, which equal them.
    TokensPerState = Fraction


class KVCacheSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Physical format of one layer's cache. Subclasses set ``kind`` to their ``kv_cache_spec`` plugin name.

    A subclass must define ``heads``, ``tokens_per_state`` and ``content_bytes``, as a property or a field; without one
    no instance can be made. Raises ``ConfigError`` for sizes that do not work out.

    Attributes:
        block_size: in tokens.
        padded_page_size: bytes from one page to the next where that is more than it holds (R1.26).
    """

    kind: ClassVar[str] = ""
    slot_fields: ClassVar[tuple[str, ...]] = ()
    """The fields on which the token slots depend that a layer needs; none stated: all of them."""

    block_size: int
    padded_page_size: int | None = None

    def __post_init__(self) -> None:
        if min(self.block_size, self.heads, self.content_bytes) < 1:
            raise ConfigError(f"{self!r}: block size, heads and content bytes must be 1 or more; see --block-size")
        unpadded = self.unpadded_page_size_bytes
        if self.padded_page_size is not None and self.padded_page_size < unpadded:
            raise ConfigError(f"{self!r}: its page holds {unpadded} bytes; set padded_page_size to as many or more")

    @property
    def heads(self) -> int:
        raise TypeError(f"{type(self).__name__} defines no 'heads'; a KV cache spec must")

    @property
    def content_bytes(self) -> int:
        """Bytes per head and state."""
        raise TypeError(f"{type(self).__name__} defines no 'content_bytes'; a KV cache spec must")

    @property
    def tokens_per_state(self) -> int | Fraction:
        """An exact integer or fraction, never a float, that divides the block evenly. 0 or less: one state per block
        whatever its size (R1.24)."""
        raise TypeError(f"{type(self).__name__} defines no 'tokens_per_state'; a KV cache spec must")

    @property
    def states_per_block(self) -> int:
        per_state = self.tokens_per_state
        if isinstance(per_state, float):
            raise ConfigError(f"{type(self).__name__}: tokens_per_state {per_state} is a float; give a Fraction")
        if per_state <= 0:
            return 1
        states = Fraction(self.block_size) / per_state
        if states.denominator != 1:
            states_text = f"is not a whole number of states of {per_state} tokens; choose --block-size as a multiple"
            raise ConfigError(f"{type(self).__name__}: block size {self.block_size} {states_text}")
        return int(states)

    @property
    def unpadded_page_size_bytes(self) -> int:
        """What one page holds."""
        return self.heads * self.states_per_block * self.content_bytes

    @property
    def page_size_bytes(self) -> int:
        """Bytes of one block of one layer, padding included."""
        return self.padded_page_size or self.unpadded_page_size_bytes

    @property
    def slot_key(self) -> Hashable:
        """Layers whose keys are equal always need the same token slots, so that they may share a group (R1.36)."""
        names = self.slot_fields or self.__struct_fields__
        return self.slot_fields or type(self), *(getattr(self, name) for name in names)

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """Upper bound of blocks one sequence can hold; serves both start-up sizing and admission (R1.35)."""
        return -(-max_model_len // self.block_size)


class AttentionSpec(KVCacheSpec, frozen=True, kw_only=True):
    """Keys and values per token. ``dtype`` is the dtype of stored elements by name.

    Attributes:
        value_head_size: of values where it differs from that of keys; 0 where nothing but one latent is stored.
        scale_bytes: bytes of scales per head and state, behind the content proper.
        head_slots: replaces the number of heads in pages of packed formats; ``content_size`` the computed bytes.
    """

    num_kv_heads: int
    head_size: int
    dtype: str
    quantization: KVQuantization = KVQuantization.NONE
    scale_bytes: int = 0
    value_head_size: int | None = None
    tokens_per_state: TokensPerState = 1
    head_slots: int | None = None
    content_size: int | None = None

    @property
    def heads(self) -> int:
        return self.num_kv_heads if self.head_slots is None else self.head_slots

    @property
    def content_bytes(self) -> int:
        value_size = self.head_size if self.value_head_size is None else self.value_head_size
        computed = (self.head_size + value_size) * dtype_bytes(self.dtype) + self.scale_bytes
        return computed if self.content_size is None else self.content_size


class FullAttentionSpec(AttentionSpec, frozen=True, kw_only=True):
    """Every token is kept, also where the layer computes with a ``sliding_window`` or in chunks (R1.28).

    ``context_shards``: ranks among which the tokens of one sequence are dealt out (decode context parallelism).
    """

    kind: ClassVar[str] = "full_attention"
    slot_fields: ClassVar[tuple[str, ...]] = ("block_size", "context_shards")

    sliding_window: int | None = None
    chunk_size: int | None = None
    context_shards: int = 1

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return super().max_blocks(-(-max_model_len // self.context_shards), max_in_flight_tokens)


class MLASpec(FullAttentionSpec, frozen=True, kw_only=True):
    """One latent vector of ``head_size`` per token and no values. Pages end at a multiple of ``alignment`` bytes."""

    kind: ClassVar[str] = "mla"

    value_head_size: int | None = 0
    alignment: int | None = None

    @property
    def page_size_bytes(self) -> int:
        alignment = self.alignment or 1
        return -(-(self.padded_page_size or self.unpadded_page_size_bytes) // alignment) * alignment


class SlidingWindowSpec(AttentionSpec, frozen=True, kw_only=True):
    """Only the last ``sliding_window`` tokens are kept, the current one included."""

    kind: ClassVar[str] = "sliding_window"
    slot_fields: ClassVar[tuple[str, ...]] = ("block_size", "sliding_window")

    sliding_window: int

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """One block more than the tokens take: a window may begin in the middle of a block."""
        tokens = min(self.sliding_window - 1 + max_in_flight_tokens, max_model_len)
        return -(-tokens // self.block_size) + 1


class ChunkedLocalAttentionSpec(AttentionSpec, frozen=True, kw_only=True):
    """Tokens look back to the start of their chunk of ``chunk_size`` tokens."""

    kind: ClassVar[str] = "chunked_local"
    slot_fields: ClassVar[tuple[str, ...]] = ("block_size", "chunk_size")

    chunk_size: int

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return -(-min(self.chunk_size + max_in_flight_tokens, max_model_len) // self.block_size)


class CrossAttentionSpec(AttentionSpec, frozen=True, kw_only=True):
    """Keys and values of an encoder's output: ``max_encoder_tokens`` at most, whatever the decoder adds."""

    kind: ClassVar[str] = "cross_attention"
    slot_fields: ClassVar[tuple[str, ...]] = ("block_size", "max_encoder_tokens")

    max_encoder_tokens: int

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return -(-self.max_encoder_tokens // self.block_size)


class EncoderOnlyAttentionSpec(AttentionSpec, frozen=True, kw_only=True):
    """Attention within one step: nothing is kept."""

    kind: ClassVar[str] = "encoder_only"
    slot_fields: ClassVar[tuple[str, ...]] = ("block_size", "kind")

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return 0


class MambaCacheMode(enum.StrEnum):
    """Which states of a sequence are kept: the last one, one per block, or the last one and those at block ends that
    prefixes are found by."""

    NONE = "none"
    ALL = "all"
    ALIGN = "align"


class MambaSpec(KVCacheSpec, frozen=True, kw_only=True):
    """Recurrent state: tensors of ``shapes`` and ``dtypes``, one after another, of constant size per state.

    ``num_speculative_blocks`` hold states after drafts, ``num_checkpoint_blocks`` those within a long prefill.
    """

    kind: ClassVar[str] = "mamba"
    slot_fields: ClassVar[tuple[str, ...]] = ("block_size", "mode", "num_speculative_blocks", "num_checkpoint_blocks")

    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[str, ...]
    mode: MambaCacheMode = MambaCacheMode.NONE
    num_speculative_blocks: int = 0
    num_checkpoint_blocks: int = 0
    heads: ClassVar[int] = 1
    tokens_per_state: ClassVar[int] = 0

    def __post_init__(self) -> None:
        if len(self.shapes) != len(self.dtypes):
            raise ConfigError(f"{self!r} has {len(self.shapes)} shapes and {len(self.dtypes)} dtypes; give one each")
        super().__post_init__()

    @property
    def content_bytes(self) -> int:
        return sum(prod(shape) * dtype_bytes(dtype) for shape, dtype in zip(self.shapes, self.dtypes, strict=True))

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """R1.33: only mode ``all`` grows with the sequence."""
        kept = 1
        if self.mode is MambaCacheMode.ALL:
            kept = super().max_blocks(max_model_len, max_in_flight_tokens)
        elif self.mode is MambaCacheMode.ALIGN:
            kept = 2 + self.num_checkpoint_blocks
        return kept + self.num_speculative_blocks


class MixedSizeSpec(KVCacheSpec, frozen=True, kw_only=True):
    """Layers of one group whose pages differ: ``layers`` in the group's order. Its page is all of theirs (R1.36)."""

    kind: ClassVar[str] = "mixed_size"

    layers: tuple[KVCacheSpec, ...]
    heads: ClassVar[int] = 1
    tokens_per_state: ClassVar[int] = 0

    @classmethod
    def of(cls, layers: Sequence[KVCacheSpec]) -> MixedSizeSpec:
        """Raises ``ConfigError`` for layers that do not always need the same token slots."""
        if len({layer.slot_key for layer in layers}) != 1:
            raise ConfigError(f"layers that need different token slots cannot share a group: {list(layers)}")
        return cls(block_size=layers[0].block_size, layers=tuple(layers))

    @property
    def content_bytes(self) -> int:
        return sum(layer.page_size_bytes for layer in self.layers)

    @property
    def slot_key(self) -> Hashable:
        return self.layers[0].slot_key

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return self.layers[0].max_blocks(max_model_len, max_in_flight_tokens)


class WireSpec(msgspec.Struct, frozen=True):
    """A spec on its way between processes: its plugin name and its fields as msgpack, or its ``parts``.

    ``page_bytes`` must come out again where it is rebuilt.
    """

    kind: str
    fields: bytes
    page_bytes: int | None = None
    parts: tuple[WireSpec, ...] = ()

    @property
    def kinds(self) -> frozenset[str]:
        """The plugins it takes to rebuild it."""
        return frozenset(kind for part in self.parts for kind in part.kinds) or frozenset((self.kind,))

    def granted(self, wished: KVCacheSpec, layer: int) -> KVCacheSpec:
        """``wished`` by a group's layer number ``layer``, with the block size and the padding that this spec has."""
        fields = msgspec.msgpack.decode(self.parts[layer].fields if self.parts else self.fields)
        sizes = {name: fields.get(name) for name in KVCacheSpec.__struct_fields__}
        return msgspec.structs.replace(wished, **sizes)


def spec_to_wire(spec: KVCacheSpec) -> WireSpec:
    if isinstance(spec, MixedSizeSpec):
        return WireSpec(spec.kind, b"", spec.page_size_bytes, tuple(spec_to_wire(part) for part in spec.layers))
    return WireSpec(spec.kind, msgspec.msgpack.encode(spec, enc_hook=str), spec.page_size_bytes)


def spec_from_wire(wire: WireSpec, classes: Mapping[str, type[KVCacheSpec]]) -> KVCacheSpec:
    """Rebuild a spec. ``classes`` maps installed ``kv_cache_spec`` names.

    Raises ``ConfigError`` for an unknown one, and where the pages are not those of the spec that was sent.
    """
    if wire.parts:
        return MixedSizeSpec.of([spec_from_wire(part, classes) for part in wire.parts])
    spec_class = classes.get(wire.kind)
    if spec_class is None:
        known = ", ".join(sorted(classes)) or "none"
        raise ConfigError(f"KV cache spec {wire.kind!r} has no plugin; installed: {known}")
    spec = msgspec.msgpack.decode(wire.fields, type=spec_class, dec_hook=_decoded)
    if wire.page_bytes not in (None, spec.page_size_bytes):
        raise ConfigError(
            f"KV cache spec {wire.kind!r} was sent with pages of {wire.page_bytes} bytes, but {spec_class.__name__} "
            f"makes them {spec.page_size_bytes}; give the spec that computes pages its own kind and plugin"
        )
    return spec


def _decoded(kind: type[Any], value: Any) -> Any:
    """Fractions travel as an integer or as ``numerator/denominator``."""
    if kind is not Fraction or not isinstance(value, int | str):
        raise TypeError(f"{value!r} is no {kind.__name__}")
    return Fraction(value)

"""Layers by KV cache group: which backend builder serves them, and what each layer finds in the forward context."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionMetadataBuilder,
    BlockSizeRule,
    CommonAttentionMetadata,
    GraphSupport,
)
from hardpoint.interfaces.kv_cache import AttentionSpec, KVCacheConfig, KVCacheGroup, KVCacheSpec
from hardpoint.interfaces.kv_cache_specs import (
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MambaCacheMode,
    MambaSpec,
)
from hardpoint.interfaces.step import SchedulerOutput
from hardpoint_torch_runtime.backend_selection import largest_fitting
from hardpoint_torch_runtime.layers.context_shards import ContextPlace, LocalLengths
from hardpoint_torch_runtime.layers.state_plan import StateMetadataBuilder
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["AttentionGroup", "AttentionGroups", "choose_kernel_block_size"]


@dataclass(frozen=True, slots=True)
class AttentionGroup:
    """One KV cache group: layers that share a block table and, where they are of one shape, one metadata object.

    ``block_size`` is the number of tokens per position of the table, which for a state that serves a whole sequence is
    more than any has. Where contexts are dealt out among ranks, a position is a block on each of them.
    """

    layer_names: tuple[str, ...]
    block_size: int
    kernel_block_size: int
    builders: tuple[tuple[tuple[str, ...], AttentionMetadataBuilder], ...]
    """By layers: more than one builder where layers of different shapes share the group."""
    is_causal: bool = True
    """False for encoders, whose tokens see both sides."""
    is_recurrent: bool = False
    """Blocks hold states, one each, which no kernel sees in smaller pieces."""
    foreign_tokens: int | None = None
    """Cross-attention: the most tokens of an encoder that a row's blocks hold, instead of its own."""
    place: ContextPlace | None = None
    """This rank among those that contexts are dealt out to; None where it keeps them whole."""

    @property
    def kernel_blocks(self) -> int:
        num_ranks = 1 if self.place is None else self.place.shards.num_ranks
        return self.block_size // num_ranks // self.kernel_block_size

    @property
    def keeps_kv(self) -> bool:
        """Encoders use the step's own keys and values, and hold no blocks."""
        return self.is_causal or self.foreign_tokens is not None

    @property
    def follows_tokens(self) -> bool:
        """Whether the blocks of a row hold its own tokens."""
        return self.keeps_kv and self.foreign_tokens is None


class AttentionGroups:
    """All groups of a KV cache plan, in its order."""

    def __init__(
        self,
        config: KVCacheConfig,
        specs: Mapping[str, KVCacheSpec],
        backend: AttentionBackend,
        rule: BlockSizeRule,
        *,
        max_rows: int,
        max_tokens: int,
        max_model_len: int,
        device: torch.device,
        keeps_prompt: bool = False,
        uses_mm_prefix: bool = False,
        place: ContextPlace | None = None,
    ) -> None:
        """``keeps_prompt``: some layer does, so that steps have to tell how long prompts are. ``uses_mm_prefix``: some
        layer does, so that they have to tell where media are. ``place``: this rank, where groups have
        ``context_shards``."""
        self.keeps_prompt = keeps_prompt
        self.uses_mm_prefix = uses_mm_prefix
        self._local_lengths: LocalLengths | None = None
        if place is not None:
            self._local_lengths = LocalLengths(place.shards, place.rank, max_rows, device)
        groups = []
        for planned in config.groups:
            state = _shared_state(planned, specs)
            if state is not None:
                groups.append(_recurrent(planned, state, max_model_len, device))
                continue
            builders = []
            for names, spec in _by_shape(planned, specs).items():
                builders.append((names, backend.create_builder(spec, names, max_rows, max_tokens, device)))
            first = specs[planned.layer_names[0]]
            shards = first.context_shards if isinstance(first, FullAttentionSpec) else 1
            foreign = first.max_encoder_tokens if isinstance(first, CrossAttentionSpec) else None
            groups.append(
                AttentionGroup(
                    planned.layer_names,
                    first.block_size * shards,
                    choose_kernel_block_size(first.block_size, rule, backend.name),
                    tuple(builders),
                    is_causal=foreign is None and not isinstance(first, EncoderOnlyAttentionSpec),
                    foreign_tokens=foreign,
                    place=place if shards > 1 else None,
                )
            )
        self.groups = tuple(groups)
        self._built: tuple[list[object], dict[str, Any], dict[str, torch.Tensor]] = ([], {}, {})

    @property
    def block_sizes(self) -> tuple[int, ...]:
        return tuple(group.block_size for group in self.groups)

    @property
    def keeps_kv(self) -> tuple[bool, ...]:
        return tuple(group.keeps_kv for group in self.groups)

    @property
    def foreign_tokens(self) -> tuple[int | None, ...]:
        return tuple(group.foreign_tokens for group in self.groups)

    @property
    def kernel_blocks(self) -> tuple[int, ...]:
        return tuple(group.kernel_blocks for group in self.groups)

    @property
    def places(self) -> tuple[ContextPlace | None, ...]:
        return tuple(group.place for group in self.groups)

    @property
    def kernel_block_size_by_layer(self) -> dict[str, int]:
        """Of layers whose blocks kernels may split."""
        return {
            name: group.kernel_block_size
            for group in self.groups
            if not group.is_recurrent
            for name in group.layer_names
        }

    @property
    def reorder_threshold(self) -> int | None:
        """The smallest threshold any builder asks for; None when all take rows in any order."""
        thresholds = [builder.reorder_threshold for group in self.groups for _, builder in group.builders]
        return min((threshold for threshold in thresholds if threshold is not None), default=None)

    @property
    def graph_support(self) -> GraphSupport:
        """What all builders tolerate."""
        supports = [builder.graph_support for group in self.groups for _, builder in group.builders]
        return min(supports, default=GraphSupport.ALWAYS)

    def build(
        self, batch: InputBatch, step: SchedulerOutput, *, for_graph: bool = False
    ) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Metadata and slot mapping by layer name; layers of one group and shape get the same objects (R4.51).

        Both are the maps of the batch before where builders and batch give the same objects again; not to be changed.

        ``for_graph``: what the host says holds for all steps of the batch's shape, so ``max_seq_len`` is all that a
        block table can hold, and no blocks are common.

        Raises ``RuntimeError`` for guesses at what a recurrent layer reads next, since nothing could take them back,
        and where contexts are dealt out among ranks: guesses refused would move what follows to other ranks.
        """
        if step.drafts is not None and self._local_lengths is not None:
            raise RuntimeError(
                f"step {step.step_id} brings draft tokens, but contexts are dealt out among ranks; run it without "
                "speculation, or with plugins.worker.torch.context_ranks at 1"
            )
        if step.drafts is not None and any(group.is_recurrent for group in self.groups):
            raise RuntimeError(
                f"step {step.step_id} brings draft tokens, but the model has recurrent layers, which keep no states "
                "to return to; run it without speculation"
            )
        parts: list[object] = []
        for index, group in enumerate(self.groups):
            parts.append(_mapping(batch, index))
            parts.extend(builder.build(self._common(batch, step, index, for_graph)) for _, builder in group.builders)
        known, metadata, mappings = self._built
        if len(parts) != len(known) or any(part is not other for part, other in zip(parts, known, strict=True)):
            metadata, mappings = self._by_layer(iter(parts))
            self._built = parts, metadata, mappings
        return metadata, mappings

    def _by_layer(self, parts: Iterator[Any]) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
        """Of each group its slot mapping and then the metadata of its builders, in their order."""
        metadata: dict[str, Any] = {}
        mappings: dict[str, torch.Tensor] = {}
        for group in self.groups:
            mappings.update(dict.fromkeys(group.layer_names, next(parts)))
            for names, _ in group.builders:
                metadata.update(dict.fromkeys(names, next(parts)))
        return metadata, mappings

    def _common(self, batch: InputBatch, step: SchedulerOutput, index: int, for_graph: bool) -> CommonAttentionMetadata:
        known = 0 if for_graph else len(step.num_common_prefix_blocks)
        prefix_blocks = step.num_common_prefix_blocks[index] if index < known else 0
        local, local_cpu = self._local(batch, index)
        block_size = self.groups[index].kernel_block_size
        common = CommonAttentionMetadata(
            num_rows=batch.num_rows,
            num_tokens=batch.num_tokens,
            max_query_len=batch.max_query_len,
            max_seq_len=batch.block_tables[index].shape[1] * block_size if for_graph else batch.max_seq_len,
            query_start_loc=batch.query_start_loc,
            query_start_loc_cpu=batch.query_start_loc_cpu,
            seq_lens=batch.seq_lens,
            seq_lens_cpu=batch.seq_lens_cpu,
            seq_lens_is_exact=batch.lengths_are_exact,
            block_table=batch.block_tables[index],
            slot_mapping=batch.slot_mappings[index],
            block_size=block_size,
            for_graph=for_graph,
            causal=self.groups[index].is_causal,
            num_common_prefix_blocks=prefix_blocks * self.groups[index].kernel_blocks,
            mm_ranges=batch.mm_ranges,
            prompt_lens=batch.prompt_lens,
            prompt_lens_cpu=batch.prompt_lens_cpu,
            dcp_local_seq_lens=local,
            dcp_local_seq_lens_cpu=local_cpu,
        )
        return common if self.groups[index].foreign_tokens is None else _crossed(common, batch, index)

    def _local(self, batch: InputBatch, index: int) -> tuple[torch.Tensor | None, np.ndarray | None]:
        """How much of each row's context is on this rank, where the group's contexts are dealt out (R5.22)."""
        place, lengths = self.groups[index].place, self._local_lengths
        if place is None or lengths is None:
            return None, None
        on_host = batch.seq_lens_cpu - np.diff(batch.query_start_loc_cpu)
        on_device = lengths.fill(batch.seq_lens - torch.diff(batch.query_start_loc))
        return on_device, place.shards.local_lengths(on_host, place.rank)


def _mapping(batch: InputBatch, index: int) -> torch.Tensor:
    """Where the group's layers write: the step's tokens, or those of encoders that come with it."""
    foreign = None if batch.foreign is None else batch.foreign.slot_mappings[index]
    return batch.slot_mappings[index] if foreign is None else foreign


def _crossed(common: CommonAttentionMetadata, batch: InputBatch, index: int) -> CommonAttentionMetadata:
    """``common`` with the encoder's tokens in the place of the rows' own.

    Raises ``RuntimeError`` for a batch that was prepared without them.
    """
    foreign = batch.foreign
    if foreign is None:
        raise RuntimeError("layers attend to an encoder's output, but the step was prepared without any")
    return replace(
        common,
        max_seq_len=foreign.max_len,
        seq_lens=foreign.seq_lens,
        seq_lens_cpu=foreign.seq_lens_cpu,
        seq_lens_is_exact=True,
        slot_mapping=_mapping(batch, index),
        causal=False,
        num_common_prefix_blocks=0,
        mm_ranges=None,
        prompt_lens=None,
        prompt_lens_cpu=None,
    )


def _shared_state(planned: KVCacheGroup, specs: Mapping[str, KVCacheSpec]) -> MambaSpec | None:
    """The spec that stands for the group's layers where they are recurrent: how states are kept is the same for all
    layers that share a table."""
    spec = specs[planned.layer_names[0]]
    return spec if isinstance(spec, MambaSpec) else None


def _recurrent(planned: KVCacheGroup, spec: MambaSpec, max_model_len: int, device: torch.device) -> AttentionGroup:
    # A step in flight may compute one token past the limit before the scheduler ends the request.
    size = max_model_len + 1 if spec.mode is MambaCacheMode.NONE else spec.block_size
    builder = StateMetadataBuilder(spec, device)
    return AttentionGroup(planned.layer_names, size, size, ((planned.layer_names, builder),), is_recurrent=True)


def _by_shape(planned: KVCacheGroup, specs: Mapping[str, KVCacheSpec]) -> dict[tuple[str, ...], AttentionSpec]:
    """The group's layers by what their pages look like; windows are the layers' own affair."""
    shapes: dict[tuple[object, ...], list[tuple[str, AttentionSpec]]] = {}
    for name in planned.layer_names:
        spec = specs[name]
        if not isinstance(spec, AttentionSpec):
            raise ConfigError(f"layer {name!r} keeps {type(spec).__name__} state, which this worker cannot run")
        shape = tuple(getattr(spec, field) for field in AttentionSpec.__struct_fields__)
        shapes.setdefault(shape, []).append((name, spec))
    return {tuple(name for name, _ in layers): layers[0][1] for layers in shapes.values()}


def choose_kernel_block_size(block_size: int, rule: BlockSizeRule, backend_name: str) -> int:
    """The manager's block size if the backend takes it, else the largest accepted divisor.

    Raises ``ConfigError`` when no divisor is accepted (R5.15).
    """
    size = largest_fitting(block_size, rule)
    if size is not None:
        return size
    allowed = [f"multiples of {rule.multiple_of}"] if rule.multiple_of else []
    allowed += [str(size) for size in rule.exact]
    raise ConfigError(
        f"attention backend {backend_name!r} cannot work with blocks of {block_size} tokens; "
        f"it accepts {' and '.join(allowed) or 'none'}: set --block-size accordingly"
    )

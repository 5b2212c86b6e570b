"""Puts a runner together: which parts it has, and that those which keep state by slot hear of slots."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.model import Model
from hardpoint.interfaces.step import NewRow
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.backlog import Backlog
from hardpoint_torch_runtime.runner.batch_state import BatchState, RowRefusal
from hardpoint_torch_runtime.runner.device_tokens import DeviceTokens
from hardpoint_torch_runtime.runner.draft_debt import DraftDebt
from hardpoint_torch_runtime.runner.draft_verification import DraftProposer, OwnDrafts
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.encoder_stage import EncoderStage
from hardpoint_torch_runtime.runner.extensions import RunnerExtension, StatePart
from hardpoint_torch_runtime.runner.feature_checks import without_faults
from hardpoint_torch_runtime.runner.flags import ExpertExchange, RunnerFlags
from hardpoint_torch_runtime.runner.forward_pass import ForwardPass
from hardpoint_torch_runtime.runner.input_batch import InputBuilder
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.media_ranges import MediaRanges, refuse_ranges
from hardpoint_torch_runtime.runner.media_stage import MediaModel, MediaStage
from hardpoint_torch_runtime.runner.pooling import SlotPooling
from hardpoint_torch_runtime.runner.pooling_plan import PoolingPlan
from hardpoint_torch_runtime.runner.position_axes import AxisPositions, PositionAxes
from hardpoint_torch_runtime.runner.prompt_embeddings import PromptEmbeddings
from hardpoint_torch_runtime.runner.prompt_items import PromptItems
from hardpoint_torch_runtime.runner.runner import ModelRunner
from hardpoint_torch_runtime.runner.sampling_stage import DeviceResidence
from hardpoint_torch_runtime.runner.slot_state import SlotState
from hardpoint_torch_runtime.runner.streams import DeviceStreams
from hardpoint_torch_runtime.sampling.sampler import Sampler
from hardpoint_torch_runtime.sampling.slot_params import SlotSampling

__all__ = ["RunnerParts", "assemble_runner"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RunnerParts:
    """What a runner may have beyond the model and its cache; each may be absent.

    Attributes:
        processors: plugins that the sampler calls, told of every token.
        refuse: says of a new row why it cannot be computed.
        streams: of the device, where outputs are promises; without them each step waits for its own.
        proposer: guesses tokens ahead.
        extensions: seats of other features.
        takes_embeddings: whether prompts may be given as embeddings.
        exchange: makes what moves tokens between ranks with different experts.
        pooling: how texts become embeddings or scores, where that is not just the model's own way.
    """

    processors: Sequence[LogitsProcessor] = ()
    refuse: RowRefusal | None = None
    streams: DeviceStreams | None = None
    proposer: DraftProposer | None = None
    extensions: Sequence[RunnerExtension] = ()
    takes_embeddings: bool = True
    exchange: Callable[[], ExpertExchange] | None = None
    pooling: PoolingPlan | None = None


def _axes(config: WorkerConfig, model: Model, device: torch.device) -> PositionAxes | None:
    """Only for models that have several positions per token."""
    if not isinstance(model, AxisPositions):
        return None
    return PositionAxes(model, config.max_num_seqs, config.max_num_batched_tokens, device)


def _encoder(
    model: Model, slots: SlotState, items: PromptItems | None, device: torch.device
) -> EncoderStage | MediaStage | None:
    """Only for models with an encoder: its output is attended to, or stands among the tokens."""
    if items is not None and isinstance(model, MediaModel):
        return MediaStage(model, items)
    return EncoderStage(model, slots, device) if isinstance(model, EncoderModel) else None


def _slots(config: WorkerConfig, groups: AttentionGroups) -> SlotState:
    return SlotState(
        config.max_num_seqs,
        config.max_model_len,
        groups.block_sizes,
        keeps_kv=groups.keeps_kv,
        foreign_tokens=groups.foreign_tokens,
    )


def _inputs(
    config: WorkerConfig,
    slots: SlotState,
    groups: AttentionGroups,
    device: torch.device,
    device_tokens: DeviceTokens | None,
) -> InputBuilder:
    return InputBuilder(
        slots,
        config.max_num_batched_tokens,
        device,
        groups.kernel_blocks,
        device_tokens=device_tokens,
        has_prompt_lens=groups.keeps_prompt,
        places=groups.places,
    )


def assemble_runner(
    config: WorkerConfig,
    model: Model,
    groups: AttentionGroups,
    kv: KVMemory,
    sampler: Sampler,
    device: torch.device,
    parts: RunnerParts,
    make_forwards: Callable[[PromptEmbeddings], ForwardPass] | None = None,
) -> ModelRunner:
    """A runner sized by ``config``, with ``parts`` and, where the model has several positions per token, those.

    ``make_forwards``: how the model is run; by default as it is.
    """
    slots = _slots(config, groups)
    sampling = SlotSampling(
        config.max_num_seqs, config.model.vocab_size, device, seed=config.seed, eos_token_ids=config.model.eos_token_ids
    )
    num_drafts = 0 if parts.proposer is None else parts.proposer.num_drafts
    own_drafts = None if parts.proposer is None else OwnDrafts(config.max_num_seqs, num_drafts)
    residence = None if parts.streams is None else _residence(config, groups, parts.streams, num_drafts, device)
    axes = _axes(config, model, device)
    tokens = None if residence is None else residence.tokens
    pooling = SlotPooling(parts.pooling or PoolingPlan.settle(model))
    items = PromptItems(slots.num_slots) if isinstance(model, MediaModel) or groups.uses_mm_prefix else None
    encoder = _encoder(model, slots, items, device)
    ranges = MediaRanges(items) if items is not None and groups.uses_mm_prefix else None
    attended = encoder if isinstance(encoder, EncoderStage) else None
    by_slot: tuple[StatePart | None, ...] = (*parts.extensions, parts.proposer, axes, tokens, pooling, items, attended)
    flags = RunnerFlags.settle(config, model, takes_embeddings=parts.takes_embeddings, exchange=parts.exchange)
    refuse = parts.refuse if flags.takes_embeddings else _without_embeddings(parts.refuse)
    embeddings = PromptEmbeddings(items)
    state = BatchState(
        slots,
        sampling,
        kv,
        embeddings,
        parts.processors,
        refuse if ranges is None else _with_whole_items(refuse, config.max_num_batched_tokens),
        repair=partial(without_faults, model),
        parts=[part for part in by_slot if part is not None],
        own_drafts=own_drafts,
        backlog=None if residence is None else residence.backlog,
        debt=None if residence is None else residence.debt,
    )
    return ModelRunner(
        model,
        groups,
        kv,
        state,
        _inputs(config, slots, groups, device, tokens),
        sampler,
        flags=flags,
        forwards=None if make_forwards is None else make_forwards(embeddings),
        axes=axes,
        pooling=pooling,
        proposer=parts.proposer,
        extensions=parts.extensions,
        device=residence,
        encoder=encoder,
        ranges=ranges,
    )


def _without_embeddings(refuse: RowRefusal | None) -> RowRefusal:
    def refuse_row(row: NewRow) -> str | None:
        if row.prompt_embeds is not None:
            return "prompts given as embeddings are switched off; send token ids"
        return None if refuse is None else refuse(row)

    return refuse_row


def _with_whole_items(refuse: RowRefusal | None, max_tokens: int) -> RowRefusal:
    def refuse_row(row: NewRow) -> str | None:
        reason = None if refuse is None else refuse(row)
        return reason or refuse_ranges(row.features, max_tokens)

    return refuse_row


def _residence(
    config: WorkerConfig, groups: AttentionGroups, streams: DeviceStreams, num_drafts: int, device: torch.device
) -> DeviceResidence:
    rows, most = config.max_num_seqs, config.max_num_batched_tokens
    return DeviceResidence(
        DeviceTokens(rows, most, device, num_drafts=num_drafts),
        DraftDebt(
            rows, most, [group.kernel_block_size if group.follows_tokens else None for group in groups.groups], device
        ),
        Backlog(),
        streams,
        streams.create_copy_stream(),
    )

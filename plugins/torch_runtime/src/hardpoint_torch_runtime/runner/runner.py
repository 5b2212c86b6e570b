"""One step on one worker: state, inputs, metadata, forward, logits, sampling, output (R4.68). Parts are injected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hardpoint.interfaces.model import Model
from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import PendingOutput
from hardpoint_torch_runtime.forward_context import ForwardContext, set_forward_context
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.batch_state import AppliedStep, BatchState
from hardpoint_torch_runtime.runner.deferred import Deferral, ForwardProducts
from hardpoint_torch_runtime.runner.draft_verification import DraftProposer
from hardpoint_torch_runtime.runner.encoder_outputs import EncoderModel
from hardpoint_torch_runtime.runner.encoder_stage import EncoderStage
from hardpoint_torch_runtime.runner.extensions import RunnerExtension
from hardpoint_torch_runtime.runner.flags import RunnerFlags
from hardpoint_torch_runtime.runner.forward_pass import ForwardPass, last_hidden
from hardpoint_torch_runtime.runner.input_batch import InputBatch, InputBuilder
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.media_ranges import MediaRanges
from hardpoint_torch_runtime.runner.media_stage import MediaStage
from hardpoint_torch_runtime.runner.pooling import PooledRows, SlotPooling
from hardpoint_torch_runtime.runner.position_axes import AxisPositions, PositionAxes
from hardpoint_torch_runtime.runner.prompt_logprobs import prompt_logprobs
from hardpoint_torch_runtime.runner.sampling_stage import DeviceResidence, SamplingStage
from hardpoint_torch_runtime.runner.step_shape import StepShape
from hardpoint_torch_runtime.runner.streams import DeviceEvent
from hardpoint_torch_runtime.sampling.sampler import Sampler

__all__ = ["ModelRunner", "profile_forward"]


class ModelRunner:
    """Drives a model through steps. ``groups``, ``kv`` and ``inputs`` come from the KV cache plan; ``forwards`` runs
    the model, by default as it is.

    Absent unless given: ``axes`` where the model has several positions per token, ``pooling`` where requests may ask
    for embeddings, a ``proposer`` of drafts, ``extensions`` of features, ``device`` where outputs are promises, an
    ``encoder`` where the model has one beside its decoder, ``ranges`` where media see all of themselves. What
    of these keeps state by slot must be among the parts of ``state``;
    :func:`~hardpoint_torch_runtime.runner.assembly.assemble_runner` sees to it.
    """

    def __init__(
        self,
        model: Model,
        groups: AttentionGroups,
        kv: KVMemory,
        state: BatchState,
        inputs: InputBuilder,
        sampler: Sampler,
        *,
        flags: RunnerFlags | None = None,
        forwards: ForwardPass | None = None,
        axes: PositionAxes | None = None,
        pooling: SlotPooling | None = None,
        proposer: DraftProposer | None = None,
        extensions: Sequence[RunnerExtension] = (),
        device: DeviceResidence | None = None,
        encoder: EncoderStage | MediaStage | None = None,
        ranges: MediaRanges | None = None,
    ) -> None:
        self.model = model
        self.groups = groups
        self.kv = kv
        self.state = state
        self.inputs = inputs
        self.flags = flags or RunnerFlags(only_pools=False)
        self.forwards = forwards or ForwardPass(model, groups, kv, state.embeddings)
        self._reorder_threshold = groups.reorder_threshold
        self._axes = axes
        self._pooling = pooling
        self._extensions = tuple(extensions)
        self._device = device
        self._encoder = encoder
        self._ranges = ranges
        self._sampling = SamplingStage(sampler, state, proposer=proposer, device=device)
        self._deferral = Deferral()
        self._uploads: DeviceEvent | None = None

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> RunnerOutput | Deferred | PendingOutput:
        """Raises ``RuntimeError`` while an earlier step waits for sampling, or for a step that cannot be right."""
        self._deferral.check_free()
        applied = self.state.apply(step)
        products = self._compute(step, applied)
        if step.defers_sampling:
            self._deferral.put(products)
            return Deferred(step.step_id)
        return self._sampling.finish(products, None)

    @torch.inference_mode()
    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        """Finish the deferred step. Raises ``RuntimeError`` when another one, or none, is pending."""
        return self._sampling.finish(self._deferral.take(step_id), grammar)

    def _compute(self, step: SchedulerOutput, applied: AppliedStep) -> ForwardProducts:
        if step.is_empty:
            return ForwardProducts(step, extensions=self._payloads(step))
        if self.flags.checked_exchange is not None:
            self.flags.checked_exchange.check_ranks()
        shape = self.forwards.shape(step)
        batch = self._inputs(step, applied, shape)
        if self._encoder is not None:
            batch = self._encoder.join(step, batch, self.state.refused)
        if self._ranges is not None:
            batch = replace(batch, mm_ranges=self._ranges.of_rows(batch))
            for slot, reason in self._ranges.cut(batch).items():
                self.state.refused.setdefault(slot, reason)
        for extension in self._extensions:
            extension.before_forward(step, batch)
        hidden = self.forwards.run(batch, step, shape)
        logits = self.model.logits(_sampled(hidden, batch)) if len(batch.sample_rows) else None
        if applied.correct is not None:
            applied.correct()
        pooled = PooledRows() if self._pooling is None else self._pooling.collect(hidden, batch)
        self.state.refused.update(pooled.faults)
        return ForwardProducts(
            step,
            batch,
            logits,
            prompt_logprobs(self.model, hidden, batch, self.state),
            pooled=pooled.results,
            extensions=self._payloads(step),
        )

    def _inputs(self, step: SchedulerOutput, applied: AppliedStep, shape: StepShape) -> InputBatch:
        if self._uploads is not None:
            # The device may still be reading the last step's inputs, whose buffers are about to be written.
            self._uploads.synchronize()
        batch = self.inputs.build(
            step,
            num_computed=applied.num_computed,
            drafts=applied.drafts,
            reorder_threshold=self._reorder_threshold,
            pad_tokens=shape.pad_tokens,
            pad_rows=shape.pad_rows,
        )
        axes = None if self._axes is None else self._axes.positions(batch)
        if self._device is not None:
            if applied.correct is not None:
                batch = self._device.debt.correct(batch, axes)
            self._uploads = self._device.streams.record_main()
        return batch if axes is None else replace(batch, positions=axes)

    def _payloads(self, step: SchedulerOutput) -> dict[str, object]:
        if not self._extensions:
            return {}
        found = ((extension.name, extension.finish_step(step)) for extension in self._extensions)
        return {name: payload for name, payload in found if payload is not None}


def _sampled(hidden: torch.Tensor, batch: InputBatch) -> torch.Tensor:
    """States [P, C] of the places whose logits are wanted, ``hidden`` itself [T', C] where that is all of them.

    Places ascend, so as many as there are tokens are all.
    """
    wanted = batch.logits_indices
    return hidden if wanted.shape[0] == hidden.shape[0] else hidden.index_select(0, wanted)


@torch.inference_mode()
def profile_forward(
    model: Model, num_tokens: int, max_model_len: int, device: torch.device, *, num_rows: int = 1
) -> None:
    """A forward of ``num_tokens`` that touches no cache, and what sampling ``num_rows`` of them takes: scratch memory
    and first-call costs come now."""
    # A step may hold more tokens than one sequence, and then more than there are positions.
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device) % max_model_len
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    if isinstance(model, AxisPositions):
        positions = positions.expand(model.num_position_axes, num_tokens)
    encoded = None
    if isinstance(model, EncoderModel):
        # What stands among the tokens is held as well while the rest is computed.
        encoded = torch.cat(list(model.encode([model.example_input(num_tokens)])))
    context = ForwardContext(
        attention_metadata=None, slot_mapping={}, kv_caches={}, num_tokens=num_tokens, encoder_hidden=encoded
    )
    with set_forward_context(context):
        hidden = last_hidden(model.forward(token_ids, positions))
    if "generate" in model.info.tasks:
        logits = model.logits(hidden[-num_rows:]).float()
        # Sampling orders a copy of all logits, and keeps probabilities beside it.
        logits.softmax(dim=-1).sort(dim=-1)

"""From prepared inputs to hidden states: metadata, the forward context, and the model's forward in it (R4.68)."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint.interfaces.model import Model, StageOutput
from hardpoint.interfaces.scheduler import ENCODER_INPUTS
from hardpoint.interfaces.step import SchedulerOutput
from hardpoint_torch_runtime.forward_context import ForwardContext, GraphMode
from hardpoint_torch_runtime.forward_scope import ForwardScopes, StaticContext
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.buffers import StagedBuffer
from hardpoint_torch_runtime.runner.graphs import GraphStore
from hardpoint_torch_runtime.runner.input_batch import InputBatch
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.micro_batch import MicroBatches
from hardpoint_torch_runtime.runner.prompt_embeddings import PromptEmbeddings
from hardpoint_torch_runtime.runner.step_shape import AS_IT_IS, StepShape, StepShapes

__all__ = ["ENCODER_INPUTS", "ForwardPass", "last_hidden"]

Forward = Callable[[torch.Tensor, torch.Tensor], torch.Tensor | StageOutput]
"""(token ids [T], positions) to what the model's forward yields."""


class ForwardPass:
    """Runs the model on one batch after another.

    Attributes:
        shapes, graphs: given together where forwards are captured.
        micro_batches: given where batches are computed in halves.
        compiled: called in place of the model's forward unless a step brings inputs of encoders (R4.65).
    """

    def __init__(
        self,
        model: Model,
        groups: AttentionGroups,
        kv: KVMemory,
        embeddings: PromptEmbeddings,
        *,
        scopes: ForwardScopes | None = None,
        shapes: StepShapes | None = None,
        graphs: GraphStore | None = None,
        micro_batches: MicroBatches | None = None,
        compiled: Forward | None = None,
    ) -> None:
        self.shapes = shapes
        self.graphs = graphs
        self.micro_batches = micro_batches
        self.compiled = compiled
        self._model = model
        self._groups = groups
        self._kv = kv
        self._embeddings = embeddings
        self._scopes = scopes or ForwardScopes(static=StaticContext.of(model))
        self._padding: StagedBuffer | None = None

    def shape(self, step: SchedulerOutput) -> StepShape:
        """What to pad ``step`` to, and how it will run. Asked before its inputs are built."""
        if self.shapes is None:
            return AS_IT_IS
        has_embeddings = self._embeddings.any_wanted(step.slots, step.num_computed_tokens)
        is_plain = ENCODER_INPUTS not in step.extensions and not has_embeddings
        return self.shapes.decide(step.num_scheduled_tokens, is_plain=is_plain)

    def run(self, batch: InputBatch, step: SchedulerOutput, shape: StepShape = AS_IT_IS) -> torch.Tensor:
        """Hidden states [T', C]; those of a graph are overwritten by its next replay."""
        is_graph = shape.graph_mode is GraphMode.FULL
        embeddings = self._embeddings.for_batch(batch, self._model)
        # New tokens of encoders belong to rows, but not to tokens of the step, by which halves are cut.
        is_whole = self.micro_batches is None or is_graph or batch.foreign is not None
        halves = None if is_whole or self.micro_batches is None else self.micro_batches.cut(batch)
        metadata, mappings = ({}, {}) if halves else self._groups.build(batch, step, for_graph=is_graph)
        facts = ForwardContext(
            attention_metadata=metadata,
            slot_mapping=mappings,
            kv_caches=self._kv.views,
            states=self._kv.states,
            num_tokens=batch.num_tokens,
            batch_descriptor=shape.descriptor,
            padding_mask=self._padding_mask(batch, shape.graph_mode),
            uncompiled_layers=self._scopes.static.layers,
            graph_mode=shape.graph_mode,
            skips_compiled=ENCODER_INPUTS in step.extensions or batch.foreign is not None,
            encoder_hidden=None if batch.foreign is None else batch.foreign.hidden,
        )
        if is_graph:
            return self._run_graph(batch, step, facts)
        if self.micro_batches is not None and halves is not None:
            return self.micro_batches.run(
                halves,
                step,
                facts,
                self._scopes,
                lambda half: self._call(half.batch, facts, None if embeddings is None else embeddings[half.tokens]),
            )
        with self._scopes.enter(facts, num_padded=len(batch.token_ids)):
            return self._call(batch, facts, embeddings)

    def release(self) -> None:
        """Give back what was captured; idempotent."""
        if self.graphs is not None:
            self.graphs.release()

    def _run_graph(self, batch: InputBatch, step: SchedulerOutput, facts: ForwardContext) -> torch.Tensor:
        """R4.53, R4.54: what is beyond the real rows and tokens writes to no slot and reads the null block."""
        graphs, key = self.graphs, facts.batch_descriptor
        if graphs is None or key is None:
            raise RuntimeError(f"step {step.step_id} is to run as a graph, but this worker captures none")
        inputs = _tensors(batch, facts)
        padded = len(batch.token_ids)
        if key not in graphs:
            # Attention writes the same keys and values each time, so that running the step again changes nothing; the
            # first time is for whatever a first call sets up.
            for run in (lambda call: call(), lambda call: graphs.capture(key, call, inputs)):
                with self._scopes.enter(facts, num_padded=padded):
                    run(lambda: self._call(batch, facts, None))
        with self._scopes.enter(facts, num_padded=padded, is_replay=True):
            return graphs.replay(key, inputs)

    def _call(self, batch: InputBatch, facts: ForwardContext, embeddings: torch.Tensor | None) -> torch.Tensor:
        """The model on what a context was entered for."""
        if embeddings is not None:
            return last_hidden(self._model.forward(None, batch.positions, embeddings=embeddings))
        forward = self._model.forward if self.compiled is None or facts.skips_compiled else self.compiled
        return last_hidden(forward(batch.token_ids, batch.positions))

    def _padding_mask(self, batch: InputBatch, mode: GraphMode) -> torch.Tensor | None:
        """bool [T'] in a buffer that stays where it is; None for a batch without padding, unless a graph reads it."""
        padded = len(batch.token_ids)
        if padded == batch.num_tokens and mode is GraphMode.NONE:
            return None
        if self._padding is None:
            largest = padded if self.shapes is None else self.shapes.largest
            self._padding = StagedBuffer((largest,), torch.bool, batch.token_ids.device)
        self._padding.host[: batch.num_tokens] = False
        self._padding.host[batch.num_tokens : padded] = True
        return self._padding.upload(padded)


def last_hidden(output: torch.Tensor | StageOutput) -> torch.Tensor:
    """The last stage's hidden states [T, C] of what a model's forward yields."""
    if not isinstance(output, StageOutput):
        return output
    if output.hidden is None:
        raise RuntimeError("the model stopped before its last layer; set pipeline_parallel_size to 1")
    return output.hidden


def _tensors(batch: InputBatch, facts: ForwardContext) -> tuple[torch.Tensor, ...]:
    """Everything of a step that a recorded forward reads at the place where it was at the capture."""
    mask = () if facts.padding_mask is None else (facts.padding_mask,)
    fixed = (batch.token_ids, batch.positions, batch.query_start_loc, batch.seq_lens)
    return (*fixed, *batch.block_tables, *batch.slot_mappings, *mask)

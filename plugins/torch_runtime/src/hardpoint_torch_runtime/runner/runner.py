"""One step on one worker: state, inputs, metadata, forward, logits, sampling, output (R4.68). Parts are injected."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.model import Model, StageOutput
from hardpoint.interfaces.step import Deferred, GrammarMask, LogprobArrays, RunnerOutput, SchedulerOutput
from hardpoint_torch_runtime.forward_context import ForwardContext, set_forward_context
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.batch_state import BatchState
from hardpoint_torch_runtime.runner.input_batch import InputBatch, InputBuilder
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.outputs import assemble_output, empty_output
from hardpoint_torch_runtime.runner.prompt_logprobs import prompt_logprobs
from hardpoint_torch_runtime.sampling.constraints import unpack_grammar_bits
from hardpoint_torch_runtime.sampling.sampler import Sampler

__all__ = ["ModelRunner", "profile_forward"]


@dataclass(frozen=True, slots=True)
class _PendingStep:
    """What sampling still needs of a forward (R4.22): consumed exactly once.

    ``batch`` is None for a step without tokens, ``logits`` [S, V] when nothing is sampled.
    """

    step: SchedulerOutput
    batch: InputBatch | None = None
    logits: torch.Tensor | None = None
    prompt_logprobs: LogprobArrays | None = None


class ModelRunner:
    """Drives a model through steps. ``groups``, ``kv`` and ``inputs`` come from the KV cache plan."""

    def __init__(
        self,
        model: Model,
        groups: AttentionGroups,
        kv: KVMemory,
        state: BatchState,
        inputs: InputBuilder,
        sampler: Sampler,
    ) -> None:
        self.model = model
        self.groups = groups
        self.kv = kv
        self.state = state
        self.inputs = inputs
        self.sampler = sampler
        self._pending: _PendingStep | None = None

    @torch.inference_mode()
    def execute(self, step: SchedulerOutput) -> RunnerOutput | Deferred:
        """Raises ``RuntimeError`` while an earlier step waits for sampling, or for a step that cannot be right."""
        if self._pending is not None:
            raise RuntimeError(f"step {self._pending.step.step_id} still waits for sampling; sample it first")
        if step.drafts is not None:
            raise RuntimeError(f"step {step.step_id} brings draft tokens, but this worker verifies none")
        self.state.apply(step)
        pending = self._compute(step)
        if step.defers_sampling:
            self._pending = pending
            return Deferred(step.step_id)
        return self._finish(pending, None)

    @torch.inference_mode()
    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput:
        """Finish the deferred step. Raises ``RuntimeError`` when another one, or none, is pending."""
        pending = self._pending
        if pending is None or pending.step.step_id != step_id:
            waiting = "none" if pending is None else f"step {pending.step.step_id}"
            raise RuntimeError(f"step {step_id} is not waiting for sampling; waiting: {waiting}")
        self._pending = None
        return self._finish(pending, grammar)

    def _compute(self, step: SchedulerOutput) -> _PendingStep:
        if step.is_empty:
            return _PendingStep(step)
        batch = self.inputs.build(step, reorder_threshold=self.groups.reorder_threshold)
        hidden = self._forward(batch, step)
        logits = self.model.logits(hidden[batch.logits_indices]) if len(batch.sample_rows) else None
        return _PendingStep(step, batch, logits, prompt_logprobs(self.model, hidden, batch, self.state))

    def _forward(self, batch: InputBatch, step: SchedulerOutput) -> torch.Tensor:
        """Hidden states [T, C]."""
        metadata, mappings = self.groups.build(batch, step)
        embeddings = self.state.embeddings.for_batch(batch, self.model)
        context = ForwardContext(
            attention_metadata=metadata, slot_mapping=mappings, kv_caches=self.kv.views, num_tokens=batch.num_tokens
        )
        with set_forward_context(context):
            if embeddings is not None:
                return _hidden(self.model.forward(None, batch.positions, embeddings=embeddings))
            return _hidden(self.model.forward(batch.token_ids, batch.positions))

    def _finish(self, pending: _PendingStep, grammar: GrammarMask | None) -> RunnerOutput:
        step, batch = pending.step, pending.batch
        if batch is None:
            return empty_output(step)
        sampled_rows = batch.step_rows[batch.sample_rows]
        failures = self._refused_rows(step)
        token_ids = np.zeros(0, dtype=np.int32)
        logprobs = None
        if pending.logits is not None:
            slots = batch.slots[batch.sample_rows]
            rows, legal = self._grammar(grammar, sampled_rows, step.num_rows, pending.logits.shape[-1])
            metadata = self.state.sampling.gather(slots, self.state.slots, grammar=legal, grammar_rows=rows)
            result = self.sampler(pending.logits, metadata)
            token_ids, logprobs = result.token_ids, result.logprobs
            for row, reason in result.failures.items():
                failures.setdefault(int(sampled_rows[row]), reason)
            self._remember(slots, token_ids, sampled_rows, failures)
        return assemble_output(
            step,
            sampled_rows=sampled_rows,
            token_ids=token_ids,
            failures=failures,
            logprobs=logprobs,
            prompt_logprobs=pending.prompt_logprobs,
        )

    def _refused_rows(self, step: SchedulerOutput) -> dict[int, str]:
        refused = self.state.refused
        if not refused:
            return {}
        return {row: refused[slot] for row, slot in enumerate(step.slots.tolist()) if slot in refused}

    def _remember(
        self, slots: np.ndarray, token_ids: np.ndarray, sampled_rows: np.ndarray, failures: dict[int, str]
    ) -> None:
        """Sampled tokens join the slots' state; the scheduler never sends them back."""
        failed = np.isin(sampled_rows, list(failures))
        self.state.remember(slots, token_ids, failed)
        for slot, row in zip(slots[failed].tolist(), sampled_rows[failed].tolist(), strict=True):
            self.state.refused.setdefault(slot, failures[row])

    @staticmethod
    def _grammar(
        mask: GrammarMask | None, sampled_rows: np.ndarray, num_rows: int, vocabulary: int
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Rows of the sampler and bool [N, V] from a mask over the step's rows; rows that do not sample drop out."""
        if mask is None or len(mask.rows) == 0:
            return None, None
        order = np.full(num_rows, len(sampled_rows), dtype=np.int64)
        order[sampled_rows] = np.arange(len(sampled_rows))
        sampler_rows = order[mask.rows]
        used = sampler_rows < len(sampled_rows)
        if not used.any():
            return None, None
        return torch.from_numpy(sampler_rows[used]), unpack_grammar_bits(mask.bits[used], vocabulary)


def _hidden(output: torch.Tensor | StageOutput) -> torch.Tensor:
    """The last stage's hidden states."""
    if not isinstance(output, StageOutput):
        return output
    if output.hidden is None:
        raise RuntimeError("the model stopped before its last layer; set pipeline_parallel_size to 1")
    return output.hidden


@torch.inference_mode()
def profile_forward(model: Model, num_tokens: int, max_model_len: int, device: torch.device) -> None:
    """A forward of ``num_tokens`` that touches no cache: its scratch memory and first-call costs come now."""
    # A step may hold more tokens than one sequence, and then more than there are positions.
    positions = torch.arange(num_tokens, dtype=torch.int64, device=device) % max_model_len
    token_ids = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    context = ForwardContext(attention_metadata=None, slot_mapping={}, kv_caches={}, num_tokens=num_tokens)
    with set_forward_context(context):
        hidden = _hidden(model.forward(token_ids, positions))
    model.logits(hidden[-1:])

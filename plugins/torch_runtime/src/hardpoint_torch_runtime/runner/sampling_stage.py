"""From logits to a step's output: sampling, verification of drafts, new drafts, and what is remembered of them.

Either the host waits for each of these (what a CPU does anyway), or everything is submitted and stays on the device,
and the output is a promise. Legend: S rows that sample, P places whose logits were computed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch

from hardpoint.interfaces.request import Int32Array
from hardpoint.interfaces.step import GrammarMask, LogprobArrays, RunnerOutput
from hardpoint.interfaces.worker import PendingOutput
from hardpoint_torch_runtime.runner.async_output import AsyncOutput, DeviceCopies
from hardpoint_torch_runtime.runner.backlog import Backlog, LaunchedStep
from hardpoint_torch_runtime.runner.batch_state import BatchState
from hardpoint_torch_runtime.runner.deferred import ForwardProducts
from hardpoint_torch_runtime.runner.device_tokens import DeviceTokens
from hardpoint_torch_runtime.runner.draft_debt import DraftDebt
from hardpoint_torch_runtime.runner.draft_verification import DraftLayout, DraftProposer, Verified, verify
from hardpoint_torch_runtime.runner.grammar_rows import PlacedMask, place_mask
from hardpoint_torch_runtime.runner.outputs import assemble_output
from hardpoint_torch_runtime.runner.samples import StepSamples
from hardpoint_torch_runtime.runner.streams import CopyStream, DeviceStreams
from hardpoint_torch_runtime.sampling.logprobs import join_logprobs
from hardpoint_torch_runtime.sampling.metadata import SamplingMetadata
from hardpoint_torch_runtime.sampling.sampler import LaunchedSample, Sampler, SamplerOutput

__all__ = ["DeviceResidence", "SamplingStage"]


@dataclass(frozen=True, slots=True)
class DeviceResidence:
    """What a runner needs whose results stay on the device: given as a whole, or not at all."""

    tokens: DeviceTokens
    debt: DraftDebt
    backlog: Backlog
    streams: DeviceStreams
    copies: CopyStream


@dataclass(frozen=True, slots=True)
class _Rows:
    """The rows of a step that sample: ``step_rows`` int64 [S] and ``slots`` int32 [S]; ``layout`` where some have
    drafts."""

    step_rows: np.ndarray
    slots: Int32Array
    layout: DraftLayout | None
    mask: PlacedMask | None

    @property
    def expected(self) -> Int32Array:
        """int32 [S], tokens if all drafts are right."""
        if self.layout is None:
            return np.ones(len(self.slots), dtype=np.int32)
        counts: Int32Array = self.layout.num_drafts + np.int32(1)
        return counts


class SamplingStage:
    """``device`` is given where outputs are promises, ``proposer`` where this worker guesses tokens ahead."""

    def __init__(
        self,
        sampler: Sampler,
        state: BatchState,
        *,
        proposer: DraftProposer | None = None,
        device: DeviceResidence | None = None,
    ) -> None:
        self._sampler = sampler
        self._state = state
        self._proposer = proposer
        self._device = device

    def finish(self, products: ForwardProducts, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        """Sample what the forward made possible."""
        batch, logits = products.batch, products.logits
        if batch is None or logits is None:
            nothing = np.zeros(0, dtype=np.int32)
            return self._assemble(products, nothing, StepSamples(nothing, nothing, {}), self._refused(products))
        step_rows, slots = batch.step_rows, batch.slots
        if len(batch.sample_rows) < batch.num_rows:
            step_rows, slots = step_rows[batch.sample_rows], slots[batch.sample_rows]
        layout = None if batch.num_drafts is None else DraftLayout.of(batch.num_drafts)
        rows = _Rows(step_rows, slots, layout, place_mask(grammar, step_rows, products.step.num_rows, layout))
        if self._device is None:
            return self._answer(products, rows, logits)
        if self._sampler.has_processors or self._state.sampling.needs_tokens(rows.slots):
            # They look at every token, and those of the steps under way are not on the host.
            self._state.settle()
            if batch.drafts is not None and layout is not None:
                self._state.write_drafts(rows.slots, layout.num_drafts, batch.drafts.cpu().numpy())
        if layout is not None and self._sampler.has_processors:
            self._device.tokens.release(rows.slots)
            return self._answer(products, rows, logits)
        return self._launch(products, rows, logits, self._device)

    # The host waits

    def _answer(self, products: ForwardProducts, rows: _Rows, logits: torch.Tensor) -> RunnerOutput:
        refused = self._refused(products)
        layout, drafts = rows.layout, None if products.batch is None else products.batch.drafts
        if layout is None or drafts is None:
            samples = StepSamples.of(self._draw(rows, logits))
            if self._proposer is not None:
                tokens = torch.from_numpy(samples.token_ids.astype(np.int64))
                samples = self._guess(rows, samples, tokens.unsqueeze(1), torch.ones_like(tokens))
            self._state.remember(rows.slots, samples)
            return self._assemble(products, rows.step_rows, samples, refused)
        if self._sampler.has_processors:
            samples = self._sample_in_turn(rows, layout, logits, drafts.cpu().numpy())
        else:
            result = self._sampler(logits, self._metadata(rows, logits.shape[-1]))
            verified = verify(torch.from_numpy(result.token_ids.astype(np.int64)), drafts.cpu(), layout)
            samples = StepSamples.of(result, layout, verified.counts.numpy().astype(np.int32))
            self._state.remember(rows.slots, samples)
        self._state.slots.num_refused[rows.slots] += rows.expected - samples.counts
        if self._proposer is not None:
            runs = np.zeros((layout.num_rows, layout.width), dtype=np.int64)
            runs[np.arange(layout.width) < samples.counts[:, None]] = samples.token_ids
            counts = torch.from_numpy(samples.counts.astype(np.int64))
            samples = self._guess(rows, samples, torch.from_numpy(runs), counts)
            self._state.keep_drafts(rows.slots, samples)
        return self._assemble(products, rows.step_rows, samples, refused)

    def _draw(self, rows: _Rows, logits: torch.Tensor) -> SamplerOutput:
        if rows.mask is None and self._state.sampling.is_plain and not self._sampler.changes_argmax:
            return self._sampler.most_probable(logits)
        return self._sampler(logits, self._metadata(rows, logits.shape[-1]))

    def _sample_in_turn(
        self, rows: _Rows, layout: DraftLayout, logits: torch.Tensor, drafts: np.ndarray
    ) -> StepSamples:
        """One place of each row after the other, as long as drafts are right: processors hear of a token before the
        next one is drawn, and cannot take it back."""
        first, num_rows = layout.first_places, layout.num_rows
        guesses = np.full((num_rows, layout.width), -1, dtype=np.int64)
        guesses[layout.rows[layout.before_drafts], layout.offsets[layout.before_drafts]] = drafts
        tokens = np.zeros((num_rows, layout.width), dtype=np.int32)
        counts: Int32Array = np.zeros(num_rows, dtype=np.int32)
        failures: dict[int, str] = {}
        logprobs: list[LogprobArrays] = []
        alive = np.arange(num_rows)
        for offset in range(layout.width):
            places, slots = first[alive] + offset, rows.slots[alive]
            metadata = self._gather(slots, rows.mask, places, logits.shape[-1])
            result = self._sampler(logits[torch.from_numpy(places).to(logits.device)], metadata)
            samples = StepSamples.of(result)
            self._state.remember(slots, samples)
            tokens[alive, offset] = samples.token_ids
            counts[alive] += 1
            failures |= {int(alive[row]): reason for row, reason in samples.failures.items()}
            if samples.logprobs is not None:
                shown = samples.logprobs
                logprobs.append(replace_rows(shown, alive[shown.rows].astype(np.int32)))
            goes_on = (guesses[alive, offset] == samples.token_ids) & ~samples.failed
            alive = alive[goes_on]
            if len(alive) == 0:
                break
        kept = np.arange(layout.width) < counts[:, None]
        return StepSamples(counts, tokens[kept], failures, join_logprobs(logprobs))

    def _guess(self, rows: _Rows, samples: StepSamples, tokens: torch.Tensor, counts: torch.Tensor) -> StepSamples:
        if self._proposer is None:
            return samples
        return replace(samples, drafts=self._proposer.propose(rows.slots, tokens, counts).cpu().numpy())

    # Everything stays on the device

    def _launch(
        self, products: ForwardProducts, rows: _Rows, logits: torch.Tensor, device: DeviceResidence
    ) -> PendingOutput:
        launched = self._sampler.launch(logits, self._metadata(rows, logits.shape[-1]))
        tensors, sampled = launched.tensors, launched.token_ids
        drafts = None if products.batch is None else products.batch.drafts
        if rows.layout is None or drafts is None:
            ones = torch.ones_like(sampled)
            verified = Verified(ones, sampled.unsqueeze(1), sampled, torch.zeros_like(sampled))
        else:
            verified = verify(sampled, drafts, rows.layout)
            tensors["num_accepted"] = verified.counts
            device.debt.charge(rows.slots, verified.refused)
        guesses = None
        if self._proposer is not None:
            guesses = tensors["guesses"] = self._proposer.propose(rows.slots, verified.tokens, verified.counts)
        device.tokens.keep(rows.slots, verified.newest, guesses)
        record = LaunchedStep(
            rows.slots,
            products.step.generations[rows.step_rows],
            rows.expected,
            DeviceCopies(tensors, device.copies),
            partial(_decode, launched, rows.layout),
        )
        refused, earlier = self._refused(products), device.backlog.steps
        device.backlog.add(record)
        self._state.slots.expect(rows.slots, rows.expected)
        return AsyncOutput(partial(self._collect, products, rows, record, earlier, refused))

    @staticmethod
    def _collect(
        products: ForwardProducts,
        rows: _Rows,
        record: LaunchedStep,
        earlier: Sequence[LaunchedStep],
        refused: dict[int, str],
    ) -> RunnerOutput:
        """On any thread: a row that failed in an ``earlier`` step fails here as well."""
        samples = record.read()
        for step in earlier:
            owners = dict(zip(step.slots.tolist(), step.generations.tolist(), strict=True))
            failed = {int(step.slots[row]): reason for row, reason in step.read().failures.items()}
            pairs = zip(products.step.slots.tolist(), products.step.generations.tolist(), strict=True)
            for row, (slot, generation) in enumerate(pairs):
                if slot in failed and owners[slot] == generation:
                    refused.setdefault(row, failed[slot])
        return SamplingStage._assemble(products, rows.step_rows, samples, refused)

    # Both

    def _metadata(self, rows: _Rows, vocabulary: int) -> SamplingMetadata:
        if rows.layout is None:
            return self._gather(rows.slots, rows.mask, None, vocabulary)
        return self._gather(rows.slots[rows.layout.rows], rows.mask, None, vocabulary, rows.layout.offsets)

    def _gather(
        self,
        slots: Int32Array,
        mask: PlacedMask | None,
        places: np.ndarray | None,
        vocabulary: int,
        num_ahead: Int32Array | None = None,
    ) -> SamplingMetadata:
        masked, legal = (None, None) if mask is None else mask.at(places, vocabulary)
        return self._state.sampling.gather(
            slots, self._state.slots, grammar=legal, grammar_rows=masked, num_ahead=num_ahead
        )

    def _refused(self, products: ForwardProducts) -> dict[int, str]:
        refused = self._state.refused
        if not refused:
            return {}
        return {row: refused[slot] for row, slot in enumerate(products.step.slots.tolist()) if slot in refused}

    @staticmethod
    def _assemble(
        products: ForwardProducts, step_rows: np.ndarray, samples: StepSamples, refused: Mapping[int, str]
    ) -> RunnerOutput:
        own = {int(step_rows[row]): reason for row, reason in samples.failures.items()}
        return assemble_output(
            products.step,
            sampled_rows=step_rows,
            samples=samples,
            failures=own | dict(refused),
            prompt_logprobs=products.prompt_logprobs,
            pooled=products.pooled,
            extensions=products.extensions,
        )


def replace_rows(logprobs: LogprobArrays, rows: Int32Array) -> LogprobArrays:
    """The same entries, of other rows."""
    return LogprobArrays(rows, logprobs.token_ids, logprobs.logprobs, logprobs.ranks)


def _decode(launched: LaunchedSample, layout: DraftLayout | None, host: Mapping[str, np.ndarray]) -> StepSamples:
    counts = host["num_accepted"].astype(np.int32) if "num_accepted" in host else None
    return StepSamples.of(launched.finish(host), layout, counts, host.get("guesses"))

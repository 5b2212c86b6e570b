"""Conformance of the plugin kind ``logits_processor``: derive from :class:`LogitsProcessorSuite` and name yours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.plugin import NoOptions, declaration_of
from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.step import NewRow
from hardpoint.interfaces.worker import Worker, WorkerContext
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.installed import installed_factory
from hardpoint_testing_torch.linear_bench import bench_info
from hardpoint_testing_torch.local_driver import worker_config
from hardpoint_testing_torch.tiny_models import TinyModel, make_tiny_model
from hardpoint_testing_torch.worker_driver import WorkerDriver
from hardpoint_testing_torch.worker_world import KitPlatform, WorkerWorld, check_greedy, installed_plugins, start_driver

__all__ = ["LogitsProcessorSuite"]

SLOTS = 6
UNDER_TEST = "kit_under_test"


class LogitsProcessorSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.logits_processor.LogitsProcessor`.

    ``sampling`` are the ``SamplingParams`` fields of a request that the processor acts on (``extensions`` and the
    like), ``other_sampling`` those of one that it leaves alone; None: it acts on every request. Tokens named there are
    below ``vocab_size``. ``prompt`` is the prompt of both, ``answer`` what was generated before (a request resumes with
    it), for processors that act on what they see of it. ``worker`` is the worker plugin that runs the processor in
    the last tests, with its option for names of processors; None leaves them out.
    """

    kind: ClassVar[str] = "logits_processor"
    vocab_size: ClassVar[int] = 160
    sampling: ClassVar[Mapping[str, Any]] = {}
    other_sampling: ClassVar[Mapping[str, Any] | None] = {}
    prompt: ClassVar[Sequence[int]] = (5, 6, 7, 5, 6)
    answer: ClassVar[Sequence[int]] = ()
    worker: ClassVar[str | None] = "torch"
    worker_option: ClassVar[str] = "logits_processors"

    def create_processor(self, ctx: WorkerContext) -> LogitsProcessor:
        """The processor under test, as its factory makes it."""
        made: LogitsProcessor = self.create_plugin(ctx)
        return made

    def fresh(self) -> LogitsProcessor:
        """A processor without requests, for ``SLOTS`` slots and ``vocab_size`` tokens on the CPU."""
        info = msgspec.structs.replace(bench_info(), vocab_size=self.vocab_size)
        config = msgspec.structs.replace(worker_config(info), max_num_seqs=SLOTS)
        return self.create_processor(self.context(WorkerContext, rank=0, config=config, device=torch.device("cpu")))

    def row(
        self, slot: int, sampling: Mapping[str, Any], generation: int = 1, answer: Sequence[int] | None = None
    ) -> NewRow:
        """A request in ``slot`` with this ``answer`` so far, by default the suite's."""
        known = (*self.prompt, *(self.answer if answer is None else answer))
        return NewRow(
            request_id=f"r{slot}.{generation}",
            slot=slot,
            generation=generation,
            token_ids=np.asarray(known, dtype=np.int32),
            num_prompt_tokens=len(self.prompt),
            block_ids=(),
            sampling=SamplingParams(**({"temperature": 0.0} | dict(sampling))),
        )

    def other(self) -> Mapping[str, Any]:
        """Fields of a request that is left alone; skips the test where there is none."""
        if self.other_sampling is None:
            pytest.skip("the processor acts on every request (other_sampling is None)")
        if self._left_alone is None:
            pytest.skip("other_sampling is the same as sampling: set it to a request that is left alone, or to None")
        return self.other_sampling

    @property
    def _left_alone(self) -> Mapping[str, Any] | None:
        return None if self.other_sampling == self.sampling else self.other_sampling

    def affected(self, *slots: int) -> LogitsProcessor:
        """A processor with a request that it acts on in each of ``slots``."""
        processor = self.fresh()
        for slot in slots:
            if not processor.add(self.row(slot, self.sampling)):
                pytest.skip(
                    f"the processor does not act on a request with sampling = {dict(self.sampling)!r}: derive a class, "
                    "set 'sampling' to a request it acts on, and name the class in the entry point "
                    "hardpoint.conformance.v1:logits_processor.<name>"
                )
        return processor

    def probes(self) -> list[torch.Tensor]:
        """Logits [1, V]: random ones, and for each token some in which it leads by little or by much."""
        generator = torch.Generator().manual_seed(0)
        found = [torch.randn(1, self.vocab_size, generator=generator) * scale for scale in (0.01, 1.0, 8.0)]
        for token in range(self.vocab_size):
            base = torch.randn(1, self.vocab_size, generator=generator) * 0.01
            base[0, token] = base.max() + (0.01 if token % 2 else 5.0)
            found.append(base)
        return found

    def apply(self, processor: LogitsProcessor, logits: torch.Tensor, slots: Sequence[int]) -> torch.Tensor:
        """The result for a copy of ``logits``, which must be of the same kind."""
        given = np.asarray(slots, dtype=np.int32)
        result = processor.apply(logits.clone(), given)
        assert given.tolist() == list(slots), "apply() wrote into the slots, which belong to the worker"
        assert isinstance(result, torch.Tensor), (
            f"apply() returns {type(result).__name__}; also one that works in place returns the logits"
        )
        assert result.shape == logits.shape, f"apply() made {list(result.shape)} of {list(logits.shape)}"
        assert result.dtype == torch.float32, f"apply() made {result.dtype} of float32"
        assert not bool(torch.isnan(result).any()), "apply() yields values that are not numbers"
        return result

    def batch(self, rows: int, seed: int = 1) -> torch.Tensor:
        return torch.randn(rows, self.vocab_size, generator=torch.Generator().manual_seed(seed)) * 3

    def test_add_says_whether_the_request_is_affected(self) -> None:
        """Both ways: an affected request is changed for some logits."""
        processor = self.affected(0)
        assert isinstance(self.fresh().add(self.row(0, self.sampling)), bool), "add() answers True or False"
        if self._left_alone is not None:
            answer = processor.add(self.row(1, self._left_alone))
            assert answer is False, f"add() answers {answer!r} for a request it leaves alone"
        changed = any(not torch.equal(self.apply(self.affected(0), probe, [0]), probe) for probe in self.probes()[:40])
        assert changed, "add() said that the request is affected, but its logits are never changed"

    def test_other_requests_keep_every_bit(self) -> None:
        """Also next to affected ones, and also where a value is minus infinity."""
        processor = self.affected(0, 3)
        for slot in (1, 2):
            processor.add(self.row(slot, self.other()))
        logits = self.batch(4)
        logits[:, 9] = -torch.inf
        result = self.apply(processor, logits, [3, 1, 0, 2])
        assert torch.equal(result[[1, 3]], logits[[1, 3]]), "rows of requests it leaves alone were changed"

    def test_what_is_observed_counts_like_what_a_row_brings(self) -> None:
        """An answer that grew token by token, two slots at a time, and one that comes whole after preemption."""
        answer = self.answer or (9, 3, 9, 3, 3)
        grown, whole = self.fresh(), self.fresh()
        for slot in (1, 4):
            grown.add(self.row(slot, self.sampling, answer=()))
            whole.add(self.row(slot, self.sampling, answer=answer))
        for token in answer:
            grown.observe(np.asarray([4, 1], dtype=np.int32), np.asarray([token, token], dtype=np.int32))
        for probe in self.probes()[::8]:
            logits = probe.expand(2, -1)
            assert torch.equal(self.apply(grown, logits, [1, 4]), self.apply(whole, logits, [1, 4])), (
                "tokens told to observe() have another effect than those of a request that resumes with them"
            )

    def test_rows_may_come_in_any_order(self) -> None:
        """Row i belongs to ``slots[i]``, whatever order the batch has."""
        logits = self.batch(3)
        given = self.apply(self._mixed(), logits, [0, 1, 4])
        for order in ([2, 0, 1], [1, 2, 0], [2, 1, 0]):
            moved = self.apply(self._mixed(), logits[order], [[0, 1, 4][index] for index in order])
            assert torch.equal(moved, given[order]), f"rows in the order {order} give another result"

    def test_a_step_need_not_hold_every_slot(self) -> None:
        logits = self.batch(3)
        given = self.apply(self._mixed(), logits, [0, 1, 4])
        for index, slot in enumerate((0, 1, 4)):
            alone = self.apply(self._mixed(), logits[index : index + 1], [slot])
            assert torch.equal(alone[0], given[index]), f"slot {slot} alone gives another result"

    def test_empty_steps(self) -> None:
        """Without rows, and without requests."""
        for processor in (self.fresh(), self._mixed()):
            assert self.apply(processor, self.batch(0), []).shape == (0, self.vocab_size)

    def test_the_logits_may_be_a_view(self) -> None:
        """Rows of a larger tensor, as the sampler passes them."""
        logits = self.batch(6)
        expected = self.apply(self.affected(0, 1), logits[::2][:2].contiguous(), [0, 1])
        view = logits.clone()[::2][:2]
        result = self.affected(0, 1).apply(view, np.asarray([0, 1], dtype=np.int32))
        assert torch.equal(result, expected)

    def test_forbidden_tokens_stay_forbidden(self) -> None:
        """Earlier stages (grammar, allowed tokens) set minus infinity; no processor may bring such a token back."""
        for seed in range(4):
            logits = self.batch(1, seed)
            logits[0, torch.randperm(self.vocab_size)[: self.vocab_size // 2]] = -torch.inf
            result = self.apply(self.affected(0), logits, [0])
            assert bool((result[logits == -torch.inf] == -torch.inf).all()), "a forbidden token can be drawn again"

    def test_removing_ends_the_effect(self) -> None:
        """A slot's next owner inherits nothing."""
        processor = self.affected(0, 1)
        processor.remove(0)
        processor.add(self.row(0, self.other(), generation=2))
        logits = self.batch(2)
        result = self.apply(processor, logits, [0, 1])
        assert torch.equal(result[0], logits[0]), "the slot's former request still acts"
        assert torch.equal(result[1:], self.apply(self.affected(1), logits[1:], [1])), "another slot's request changed"

    def test_adding_again_replaces(self) -> None:
        """Any earlier state of the slot is void, with and without a ``remove`` between."""
        processor = self.affected(0)
        self.apply(processor, self.batch(1), [0])
        processor.add(self.row(0, self.sampling, generation=2))
        logits = self.batch(1, seed=5)
        assert torch.equal(self.apply(processor, logits, [0]), self.apply(self.affected(0), logits, [0]))
        processor.add(self.row(0, self.other(), generation=3))
        assert torch.equal(self.apply(processor, logits, [0]), logits), "the request before the last one still acts"

    def test_removing_an_empty_slot_is_no_error(self) -> None:
        """Every slot that ends is reported, also of requests the processor does not know."""
        processor = self.fresh()
        processor.remove(2)
        processor.add(self.row(2, self.sampling))
        processor.remove(2)
        processor.remove(2)

    def test_instances_share_nothing(self) -> None:
        first, second = self.affected(0), self.fresh()
        second.add(self.row(0, self.other()))
        logits = self.batch(1)
        self.apply(first, logits, [0])
        assert torch.equal(self.apply(second, logits, [0]), logits), "state lies outside the instance"

    def test_argmax_invariance_is_declared_truthfully(self) -> None:
        """R6.14, both ways: one that keeps the most probable token says so and is spared for greedy requests."""
        declared = self.affected(0).argmax_invariant
        assert isinstance(declared, bool), f"argmax_invariant is {declared!r}, not True or False"
        changing = [probe for probe in self.probes() if not self._keeps_the_best(probe)]
        if declared:
            assert not changing, "argmax_invariant is declared, but another token became the most probable one"
        else:
            assert changing, (
                "the most probable token never changed: declare argmax_invariant = True, so that greedy requests "
                "need not wait for the processor"
            )

    def _keeps_the_best(self, probe: torch.Tensor) -> bool:
        # Values, not positions: among equal logits any may come first.
        result = self.apply(self.affected(0), probe, [0])
        return bool(result[0, int(probe.argmax())] >= result.max())

    def _mixed(self) -> LogitsProcessor:
        processor = self.affected(0, 4)
        if self._left_alone is not None:
            processor.add(self.row(1, self._left_alone))
        else:
            processor.add(self.row(1, self.sampling))
        return processor

    def test_a_worker_runs_it(self, tmp_path: Path) -> None:
        """It is told of every request, applied to the rows that need it, and told of the end.

        Greedy tokens are those of the processor applied by hand; requests it leaves alone get the model's own.
        """
        tiny = make_tiny_model("LlamaForCausalLM", tmp_path, vocab_size=self.vocab_size)
        recorder = _Recorder(self.affected(0))
        recorder.remove(0)
        driver = self.start_worker(tiny, recorder)
        is_random = {"temperature": 1.0, "seed": 1} if recorder.argmax_invariant else {"temperature": 0.0}
        driver.add("affected", self.prompt, sampling=SamplingParams(**{**is_random, **self.sampling}))
        other = self._left_alone
        if other is not None:
            driver.add("other", (9, 8, 7), sampling=SamplingParams(temperature=0.0, **other))
        tokens = driver.generate(8)
        assert 0 in recorder.applied, "the worker never applied the processor to the request"
        if not recorder.argmax_invariant and not self.sampling.keys() - {"extensions"}:
            assert tokens["affected"] == self._by_hand(tiny), "the worker draws other tokens than the processor allows"
        if other is not None and not other.keys() - {"extensions"}:
            check_greedy(tiny, (9, 8, 7), tokens["other"], "a request that the processor leaves alone")
        driver.finish("affected")
        driver.step()
        assert recorder.removed == [0, 0], "the processor is not told that its request has ended"

    def start_worker(self, tiny: TinyModel, processor: LogitsProcessor) -> WorkerDriver:
        """A worker that runs ``processor`` over ``tiny``; skips the test where there is none."""
        if self.worker is None:
            pytest.skip("the class leaves out the tests in a worker (worker is None)")
        try:
            factory = installed_factory("worker", self.worker)
            installed_factory("model", "LlamaForCausalLM")
        except PluginNotFoundError as error:
            pytest.skip(f"a worker and a model are needed to run it: {error}")
        world = WorkerWorld.create(tiny, installed_plugins(), KitPlatform())
        world.plugins.own["logits_processor", UNDER_TEST] = lambda ctx: processor
        declared = declaration_of(factory)
        options = declared.options if declared is not None else NoOptions
        worker: Worker = factory(world.context(self.worker), options(**{self.worker_option: (UNDER_TEST,)}))
        return start_driver(worker, world.config)

    def _by_hand(self, tiny: TinyModel) -> list[int]:
        processor, tokens = self.fresh(), list(self.prompt)
        processor.add(self.row(0, self.sampling, answer=()))  # as the worker begins, with nothing said yet
        for _ in range(8):
            tokens.append(int(self.apply(processor, tiny.logits(tokens)[-1:], [0]).argmax()))
            processor.observe(np.asarray([0], dtype=np.int32), np.asarray(tokens[-1:], dtype=np.int32))
        return tokens[len(self.prompt) :]


class _Recorder(LogitsProcessor):
    """Passes everything on to ``inner``."""

    def __init__(self, inner: LogitsProcessor) -> None:
        self.inner = inner
        self.argmax_invariant = inner.argmax_invariant
        self.applied: set[int] = set()
        self.removed: list[int] = []

    def add(self, row: NewRow) -> bool:
        return self.inner.add(row)

    def remove(self, slot: int) -> None:
        self.removed.append(slot)
        self.inner.remove(slot)

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        self.inner.observe(slots, token_ids)

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        self.applied |= set(slots.tolist())
        return self.inner.apply(logits, slots)

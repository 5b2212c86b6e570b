"""Conformance of the plugin kind ``worker``: derive from :class:`WorkerSuite` and name yours.

The worker is taken through its whole life, over a tiny random model on disk, by steps that are made here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.errors import HardpointError
from hardpoint.interfaces.request import AdapterRef, SamplingParams
from hardpoint.interfaces.step import Deferred, RunnerOutput
from hardpoint.interfaces.worker import WORKER_RPC, Worker
from hardpoint.ipc import Decoder, encode
from hardpoint_testing_torch.state_dict_loader import StateDictLoader
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_testing_torch.worker_base import PROMPTS, Start
from hardpoint_testing_torch.worker_driver import WorkerDriver, take_output
from hardpoint_testing_torch.worker_features import EMBEDDING, WorkerFeatures
from hardpoint_testing_torch.worker_world import LOADER, check_greedy, plan_kv

__all__ = ["WorkerSuite"]

POISON = 157
OUT_OF_ORDER: dict[str, tuple[tuple[str, ...], Callable[[Worker], Any]]] = {
    "load_model before init_device": ((), lambda worker: worker.load_model()),
    "kv_cache_specs before load_model": (("init_device",), lambda worker: worker.kv_cache_specs()),
    "kv_cache_budget before load_model": (("init_device",), lambda worker: worker.kv_cache_budget()),
    "initialize_kv_cache before load_model": (
        ("init_device",),
        lambda worker: worker.initialize_kv_cache(plan_kv((), 4)),
    ),
    "sample before a step": (("init_device", "load_model"), lambda worker: worker.sample(0, None)),
    "check_health before load_model": (("init_device",), lambda worker: worker.check_health()),
}
UNKNOWN = {
    "dtype": "float3_of_nobody",
    "attention_backend": "kit_of_nobody",
    "quantization": "kit_of_nobody",
    "compiler": "kit_of_nobody",
}
RANDOM = SamplingParams(temperature=0.9, seed=11, top_k=40, top_p=0.95)


class WorkerSuite(WorkerFeatures):
    """The contract of :class:`~hardpoint.interfaces.worker.Worker`.

    Set ``plugin``, or override ``create_worker``. Switches declare what a worker leaves out: its option for names of
    ``logits_processors_option`` plugins (None: it runs none), ``uses_attention_backends``, ``uses_quantization``,
    ``computes_logprobs``, ``computes_prompt_logprobs``, ``applies_grammar``, ``takes_prompt_embeddings``,
    ``learns_tokens``, ``pools``.
    """

    @pytest.mark.parametrize("name", OUT_OF_ORDER)
    def test_calls_out_of_order_are_refused(self, tiny: TinyModel, name: str) -> None:
        """In words; an ``AttributeError`` from the inside helps nobody."""
        before, call = OUT_OF_ORDER[name]
        worker = self.worker_in(self.world(tiny))
        for method in before:
            getattr(worker, method)()
        with pytest.raises((RuntimeError, HardpointError)) as caught:
            call(worker)
        assert str(caught.value).strip(), f"{name}: the error says nothing"

    @pytest.mark.parametrize("field", UNKNOWN)
    def test_what_it_was_asked_for_is_never_ignored(self, tiny: TinyModel, field: str) -> None:
        """A setting that cannot be had stops the start, naming it."""
        world = self.world(tiny, **{field: UNKNOWN[field]})
        with pytest.raises(HardpointError, match=UNKNOWN[field]):
            self._start_only(world)

    def test_layers_report_their_cache(self, tiny: TinyModel, start: Start) -> None:
        """Each layer once, in the configured block size, over the wire as well."""
        driver = start()
        specs = driver.worker.kv_cache_specs()
        names = [spec.layer_name for spec in specs]
        assert len(set(names)) == len(names) == tiny.info.config["num_hidden_layers"], f"layers with a cache: {names}"
        sizes = {msgspec.msgpack.decode(spec.spec.fields)["block_size"] for spec in specs}
        assert sizes == {driver.block_size}, f"block sizes {sizes} instead of the configured {driver.block_size}"
        assert Decoder(WORKER_RPC["kv_cache_specs"].result).decode(encode(specs)) == specs
        assert driver.worker.kv_cache_specs() == specs, "asking twice gives two answers"

    def test_the_budget_of_the_cache(self, tiny: TinyModel, start: Start) -> None:
        """As configured, or what the platform allows less what is used."""
        given = start(self.world(tiny, kv_cache_bytes=12_345)).worker.kv_cache_budget()
        assert given == 12_345, f"kv_cache_bytes is 12345, the worker says {given}"
        world = self.world(tiny)
        found = start(world).worker.kv_cache_budget()
        assert isinstance(found, int), f"the budget is {found!r}, not a number of bytes"
        assert 0 <= found <= world.platform.memory_budget(0)  # type: ignore[arg-type]

    def test_the_cache_is_made_once(self, start: Start) -> None:
        driver = start()
        with pytest.raises((RuntimeError, HardpointError)):
            driver.worker.initialize_kv_cache(plan_kv(driver.worker.kv_cache_specs(), 8))

    def test_health_and_the_end(self, tiny: TinyModel, start: Start) -> None:
        """Healthy while it can compute; shutting down is possible at any time and more than once."""
        driver = start()
        driver.worker.check_health()
        assert "generate" in driver.worker.supported_tasks()
        driver.add("few", PROMPTS["few"])
        driver.step()
        driver.worker.shutdown()
        driver.worker.shutdown()
        with pytest.raises((RuntimeError, HardpointError)):
            driver.worker.check_health()
        self.worker_in(self.world(tiny)).shutdown()

    @pytest.mark.parametrize("name", PROMPTS)
    def test_greedy_tokens_equal_the_oracles(self, tiny: TinyModel, start: Start, name: str) -> None:
        driver = start()
        driver.add(name, PROMPTS[name])
        check_greedy(tiny, PROMPTS[name], driver.generate(12)[name])

    @pytest.mark.parametrize("chunk", [1, 3, 4, 16])
    def test_chunks_change_nothing(self, tiny: TinyModel, start: Start, chunk: int) -> None:
        """Prompts in pieces, several at once, each ending elsewhere."""
        driver = start()
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        for name, tokens in driver.generate(5, chunk=chunk).items():
            check_greedy(tiny, PROMPTS[name], tokens, f"in chunks of {chunk}")

    def test_neighbors_change_nothing(self, tiny: TinyModel, start: Start) -> None:
        """Requests come and go, prompts next to single tokens, rows in another order in every step."""
        driver = start()
        driver.add("long", PROMPTS["long"])
        driver.generate(2)
        driver.add("few", PROMPTS["few"])
        driver.add("one", PROMPTS["one"])
        driver.step({"few": 7, "long": 1, "one": 1})
        driver.step({"one": 1, "few": 1})
        driver.add("block", PROMPTS["block"])
        driver.step({"block": 2, "one": 1, "long": 1})
        for name, tokens in driver.generate(8).items():
            check_greedy(tiny, PROMPTS[name], tokens, "among changing neighbors")

    def test_random_tokens_belong_to_their_request(self, start: Start) -> None:
        """R6: a seeded request draws the same tokens alone, in chunks, with neighbors, and in a warm worker."""
        alone = self._random_alone(start)
        for settings in ({"chunk": 2}, {"chunk": None}):
            driver = start(warm_up=True)
            driver.add("other", PROMPTS["long"], sampling=SamplingParams(temperature=1.0))
            driver.add("random", PROMPTS["few"], sampling=RANDOM)
            assert driver.generate(10, **settings)["random"] == alone, "neighbors or chunks change a seeded draw"

    def _random_alone(self, start: Start) -> list[int]:
        driver = start()
        driver.add("random", PROMPTS["few"], sampling=RANDOM)
        return driver.generate(10)["random"]

    def test_preempted_requests_go_on_where_they_were(self, tiny: TinyModel, start: Start) -> None:
        """In another slot and other blocks, with their own sequence of draws."""
        alone = self._random_alone(start)
        driver = start()
        driver.add("random", PROMPTS["few"], sampling=RANDOM)
        driver.add("greedy", PROMPTS["block"])
        driver.generate(4)
        driver.preempt("random")
        driver.preempt("greedy")
        driver.add("third", PROMPTS["long"])
        driver.step({"third": len(PROMPTS["long"])})
        tokens = driver.generate(10)
        assert tokens["random"] == alone, "a resumed request draws other tokens than without the interruption"
        check_greedy(tiny, PROMPTS["block"], tokens["greedy"], "a resumed request")
        check_greedy(tiny, PROMPTS["long"], tokens["third"], "the request that took its place")

    def test_slots_and_blocks_can_be_used_again(self, tiny: TinyModel, start: Start) -> None:
        """Handed to the next request in the very step that reports the end of the last one."""
        driver = start()
        driver.add("first", PROMPTS["long"], sampling=SamplingParams(temperature=0.0, logit_bias={3: 50.0}))
        driver.add("stays", PROMPTS["block"])
        assert driver.generate(3)["first"] == [3, 3, 3]
        for turn in range(3):
            slot = driver.rows["first"].slot
            driver.finish("first")
            driver.add("first", PROMPTS["few"])
            tokens = driver.generate(3 * (turn + 2))
            assert driver.rows["first"].slot == slot
            check_greedy(tiny, PROMPTS["few"], tokens["first"], "the next request in a slot")
        check_greedy(tiny, PROMPTS["block"], driver.outputs["stays"], "a request that stayed")

    def test_rows_may_share_blocks_of_the_same_step(self, tiny: TinyModel, start: Start) -> None:
        """In each layer the KV of all rows is written before any row attends."""
        driver, common = start(), list(PROMPTS["long"][:8])
        driver.add("owner", [*common, 9, 9, 1])
        driver.reserve("owner", 11)
        driver.add("guest", [*common, 5, 6])
        driver.share("guest", "owner", 8)
        driver.step({"owner": 11, "guest": 2})
        tokens = driver.generate(4)
        check_greedy(tiny, [*common, 5, 6], tokens["guest"], "a row that shares blocks")
        check_greedy(tiny, [*common, 9, 9, 1], tokens["owner"], "the row whose blocks are shared")

    def test_a_deferred_step_waits_for_its_sampling(self, tiny: TinyModel, start: Start) -> None:
        """R4.10: nothing else is executed meanwhile, and it is sampled exactly once."""
        driver = start()
        driver.add("few", PROMPTS["few"])
        step = driver.make_step(defers_sampling=True)
        answer = driver.worker.execute(step)
        assert answer == Deferred(step.step_id), f"a step that defers sampling was answered with {answer!r}"
        with pytest.raises(RuntimeError):
            driver.worker.execute(msgspec.structs.replace(step, step_id=step.step_id + 1))
        with pytest.raises(RuntimeError):
            driver.worker.sample(step.step_id + 7, None)
        driver.absorb(step, take_output(driver.worker.sample(step.step_id, None)))
        with pytest.raises(RuntimeError):
            driver.worker.sample(step.step_id, None)
        check_greedy(tiny, PROMPTS["few"], driver.generate(4)["few"], "around a deferred step")

    def test_steps_without_tokens(self, tiny: TinyModel, start: Start) -> None:
        """They tell of ended requests, deferred or not."""
        driver = start()
        driver.add("few", PROMPTS["few"])
        driver.step()
        driver.finish("few")
        assert driver.step({}).num_sampled.tolist() == []
        driver.step({}, defers_sampling=True)
        driver.add("one", PROMPTS["one"])
        check_greedy(tiny, PROMPTS["one"], driver.generate(3)["one"], "after empty steps")

    def test_results_survive_the_wire(self, start: Start) -> None:
        """Arrays of the types that the record declares."""
        driver = start()
        driver.add("few", PROMPTS["few"], sampling=SamplingParams(temperature=0.0, logprobs=1))
        output = driver.step()
        again = Decoder(WORKER_RPC["execute"].result).decode(encode(output))
        assert isinstance(again, RunnerOutput)
        assert np.array_equal(again.token_ids, output.token_ids)

    @pytest.mark.parametrize("extra", [{"task": "task_of_nobody"}, {"adapter": AdapterRef("kit", 1, "/of/nobody")}])
    def test_what_it_cannot_serve_ends_alone(self, tiny: TinyModel, start: Start, extra: dict[str, Any]) -> None:
        """A request for a task or adapter the worker lacks fails with a reason; others do not notice."""
        driver = start()
        driver.add("few", PROMPTS["few"])
        driver.add("strange", PROMPTS["block"], **extra)
        tokens = driver.generate(3)
        assert "strange" in driver.failures, f"a request with {extra} was served as if nothing were the matter"
        check_greedy(tiny, PROMPTS["few"], tokens["few"], "next to a refused request")

    def test_broken_numbers_end_one_request_alone(self, tiny: TinyModel, start: Start) -> None:
        """R6: logits that are no numbers fail their row; its slot and blocks serve the next one."""
        world = self.world(tiny)
        tensors = tiny.tensors()
        tensors[EMBEDDING] = tensors[EMBEDDING].clone()
        tensors[EMBEDDING][POISON] = torch.nan
        world.plugins.own["weight_loader", LOADER] = lambda ctx: StateDictLoader(tensors)
        driver = start(world)
        driver.add("few", PROMPTS["few"])
        driver.add("broken", [1, POISON, 5, 6, 7, 8])
        driver.add("random", PROMPTS["block"], sampling=SamplingParams(temperature=1.0, seed=4))
        driver.generate(3)
        assert set(driver.failures) == {"broken"}, f"failed: {sorted(driver.failures)}, broken was one"
        driver.finish("broken")
        driver.failures.clear()
        driver.add("next", PROMPTS["long"])
        tokens = driver.generate(5)
        assert not driver.failures, "what a broken request left behind breaks the next one"
        check_greedy(tiny, PROMPTS["few"], tokens["few"], "next to a broken request")
        check_greedy(tiny, PROMPTS["long"], tokens["next"], "in the blocks of a broken request")

    def test_warming_up_leaves_no_trace(self, tiny: TinyModel, start: Start) -> None:
        driver = start(warm_up=True)
        for name, prompt in PROMPTS.items():
            driver.add(name, prompt)
        for name, tokens in driver.generate(3).items():
            check_greedy(tiny, PROMPTS[name], tokens, "in a warm worker")

    def test_impossible_steps_are_refused(self, start: Start) -> None:
        """A row of a slot that nobody holds, or of an earlier owner, means that scheduler and worker disagree."""
        driver = start()
        driver.add("few", PROMPTS["few"])
        driver.step()
        step = driver.make_step()
        for field in ("slots", "generations"):
            wrong = msgspec.structs.replace(step, **{field: getattr(step, field) + 1})
            with pytest.raises(RuntimeError):
                driver.worker.execute(wrong)

    def test_two_workers_share_nothing(self, tiny: TinyModel, start: Start) -> None:
        """Several models are served by one process in tests and offline use."""
        drivers: list[WorkerDriver] = [start(), start()]
        for index, name in enumerate(("few", "long", "block", "one")):
            drivers[index % 2].add(name, PROMPTS[name])
        for _ in range(3):
            for driver in drivers:
                driver.step()
        for driver in drivers:
            for name, tokens in driver.outputs.items():
                check_greedy(tiny, PROMPTS[name], tokens, "beside another worker")

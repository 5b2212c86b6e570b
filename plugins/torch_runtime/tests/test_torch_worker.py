"""The whole worker over a tiny random model: continuous batching never changes a request's tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.errors import ConfigError, ModelFormatError, PluginNotFoundError, UnsupportedModelError
from hardpoint.interfaces.request import AdapterRef
from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, TokenUpdate
from hardpoint.interfaces.worker import ParallelSlice

PROMPTS = {
    "short": [5],
    "one block": [7, 8, 9, 10],
    "long": [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5, 8, 9, 7, 9, 3, 2, 3, 8, 4, 6],
    "seven": [11, 12, 13, 14, 15, 16, 17],
}


def dense_tokens(worker: Any, prompt: list[int], count: int) -> list[int]:
    """The oracle: no cache, no batch, the whole sequence anew for every token."""
    model = worker.loaded.model
    tokens = list(prompt)
    for _ in range(count):
        ids = torch.tensor(tokens)
        frequencies = torch.arange(1, 17, dtype=torch.float32) / 16
        hidden = model.table[ids] + torch.sin(torch.arange(len(tokens))[:, None] * frequencies)
        for weight in model.qkv:
            query, key, value = torch.nn.functional.linear(hidden, weight).split([16, 8, 8], dim=-1)
            query = query.view(-1, 4, 4).transpose(0, 1)
            key = key.view(-1, 2, 4).repeat_interleave(2, dim=1).transpose(0, 1)
            value = value.view(-1, 2, 4).repeat_interleave(2, dim=1).transpose(0, 1)
            mixed = torch.nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True, scale=0.5)
            hidden = hidden + mixed.transpose(0, 1).reshape(len(tokens), 16)
        tokens.append(int((hidden[-1] @ model.table.T).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("max_tokens", [32, 5, 3], ids=["whole prompts", "chunks of 5", "chunks of 3"])
def test_tokens_equal_the_dense_oracle_in_any_batch(world: Any, max_tokens: int) -> None:
    """I5.2, class 43: chunked prefill and mixed batches give what each request gets alone."""
    worker = world.start()
    requests = [world.engine_request(name, prompt) for name, prompt in PROMPTS.items()]
    together = world.generate(worker, requests, max_tokens=max_tokens)
    assert together == {name: dense_tokens(worker, prompt, 8) for name, prompt in PROMPTS.items()}


@pytest.mark.parametrize("block_outermost", [False, True], ids=["layers outermost", "blocks outermost"])
def test_stale_nan_in_the_cache_is_never_read(world: Any, block_outermost: bool) -> None:
    """P4.4: every byte of the cache is NaN before the first token; only written cells may matter."""
    worker = world.start(block_outermost=block_outermost)
    for view in worker.runner.kv.views.values():
        view.fill_(float("nan"))
    requests = [world.engine_request(name, prompt) for name, prompt in PROMPTS.items()]
    assert world.generate(worker, requests) == {
        name: dense_tokens(worker, prompt, 8) for name, prompt in PROMPTS.items()
    }


def test_slots_are_reused_without_a_trace(world: Any) -> None:
    """Class 43: three waves over the same slots and blocks, each with other parameters, equal their solo runs."""
    worker = world.start()
    scheduler = world.scheduler()
    loud = {
        "temperature": 0.9,
        "seed": 3,
        "logit_bias": {4: 5.0},
        "repetition_penalty": 1.7,
        "allowed_token_ids": (4, 5, 6, 7),
        "min_tokens": 3,
        "bad_words_token_ids": ((5,),),
    }
    first = [world.engine_request(f"a{i}", PROMPTS["long"], **loud) for i in range(6)]
    world.generate(worker, first, scheduler=scheduler)
    second = [world.engine_request(f"b-{name}", prompt) for name, prompt in PROMPTS.items()]
    tokens = world.generate(worker, second, scheduler=scheduler)
    assert tokens == {f"b-{name}": dense_tokens(worker, prompt, 8) for name, prompt in PROMPTS.items()}


def test_a_step_that_only_delivers_finished_slots_works(world: Any, make_step: Any, make_row: Any) -> None:
    worker = world.start()
    worker.execute(make_step(0, [(0, 1, 0, 2, True)], new_rows=[make_row(0, [5, 6], [1])]))
    output = worker.execute(make_step(1, finished=[0]))
    assert output.num_sampled.tolist() == []
    assert not worker.runner.state.slots.occupied.any()


def test_a_slot_may_be_finished_and_handed_out_in_one_step(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.30, P4.5: also under the same request id; nothing of the first owner remains."""
    worker = world.start()
    prompt = PROMPTS["seven"]
    row = make_row(0, prompt, [1, 2], request_id="same", logit_bias={4: 1e6})
    first = worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[row]))
    again = make_row(0, prompt, [3, 4], request_id="same", generation=2)
    second = worker.execute(make_step(1, [(0, 2, 0, 7, True)], new_rows=[again], finished=[0]))
    assert first.token_ids.tolist() == [4]
    assert second.token_ids.tolist() == dense_tokens(worker, prompt, 1)


def test_a_resumed_row_gets_its_new_blocks(world: Any, make_step: Any, make_row: Any) -> None:
    """P4.1, R4.32: after preemption the block list is replaced, not extended."""
    worker = world.start()
    prompt = PROMPTS["seven"]
    first = worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, prompt, [1, 2])]))
    known = [*prompt, *first.token_ids.tolist()]
    other = make_row(1, [9, 9, 9, 9, 9, 9, 9, 9], [2, 1])
    worker.execute(make_step(1, [(1, 1, 0, 8, True)], new_rows=[other], preempted=[0]))
    resumed = make_row(0, known, [7, 5], generation=2, num_prompt_tokens=7, resumed=True)
    output = worker.execute(make_step(2, [(0, 2, 0, 8, True)], new_rows=[resumed]))
    assert [*first.token_ids.tolist(), *output.token_ids.tolist()] == dense_tokens(worker, prompt, 2)


def test_blocks_are_zeroed_before_use(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.31: only the named blocks change, in every layer."""
    worker = world.start()
    views = worker.runner.kv.views
    for view in views.values():
        view.fill_(float("nan"))
    worker.execute(make_step(0, [(0, 1, 0, 1, True)], new_rows=[make_row(0, [5], [3])], zero=[3, 8]))
    for view in views.values():
        assert not torch.isnan(view[8]).any()
        assert torch.isnan(view[9]).all()
        assert not torch.isnan(view[3]).any()


def test_seeded_rows_continue_their_stream_after_preemption(world: Any, make_step: Any, make_row: Any) -> None:
    """R6.18, R4.33: the draw depends on seed and output position only."""
    sampling = {"temperature": 1.5, "seed": 99}
    alone = world.generate(world.start(), [world.engine_request("x", [3, 4, 5], max_tokens=6, **sampling)])["x"]
    worker = world.start()
    row = make_row(2, [3, 4, 5], [1], **sampling)
    tokens = worker.execute(make_step(0, [(2, 1, 0, 3, True)], new_rows=[row])).token_ids.tolist()
    tokens += worker.execute(make_step(1, [(2, 1, 3, 1, True)])).token_ids.tolist()
    resumed = make_row(4, [3, 4, 5, *tokens], [5, 6], generation=3, num_prompt_tokens=3, resumed=True, **sampling)
    tokens += worker.execute(make_step(2, [(4, 3, 0, 5, True)], new_rows=[resumed], preempted=[2])).token_ids.tolist()
    for step_id in range(3, 6):
        tokens += worker.execute(make_step(step_id, [(4, 3, step_id + 2, 1, True)])).token_ids.tolist()
    assert tokens == alone


def test_seeded_rows_do_not_depend_on_neighbors(world: Any) -> None:
    worker = world.start()
    mine = world.engine_request("mine", [3, 4, 5], temperature=1.2, seed=5, top_p=0.9)
    alone = world.generate(worker, [mine])["mine"]
    others = [world.engine_request(f"o{i}", [i + 1] * (i + 2), temperature=1.0) for i in range(4)]
    assert world.generate(worker, [*others, mine])["mine"] == alone


def test_nan_logits_end_one_row_only(world: Any, make_step: Any, make_row: Any) -> None:
    """Class 32: the neighbor's tokens are unharmed and the failed row yields none."""
    worker = world.start()
    with torch.no_grad():
        worker.loaded.model.table[36] = float("nan")

    def clean(hidden: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(hidden, worker.loaded.model.table[:36])

    worker.loaded.model.logits = clean
    rows = [make_row(0, [36, 1], [1]), make_row(1, [5, 6], [2])]
    output = worker.execute(make_step(0, [(0, 1, 0, 2, True), (1, 1, 0, 2, True)], new_rows=rows))
    assert output.num_sampled.tolist() == [0, 1]
    assert [(f.slot, f.generation) for f in output.failures] == [(0, 1)]
    assert "not numbers" in output.failures[0].reason
    assert len(output.token_ids) == 1


def test_features_and_adapters_are_refused_per_request(world: Any, make_step: Any, make_row: Any) -> None:
    import msgspec

    worker = world.start()
    odd = msgspec.structs.replace(make_row(0, [5], [1]), adapter=AdapterRef("mine", 1, "/x"))
    pooling = msgspec.structs.replace(make_row(2, [5], [3]), task="embed")
    output = worker.execute(
        make_step(
            0,
            [(0, 1, 0, 1, True), (1, 1, 0, 1, True), (2, 1, 0, 1, True)],
            new_rows=[odd, make_row(1, [6], [2]), pooling],
        )
    )
    assert output.num_sampled.tolist() == [0, 1, 0]
    assert "mine" in output.failures[0].reason
    assert "'embed'" in output.failures[1].reason


def test_outputs_keep_the_step_order_when_rows_are_reordered(world: Any, loop_backend: Any) -> None:
    """P4.3: with decode rows first in the batch, tokens still go to their requests."""
    world.backend = loop_backend(reorder_threshold=1)
    worker = world.start()
    requests = [world.engine_request(name, prompt) for name, prompt in PROMPTS.items()]
    assert world.generate(worker, requests, max_tokens=5) == {
        name: dense_tokens(worker, prompt, 8) for name, prompt in PROMPTS.items()
    }


def test_blocks_are_split_for_smaller_kernels(world: Any, loop_backend: Any) -> None:
    """R1.45: manager blocks of 4 tokens seen as kernel blocks of 2."""
    world.backend = loop_backend(kernel_block=2)
    worker = world.start()
    assert {view.shape[2] for view in worker.runner.kv.views.values()} == {2}
    requests = [world.engine_request(name, prompt) for name, prompt in PROMPTS.items()]
    assert world.generate(worker, requests, max_tokens=5) == {
        name: dense_tokens(worker, prompt, 8) for name, prompt in PROMPTS.items()
    }


def test_grammar_steps_are_deferred_and_masked(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.10, I4.6: execute and sample alternate; the mask decides."""
    worker = world.start()
    rows = [make_row(0, [5, 6], [1]), make_row(1, [7, 8, 9], [2])]
    step = make_step(0, [(0, 1, 0, 2, True), (1, 1, 0, 2, False)], new_rows=rows, defers_sampling=True)
    assert worker.execute(step) == Deferred(0)
    with pytest.raises(RuntimeError, match="step 0 still waits"):
        worker.execute(make_step(1))
    with pytest.raises(RuntimeError, match="waiting: step 0"):
        worker.sample(5, None)
    bits = np.zeros((2, 2), dtype=np.int32)
    bits[0, 0] = 1 << 17
    output = worker.sample(0, GrammarMask(np.asarray([0, 1], dtype=np.int32), bits))
    assert output.token_ids.tolist() == [17]
    assert output.num_sampled.tolist() == [1, 0]
    with pytest.raises(RuntimeError, match="waiting: none"):
        worker.sample(0, None)


def test_a_grammar_that_allows_nothing_fails_the_row(world: Any, make_step: Any, make_row: Any) -> None:
    worker = world.start()
    step = make_step(0, [(0, 1, 0, 1, True)], new_rows=[make_row(0, [5], [1])], defers_sampling=True)
    worker.execute(step)
    output = worker.sample(0, GrammarMask(np.zeros(1, dtype=np.int32), np.zeros((1, 2), dtype=np.int32)))
    assert output.num_sampled.tolist() == [0]
    assert "no token is allowed" in output.failures[0].reason


def test_a_deferred_step_without_tokens_still_alternates(world: Any, make_step: Any) -> None:
    worker = world.start()
    assert worker.execute(make_step(0, defers_sampling=True)) == Deferred(0)
    assert worker.sample(0, None).num_sampled.tolist() == []


def test_drafts_before_the_last_known_token_are_refused(world: Any, make_step: Any, make_row: Any) -> None:
    worker = world.start()
    drafts = TokenUpdate(np.asarray([1], dtype=np.int32), np.asarray([3], dtype=np.int32))
    with pytest.raises(RuntimeError, match="slot 0 brings 1 drafts, but does not reach"):
        worker.execute(make_step(0, [(0, 1, 0, 2, True)], new_rows=[make_row(0, [5, 6], [1])], drafts=drafts))


def test_tokens_sampled_elsewhere_are_computed_here(world: Any, make_step: Any, make_row: Any) -> None:
    worker = world.start()
    prompt = PROMPTS["seven"]
    worker.execute(make_step(0, [(0, 1, 0, 7, False)], new_rows=[make_row(0, prompt, [1, 2])]))
    first, second = dense_tokens(worker, prompt, 2)
    known = TokenUpdate(np.asarray([1], dtype=np.int32), np.asarray([first], dtype=np.int32))
    output = worker.execute(make_step(1, [(0, 1, 7, 1, True)], known_tokens=known))
    assert output.token_ids.tolist() == [second]


def test_prompt_logprobs_cover_every_position_in_any_chunking(world: Any, make_step: Any, make_row: Any) -> None:
    prompt = PROMPTS["seven"]

    def run(chunks: list[int]) -> list[RunnerOutput]:
        worker = world.start()
        row = make_row(0, prompt, [1, 2], prompt_logprobs=2)
        outputs, done = [], 0
        for step_id, count in enumerate(chunks):
            step = make_step(step_id, [(0, 1, done, count, done + count == 7)], new_rows=[row] if step_id == 0 else [])
            outputs.append(worker.execute(step))
            done += count
        return outputs

    whole = run([7])[0].prompt_logprobs
    assert whole is not None
    assert whole.token_ids[:, 0].tolist() == prompt[1:]
    assert whole.token_ids.shape == (6, 3)
    parts = [output.prompt_logprobs for output in run([3, 4])]
    # Logits are in the hundreds: their rounding is as much, whatever is left of a probability.
    np.testing.assert_allclose(
        np.concatenate([part.logprobs for part in parts if part is not None]), whole.logprobs, rtol=1e-5, atol=2e-4
    )


def test_a_resumed_row_does_not_owe_its_prompt_logprobs_again(world: Any, make_step: Any, make_row: Any) -> None:
    """They left with the first output; over a long prompt they cost more than the recomputation itself."""
    worker = world.start()
    prompt = PROMPTS["seven"]
    row = make_row(0, [*prompt, 4], [1, 2], num_prompt_tokens=7, resumed=True, prompt_logprobs=2)
    output = worker.execute(make_step(0, [(0, 1, 0, 8, True)], new_rows=[row]))
    assert output.prompt_logprobs is None
    assert len(output.token_ids) == 1


def test_prompt_embeddings_replace_token_embeddings(world: Any, make_step: Any, make_row: Any) -> None:
    import msgspec

    worker = world.start()
    prompt = PROMPTS["seven"]
    embedded = worker.loaded.model.table[torch.tensor(prompt)].numpy()
    row = msgspec.structs.replace(make_row(0, [0] * 7, [1, 2]), prompt_embeds=embedded)
    rows = [row, make_row(1, [5, 6], [3])]
    worker.execute(make_step(0, [(0, 1, 0, 3, False), (1, 1, 0, 2, True)], new_rows=rows))
    output = worker.execute(make_step(1, [(0, 1, 3, 4, True)]))
    assert output.token_ids.tolist() == dense_tokens(worker, prompt, 1)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([(0, 2, 0, 1, True)], "slot 0, generation 2"),
        ([(3, 1, 0, 1, True)], "held by nobody"),
        ([(0, 1, 0, 5, True)], "up to token 5, but 2 tokens are known"),
    ],
)
def test_impossible_steps_are_refused(world: Any, make_step: Any, make_row: Any, rows: list[Any], message: str) -> None:
    worker = world.start()
    with pytest.raises(RuntimeError, match=message):
        worker.execute(make_step(0, rows, new_rows=[make_row(0, [5, 6], [1])]))


def test_buffers_keep_their_addresses(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.55, I5.4: steps of different shape write into the same memory."""
    worker = world.start()
    built: list[tuple[int, ...]] = []
    inputs = worker.runner.inputs
    original: Callable[..., Any] = inputs.build

    def recording(*args: Any, **kwargs: Any) -> Any:
        batch = original(*args, **kwargs)
        tensors = (
            batch.token_ids,
            batch.positions,
            batch.query_start_loc,
            batch.seq_lens,
            batch.logits_indices,
            *batch.block_tables,
            *batch.slot_mappings,
        )
        built.append(tuple(tensor.data_ptr() for tensor in tensors))
        return batch

    inputs.build = recording
    requests = [world.engine_request(name, prompt) for name, prompt in PROMPTS.items()]
    world.generate(worker, requests, max_tokens=5)
    assert len(built) > 10
    assert len(set(built)) == 1


class TestStartUp:
    def test_calls_out_of_order_say_what_is_missing(self, world: Any) -> None:
        worker = world.create()
        with pytest.raises(RuntimeError, match="call init_device first"):
            worker.load_model()
        worker.init_device()
        with pytest.raises(RuntimeError, match="call load_model first"):
            worker.kv_cache_specs()
        with pytest.raises(RuntimeError, match="initialize_kv_cache first"):
            worker.execute(None)
        with pytest.raises(RuntimeError, match="no model"):
            worker.check_health()

    def test_specs_budget_tasks_warm_up_and_shutdown(self, world: Any) -> None:
        worker = world.start()
        assert [layer.layer_name for layer in worker.kv_cache_specs()] == ["layers.0.attn", "layers.1.attn"]
        assert worker.kv_cache_budget() == world.platform.budget - world.platform.used
        assert world.start(kv_cache_bytes=12345).kv_cache_budget() == 12345
        assert worker.supported_tasks() == ["generate"]
        worker.check_health()
        worker.shutdown()
        worker.shutdown()
        with pytest.raises(RuntimeError):
            worker.check_health()

    def test_profiling_stays_within_the_positions(self, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """A step may hold more tokens than a sequence; tables of positions end with the sequence."""
        worker = world.start(max_num_batched_tokens=3 * world.max_len + 1)
        forward, seen = worker.loaded.model.forward, []

        def recording(token_ids: Any, positions: Any) -> Any:
            seen.append((len(token_ids), int(positions.max())))
            return forward(token_ids, positions)

        monkeypatch.setattr(worker.loaded.model, "forward", recording)
        worker.kv_cache_budget()
        assert seen == [(3 * world.max_len + 1, world.max_len - 1)]

    def test_a_model_that_does_not_generate_is_profiled_without_its_logits(
        self, world: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        config = world.config()
        worker = world.start(model=msgspec.structs.replace(config.model, tasks=("embed",)))
        asked: list[Any] = []
        monkeypatch.setattr(worker.loaded.model, "logits", asked.append)
        worker.kv_cache_budget()
        assert asked == []

    def test_warming_up_leaves_no_trace(self, world: Any) -> None:
        """Slots, null block and the engine's stream of draws are as before."""
        requests = [world.engine_request(name, prompt, temperature=1.0) for name, prompt in PROMPTS.items()]
        cold, warm = world.start(), world.start()
        warm.warm_up()
        assert not warm.runner.state.slots.occupied.any()
        assert not any(view.any() for view in warm.runner.kv.views.values())
        assert world.generate(warm, requests) == world.generate(cold, requests)

    def test_an_unknown_architecture_is_named(self, world: Any) -> None:
        del world.plugins.factories["model", "TinyForCausalLM"]
        world.plugins.factories["model", "OtherForCausalLM"] = lambda ctx: None
        worker = world.create()
        worker.init_device()
        with pytest.raises(UnsupportedModelError, match=r"TinyForCausalLM.*installed: .*OtherForCausalLM"):
            worker.load_model()

    def test_an_unknown_dtype_is_refused(self, world: Any) -> None:
        with pytest.raises(ConfigError, match=r"'float8'.*float32, bfloat16, float16"):
            world.create(dtype="float8").init_device()

    def test_a_second_kv_cache_is_refused(self, world: Any, kv_plan: Any) -> None:
        worker = world.start()
        with pytest.raises(RuntimeError, match="exists already"):
            worker.initialize_kv_cache(kv_plan(worker.loaded.model.kv_cache_specs(), 4))

    def test_the_refused_backend_is_logged_with_its_reason(self, world: Any, caplog: Any) -> None:
        """R5.3: refusals are kept, and nothing falls back silently."""
        world.platform.candidates = ("absent", "loop")
        with caplog.at_level("INFO"):
            world.start()
        assert "absent" in caplog.text
        assert "not installed" in caplog.text
        assert "chosen" in caplog.text

    def test_a_forced_backend_that_refuses_is_an_error(self, world: Any) -> None:
        """R5.4."""
        world.backend.refusal = "head size 4 is too small"
        worker = world.create(attention_backend="loop")
        worker.init_device()
        with pytest.raises(ConfigError, match=r"'loop' was asked for but refuses: head size 4"):
            worker.load_model()

    def test_a_forced_backend_that_is_absent_is_an_error(self, world: Any) -> None:
        worker = world.create(attention_backend="flash")
        worker.init_device()
        with pytest.raises(PluginNotFoundError, match="flash"):
            worker.load_model()

    def test_no_backend_at_all_lists_every_reason(self, world: Any) -> None:
        world.platform.candidates = ("absent", "loop")
        world.backend.refusal = "no such head size"
        worker = world.create()
        worker.init_device()
        with pytest.raises(ConfigError, match=r"(?s)absent.*not installed.*loop.*no such head size"):
            worker.load_model()

    def test_a_number_of_heads_that_is_none_is_a_format_error(self, world: Any) -> None:
        import msgspec

        info = world.config().model
        worker = world.create(
            model=msgspec.structs.replace(info, config={"hidden_size": 16, "num_attention_heads": "many"})
        )
        worker.init_device()
        with pytest.raises(ModelFormatError, match="num_attention_heads = 'many'"):
            worker.load_model()

    @pytest.mark.parametrize(("ranks", "tensor", "fits"), [(2, 1, False), (4, 2, False), (2, 2, True)])
    def test_ranks_that_divide_nothing_are_refused(self, world: Any, ranks: int, tensor: int, fits: bool) -> None:
        """By the worker itself, so that workers which derive from it refuse them as well."""
        parallel = ParallelSlice(world_size=ranks, tensor_parallel_size=tensor)
        if fits:
            assert world.create(parallel=parallel).config.parallel == parallel
        else:
            with pytest.raises(ConfigError, match=f"{ranks} ranks.*set --tensor-parallel-size"):
                world.create(parallel=parallel)

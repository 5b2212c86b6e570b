"""From hidden states to embeddings, in whole steps and in chunks, beside requests that generate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from pydantic import ValidationError

from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineRequest, PendingOutput, PoolingParams, RunnerOutput
from hardpoint_torch_runtime.runner.pooling import runner_type
from hardpoint_torch_runtime.runner.pooling_plan import PoolingModel, PoolingOptions, PoolingPlan
from hardpoint_torch_runtime.worker import TorchWorkerOptions

PROMPTS: Mapping[str, list[int]] = {
    "long": [3 + i * 7 % 20 for i in range(23)],
    "short": [9, 4, 11],
    "single": [7],
    "even": [5, 5, 8, 8, 6, 6, 4, 4],
}


def start(world: Any, *tasks: str, **changes: Any) -> Any:
    model = msgspec.structs.replace(world.config().model, tasks=tasks or ("generate", "embed"))
    return world.start(model=model, **changes)


def request(world: Any, name: str, prompt: Sequence[int], **pooling: Any) -> EngineRequest:
    made: EngineRequest = world.engine_request(name, prompt)
    return msgspec.structs.replace(made, task="embed", pooling=PoolingParams(**pooling))


def run(
    world: Any, worker: Any, requests: Sequence[EngineRequest], max_tokens: int | None = None
) -> tuple[dict[str, np.ndarray], dict[str, list[int]]]:
    """Embeddings and tokens by request."""
    scheduler = world.scheduler(max_tokens=max_tokens)
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    embeddings: dict[str, np.ndarray] = {}
    for one in requests:
        assert scheduler.add(one) is None
    while scheduler.has_work():
        step = scheduler.schedule()
        answer = worker.execute(step)
        output = answer.result() if isinstance(answer, PendingOutput) else answer
        assert isinstance(output, RunnerOutput)
        for entry in scheduler.update(step, output):
            tokens[entry.request_id] += entry.new_token_ids
            if entry.pooled is not None:
                embeddings[entry.request_id] = entry.pooled
    return embeddings, tokens


def states(world: Any, worker: Any, prompt: Sequence[int]) -> np.ndarray:
    """float32 [prompt, hidden], each token's own."""
    made = request(world, "states", prompt, pooling="token_embed", normalize=False)
    return run(world, worker, [made])[0]["states"]


def pool(hidden: np.ndarray, method: str) -> np.ndarray:
    chosen = {
        "last": hidden[-1],
        "cls": hidden[0],
        "mean": hidden.astype(np.float64).mean(axis=0),
        "token_embed": hidden,
    }
    return chosen[method]


METHODS = ("last", "cls", "mean", "token_embed")


@pytest.mark.parametrize("promises", [False, True], ids=["waiting", "promised"])
@pytest.mark.parametrize("max_tokens", [32, 5, 3], ids=["whole prompts", "chunks of 5", "chunks of 3"])
@pytest.mark.parametrize("method", METHODS)
def test_any_chunks_give_the_embedding_of_the_whole(
    world: Any, worker_options: Any, method: str, max_tokens: int, promises: bool
) -> None:
    """I5.2: in one batch with prompts that generate, whose tokens do not change either; also where samples stay on the
    device."""
    worker = start(world, options=worker_options(asynchronous_output=promises))
    wanted = {name: pool(states(world, worker, prompt), method) for name, prompt in PROMPTS.items()}
    alone = run(world, worker, [world.engine_request("g", PROMPTS["even"])])[1]
    mixed = [request(world, name, prompt, pooling=method, normalize=False) for name, prompt in PROMPTS.items()]
    mixed.insert(1, world.engine_request("g", PROMPTS["even"]))
    embeddings, tokens = run(world, worker, mixed, max_tokens)
    assert tokens.pop("g") == alone["g"]
    assert not any(tokens.values())
    for name, expected in wanted.items():
        assert embeddings[name].dtype == np.float32
        # States reach 20: how a product is split over a batch shows in their last digits.
        np.testing.assert_allclose(embeddings[name], expected, rtol=1e-5, atol=2e-5)
    assert not worker.runner.state.slots.occupied.any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dimensions", [None, 1, 5])
def test_leading_entries_are_kept_and_then_scaled(world: Any, method: str, dimensions: int | None) -> None:
    """Scaling first would leave a length below 1."""
    worker, prompt = start(world), PROMPTS["long"]
    plain = pool(states(world, worker, prompt), method)[..., :dimensions]
    (scaled,) = run(world, worker, [request(world, "e", prompt, pooling=method, dimensions=dimensions)])[0].values()
    expected = plain / np.linalg.norm(plain, axis=-1, keepdims=True)
    np.testing.assert_allclose(scaled, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(np.linalg.norm(scaled, axis=-1), 1.0, rtol=1e-6)
    assert scaled.flags.c_contiguous


class _Says:
    """What a model may say of its own embeddings."""

    pooling_method = "mean"
    normalizes = False

    def __init__(self, world: Any) -> None:
        self.info = world.config().model


def test_what_the_model_says_counts_unless_the_request_says_otherwise(world: Any) -> None:
    assert isinstance(_Says(world), PoolingModel)
    says: Any = _Says(world)
    assert PoolingPlan.settle(says) == PoolingPlan("mean", False)
    worker = start(world)
    assert PoolingPlan.settle(worker.loaded.model) == PoolingPlan("last", True)
    worker.runner._pooling.plan = PoolingPlan("mean", False)
    hidden = states(world, worker, PROMPTS["short"])
    made = [
        request(world, "own", PROMPTS["short"]),
        request(world, "asked", PROMPTS["short"], pooling="cls", normalize=True),
    ]
    embeddings, _ = run(world, worker, made)
    np.testing.assert_allclose(embeddings["own"], hidden.mean(axis=0), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(embeddings["asked"], hidden[0] / np.linalg.norm(hidden[0]), rtol=1e-5, atol=1e-6)


def test_a_result_outlives_the_memory_it_came_from(world: Any, make_step: Any, make_row: Any) -> None:
    """The next step is computed where the last one was."""
    worker = start(world)
    asked = PoolingParams(pooling="cls", normalize=False)
    row = msgspec.structs.replace(make_row(0, PROMPTS["short"], [1]), task="embed", pooling=asked)
    pooling, inputs, memory = worker.runner._pooling, worker.runner.inputs, torch.ones(2, 16)
    worker.runner.state.apply(make_step(0, new_rows=[row]))
    assert pooling.collect(memory, inputs.build(make_step(1, [(0, 1, 0, 2, False)]))).results == {}
    memory.fill_(9.0)
    pooled = pooling.collect(memory[:1], inputs.build(make_step(2, [(0, 1, 2, 1, False)])))
    np.testing.assert_array_equal(pooled.results[0], np.ones(16, dtype=np.float32))


def test_positions_that_were_left_out_are_an_error(world: Any, make_step: Any, make_row: Any) -> None:
    """Their states are nowhere; what needs the last one alone goes on."""
    worker = start(world)
    row = make_row(0, PROMPTS["even"], [1, 2])
    for method in METHODS:
        asked = msgspec.structs.replace(row, task="embed", pooling=PoolingParams(pooling=method))
        step = make_step(0, [(0, 1, 4, 4, False)], new_rows=[asked], finished=[0])
        if method == "last":
            assert list(worker.execute(step).pooled) == [0]
        else:
            with pytest.raises(RuntimeError, match=f"'{method}' needs the states of all positions.* from 0 to 4"):
                worker.execute(step)


def test_what_cannot_be_embedded_fails_alone(world: Any, make_step: Any, make_row: Any) -> None:
    worker = start(world)
    poisoned = torch.full((16,), float("nan"))
    with torch.no_grad():
        worker.loaded.model.table[19] = poisoned
    cases: dict[int, dict[str, Any]] = {0: {}, 1: {"dimensions": 17}, 2: {}}
    rows = [
        msgspec.structs.replace(
            make_row(slot, [4, 5 if slot else 19], [slot + 1]), task="embed", pooling=PoolingParams(**asked)
        )
        for slot, asked in cases.items()
    ]
    output = worker.execute(make_step(0, [(slot, 1, 0, 2, False) for slot in range(3)], new_rows=rows))
    assert {failure.slot: failure.reason for failure in output.failures} == {
        0: "the embedding is not finite",
        1: "embeddings of this model have 16 dimensions, so 17 cannot be kept",
    }
    assert list(output.pooled) == [2]


def test_a_slot_forgets_who_pooled_in_it(world: Any, make_step: Any, make_row: Any) -> None:
    """P4.5: finished half-way, its slot is handed on in the same step; preempted, it begins anew."""
    worker = start(world)
    prompt, blocks = PROMPTS["even"], [1, 2]
    asked = PoolingParams(pooling="mean", normalize=False)
    row = msgspec.structs.replace(make_row(0, prompt, blocks), task="embed", pooling=asked)
    worker.execute(make_step(0, [(0, 1, 0, 5, False)], new_rows=[row]))
    again = msgspec.structs.replace(row, generation=2, resumed=True)
    output = worker.execute(make_step(1, [(0, 2, 0, 8, False)], new_rows=[again], preempted=[0]))
    np.testing.assert_allclose(output.pooled[0], states(world, start(world), prompt).mean(axis=0), rtol=1e-5, atol=1e-6)
    half = msgspec.structs.replace(row, generation=3)
    worker.execute(make_step(2, [(0, 3, 0, 5, False)], new_rows=[half], finished=[0]))
    generates = make_row(0, prompt, blocks, generation=4)
    output = worker.execute(make_step(3, [(0, 4, 0, 8, True)], new_rows=[generates], finished=[0]))
    assert (output.pooled, output.num_sampled.tolist()) == ({}, [1])


def test_only_tasks_of_the_model_are_computed(world: Any, make_step: Any, make_row: Any) -> None:
    worker = start(world, "generate")
    row = msgspec.structs.replace(make_row(0, [4, 5], [1]), task="embed", pooling=PoolingParams())
    (failure,) = worker.execute(make_step(0, [(0, 1, 0, 2, False)], new_rows=[row])).failures
    assert failure.reason == "the task 'embed' is not served: this model serves generate"


def test_a_model_that_only_pools_is_a_pooling_model(world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4.21: and one that also generates is none. Nothing asks the first for logits, warming up included."""
    assert runner_type(start(world).config.model) == "generate"
    worker = start(world, "embed")
    assert runner_type(worker.config.model) == "pooling"
    asked: list[Any] = []
    monkeypatch.setattr(worker.loaded.model, "logits", asked.append)
    worker.warm_up()
    embeddings, _ = run(world, worker, [request(world, "e", PROMPTS["long"])], 5)
    assert embeddings["e"].shape == (16,)
    assert asked == []
    assert not worker.runner.state.slots.occupied.any()


class _Judges(_Says):
    """Tells two labels apart, by the first two entries of states and twice the third."""

    pooling_method = "last"

    class _Head:
        activation = "softmax"

        def __call__(self, states: torch.Tensor) -> torch.Tensor:
            return torch.stack((states[:, 0] + states[:, 1], 2 * states[:, 2]), dim=-1) / 10

    @property
    def score_head(self) -> Any:
        return self._Head()


def judge(world: Any, pooling: str = "last", **options: Any) -> PoolingPlan:
    model: Any = _Judges(world)
    model.pooling_method = pooling
    return PoolingPlan.settle(model, PoolingOptions(**options))


@pytest.mark.parametrize("max_tokens", [32, 5])
@pytest.mark.parametrize("method", ["last", "mean", "cls", "token_embed"])
def test_scores_are_made_of_pooled_states(world: Any, method: str, max_tokens: int) -> None:
    """Over chunks too; raw where a request wants no activation."""
    worker, prompt = start(world), PROMPTS["long"]
    hidden = states(world, worker, prompt)
    worker.runner._pooling.plan = plan = judge(world, method)
    assert plan.head is not None
    raw = plan.head(torch.from_numpy(np.atleast_2d(pool(hidden, method))).float())
    asked = [request(world, "shares", prompt), request(world, "raw", prompt, normalize=False)]
    found, _ = run(world, worker, asked, max_tokens)
    np.testing.assert_allclose(np.atleast_2d(found["raw"]), raw.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(np.atleast_2d(found["shares"]), raw.softmax(-1).numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("max_tokens", [32, 3])
def test_steps_are_judged_where_they_end(world: Any, max_tokens: int) -> None:
    """One row for each token of that id, whichever chunk it comes in."""
    worker, prompt = start(world), PROMPTS["even"]
    hidden = states(world, worker, prompt)
    worker.runner._pooling.plan = plan = judge(
        world, "token_embed", pooling_method="step", step_token_id=6, score_activation="none"
    )
    assert plan.head is not None
    found, _ = run(world, worker, [request(world, "s", prompt)], max_tokens)
    expected = plan.head(torch.from_numpy(hidden[[index for index, one in enumerate(prompt) if one == 6]]))
    assert found["s"].shape == (2, 2)
    np.testing.assert_allclose(found["s"], expected.numpy(), rtol=1e-5, atol=1e-5)


def test_labels_by_the_logits_of_tokens(world: Any) -> None:
    """What a model that generates says behind the last token."""
    worker, prompt = start(world, options=options(label_token_ids=(4, 9))), PROMPTS["long"]
    assert worker.supported_tasks() == ["generate", "embed", "classify"]
    found, _ = run(world, worker, [request(world, "raw", prompt, normalize=False), request(world, "s", prompt)], 5)
    plain = start(world)
    assert plain.supported_tasks() == ["generate", "embed"]
    logits = plain.loaded.model.logits(torch.from_numpy(states(world, plain, prompt)[-1:]))[0, [4, 9]]
    np.testing.assert_allclose(found["raw"], logits.numpy(), rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found["s"], logits.softmax(-1).numpy(), rtol=1e-4, atol=1e-6)


def test_files_beside_a_reranker_name_its_tokens(world: Any) -> None:
    beside = {"pooling_method": "last", "normalizes": False, "other_modules": [], "label_token_ids": [9, 4]}
    model = world.config().model
    told = msgspec.structs.replace(
        model, tasks=("generate", "embed"), config={**model.config, "sentence_embedding": beside}
    )
    worker = world.start(model=told)
    assert worker.supported_tasks() == ["generate", "embed", "classify"]
    (found,) = run(world, worker, [request(world, "s", PROMPTS["short"])])[0].values()
    plain = start(world, options=options(label_token_ids=(4, 9)))
    (expected,) = run(world, plain, [request(world, "s", PROMPTS["short"])])[0].values()
    np.testing.assert_allclose(found, expected[::-1], rtol=1e-5)


def options(**pooling: Any) -> TorchWorkerOptions:
    return TorchWorkerOptions(**pooling)


def test_what_the_operator_set_counts_against_the_models_word(world: Any) -> None:
    worker, prompt = start(world, options=options(pooling_method="mean", normalize_embeddings=False)), PROMPTS["short"]
    (found,) = run(world, worker, [request(world, "e", prompt)])[0].values()
    np.testing.assert_allclose(found, states(world, worker, prompt).mean(axis=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"dimensions": 1}, "gives scores, which cannot be cut"),
        ({"pooling": "mean"}, "gives scores by the pooling 'last' alone, not 'mean'"),
    ],
)
def test_what_scores_cannot_be_asked_by(world: Any, make_step: Any, make_row: Any, asked: Any, told: str) -> None:
    worker = start(world)
    worker.runner._pooling.plan = judge(world)
    row = msgspec.structs.replace(make_row(0, [4, 5], [1]), task="embed", pooling=PoolingParams(**asked))
    (failure,) = worker.execute(make_step(0, [(0, 1, 0, 2, False)], new_rows=[row])).failures
    assert told in failure.reason


def test_sizes_and_steps_that_are_not_there(world: Any, make_step: Any, make_row: Any) -> None:
    worker = start(world)
    cases: tuple[tuple[PoolingPlan, dict[str, Any], str], ...] = (
        (PoolingPlan(dimensions=(4, 8)), {"dimensions": 5}, "can be cut to 4, 8 dimensions, not to 5"),
        (PoolingPlan("step", step_token_id=7), {}, "holds no token 7, which ends a step"),
    )
    for plan, asked, told in cases:
        worker.runner._pooling.plan = plan
        row = msgspec.structs.replace(make_row(0, [4, 5], [1]), task="embed", pooling=PoolingParams(**asked))
        (failure,) = worker.execute(make_step(0, [(0, 1, 0, 2, False)], new_rows=[row], finished=[0])).failures
        assert told in failure.reason
    worker.runner._pooling.plan = PoolingPlan(dimensions=(4, 8))
    row = msgspec.structs.replace(make_row(0, [4, 5], [1]), task="embed", pooling=PoolingParams(dimensions=8))
    assert worker.execute(make_step(0, [(0, 1, 0, 2, False)], new_rows=[row], finished=[0])).pooled[0].shape == (8,)


@pytest.mark.parametrize(
    "wrong",
    [
        {"pooling_method": "step"},
        {"step_token_id": 3},
        {"label_token_ids": (3,)},
        {"label_token_ids": (3, 3)},
        {"label_token_ids": (3, -1)},
        {"label_token_ids": (3, 4), "pooling_method": "mean"},
        {"pooling_method": "max"},
        {"score_activation": "tanh"},
    ],
    ids=str,
)
def test_options_that_fit_no_model(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        PoolingOptions(**wrong)


def test_options_that_do_not_fit_the_model(world: Any) -> None:
    """Refused before anything is loaded, where that can be said so early."""
    with pytest.raises(ConfigError, match="by the token 9000, but .* has ids from 0 to"):
        world.create(options(label_token_ids=(3, 9000)))
    embeds = msgspec.structs.replace(world.config().model, tasks=("embed",))
    with pytest.raises(ConfigError, match="label_token_ids does not fit: .* predicts no tokens"):
        world.create(options(label_token_ids=(3, 4)), model=embeds)
    with pytest.raises(ConfigError, match="score_activation does not fit: .* gives embeddings and no scores"):
        world.start(options(score_activation="none"))
    for wrong, told in (
        ({"pooling_method": "mean"}, "pooling_method=mean does not fit: .* trained on the pooling 'last'"),
        ({"normalize_embeddings": True}, "normalize_embeddings does not fit: .* scores, which have no length"),
        ({"label_token_ids": (3, 4)}, "label_token_ids does not fit: .* has a head of labels already"),
    ):
        with pytest.raises(ConfigError, match=told):
            judge(world, **wrong)

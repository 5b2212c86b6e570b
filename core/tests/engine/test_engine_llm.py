"""The offline front end over fakes, in one process."""

from __future__ import annotations

import itertools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

import hardpoint
from hardpoint.engine.build import build_engine
from hardpoint.engine.frontend import Frontend
from hardpoint.engine.llm import LLM, PromptLike
from hardpoint.errors import EngineDeadError, InvalidRequestError, ModelFormatError
from hardpoint.interfaces import FinishReason, ModelLimits, Prompt, SamplingParams
from hardpoint.launch import Launch
from hardpoint.plugins.report import PluginState
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeChatRenderer, FakeExecutor, FakeTokenizer, next_token

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
MakeLLM = Callable[..., LLM]


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 130, 35))
    return tokens[len(prompt) :]


@pytest.fixture
def make_llm(make_spec: Callable, make_runtime: Callable) -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(**options: object) -> LLM:
        spec, runtime = make_spec(**options), make_runtime()
        frontend = Frontend.from_spec(spec, runtime)
        made.append(LLM.from_parts(build_engine(spec, runtime), frontend, max_unfinished=spec.max_unfinished))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def test_prompts_of_every_form_come_back_in_order(make_llm: MakeLLM) -> None:
    llm = make_llm()
    asked: list[PromptLike] = ["hello", [40, 41], Prompt(text="x", add_special_tokens=False)]
    outputs = llm.generate(asked, GREEDY)
    prompts = [llm.tokenizer.encode("hello"), [40, 41], llm.tokenizer.encode("x", add_special_tokens=False)]
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.prompt_token_ids) == prompt
        assert list(output.outputs[0].token_ids) == expected(prompt, 6)
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
        assert output.finished
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert outputs[0].prompt == "hello"


def test_one_text_and_one_list_of_ids_are_one_prompt_each(make_llm: MakeLLM) -> None:
    llm = make_llm()
    assert len(llm.generate("hello", GREEDY)) == 1
    assert llm.generate([40, 41], GREEDY)[0].prompt_token_ids == (40, 41)
    assert llm.generate([], GREEDY) == []


def test_each_prompt_may_have_its_own_params(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = [SamplingParams(temperature=0.0, max_tokens=count) for count in (1, 5, 3)]
    outputs = llm.generate(["a", "b", "c"], params)
    assert [output.outputs[0].num_generated_tokens for output in outputs] == [1, 5, 3]
    with pytest.raises(InvalidRequestError, match="2 params for 3 prompts"):
        llm.generate(["a", "b", "c"], params[:2])


def test_calls_without_params_get_a_bounded_answer(make_llm: MakeLLM) -> None:
    llm = make_llm(model_limits=ModelLimits(vocab_size=130, max_model_len=1000))
    (output,) = llm.generate([[40]])
    assert output.outputs[0].num_generated_tokens == 127  # The engine's own context ends before the 256 of the default.
    (output,) = make_llm().generate([[40] * 100])
    assert output.outputs[0].num_generated_tokens == 28


def test_a_batch_longer_than_the_queue_is_fed_in_turns(make_llm: MakeLLM) -> None:
    llm = make_llm(limits={"max_num_seqs": 2, "max_waiting": 1})
    prompts = [[40 + i % 50, 41] for i in range(30)]
    outputs = llm.generate(prompts, GREEDY)
    assert [list(output.outputs[0].token_ids) for output in outputs] == [expected(prompt, 6) for prompt in prompts]


def test_nothing_runs_when_one_prompt_is_bad(make_llm: MakeLLM) -> None:
    llm = make_llm()
    with pytest.raises(InvalidRequestError, match="empty"):
        llm.generate(["fine", ""], GREEDY)
    assert llm.core.num_live == 0
    assert llm.core.num_steps == 0


def test_stop_strings_and_several_sequences_work_offline(make_llm: MakeLLM) -> None:
    llm = make_llm()
    text = llm.tokenizer.decode(expected([40, 41], 40))
    params = SamplingParams(n=2, seed=1, max_tokens=40, stop=(text[9:12],))
    (output,) = llm.generate([[40, 41]], params)
    assert [one.text for one in output.outputs] == [text[: text.find(text[9:12])]] * 2
    llm.generate([[40, 41]], GREEDY)
    assert llm.core.num_live == 0


def test_a_chat_is_rendered_through_the_template(make_llm: MakeLLM) -> None:
    llm = make_llm()
    conversation = [{"role": "user", "content": "hi"}]
    (alone,) = llm.chat(conversation, GREEDY)
    assert llm.tokenizer.decode(alone.prompt_token_ids) == "<user>hi\n<assistant>"
    both = llm.chat([conversation, conversation], GREEDY)
    assert [output.outputs[0].token_ids for output in both] == [alone.outputs[0].token_ids] * 2


def test_chats_and_completions_have_one_bound_of_characters() -> None:
    frontend = Frontend(FakeTokenizer(), ModelLimits(vocab_size=300, max_model_len=10), FakeChatRenderer())
    with pytest.raises(InvalidRequestError, match="641 characters; at most 640") as caught:
        frontend.render_chat([{"role": "user", "content": "x" * 641}])
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")
    with pytest.raises(InvalidRequestError, match="641 characters; at most 640"):
        frontend.inputs.tokenize(Prompt(text="x" * 641))


@pytest.mark.parametrize("stops", [{"stop_token_ids": (7,)}, {"stop_token_ids": (7,), "ignore_eos": True}, {}])
def test_constraints_that_leave_no_token_are_refused(stops: dict[str, Any]) -> None:
    inputs = Frontend(
        FakeTokenizer(), ModelLimits(vocab_size=300, max_model_len=10), FakeChatRenderer(), eos_token_ids=(2,)
    ).inputs
    only = (7,) if stops else (2,)
    with pytest.raises(InvalidRequestError, match="set min_tokens to 0") as caught:
        inputs.process(Prompt(text="a"), SamplingParams(min_tokens=1, allowed_token_ids=only, **stops))
    assert (caught.value.param, caught.value.code) == ("allowed_token_ids", "invalid_value")
    for min_tokens, allowed in ((0, only), (1, (*only, 9))):
        inputs.process(Prompt(text="a"), SamplingParams(min_tokens=min_tokens, allowed_token_ids=allowed, **stops))
    inputs.process(Prompt(text="a"), SamplingParams(min_tokens=1, allowed_token_ids=(2,), ignore_eos=True))


def test_a_failing_engine_raises_and_stays_dead(make_llm: MakeLLM) -> None:
    llm = make_llm(script={"step_error_at": 3})
    for _ in range(2):
        with pytest.raises(EngineDeadError, match="the device fell off"):
            llm.generate(["a", "b"], GREEDY)


def test_an_interrupt_ends_what_was_running(make_llm: MakeLLM, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    step = llm.core.step
    calls = []

    def interrupted() -> object:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt
        return step()

    monkeypatch.setattr(llm.core, "step", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], GREEDY)
    assert llm.core.num_live == 0
    assert llm.generate([[40, 41]], GREEDY)[0].outputs[0].token_ids == tuple(expected([40, 41], 6))


def test_progress_is_one_rewritten_line(make_llm: MakeLLM, capsys: pytest.CaptureFixture[str]) -> None:
    make_llm().generate(["a", "b"], GREEDY, show_progress=True)
    assert capsys.readouterr().err.endswith("2/2 prompts\n")


def test_the_constructor_takes_its_launcher(make_spec: Callable, make_runtime: Callable) -> None:
    asked: list[object] = []

    def launch(model: str, settings: Mapping[str, object], roles: frozenset[ProcessRole]) -> Launch:
        asked.append((model, dict(settings), roles))
        return Launch(make_spec(), make_runtime())

    with LLM("fake", launch=launch, dtype="float32") as llm:
        assert llm.generate([[40, 41]], GREEDY)[0].finished
    roles = frozenset({ProcessRole.API, ProcessRole.ENGINE, ProcessRole.WORKER})
    assert asked == [("fake", {"dtype": "float32"}, roles)]
    executor = llm.core.executor
    assert isinstance(executor, FakeExecutor)
    assert executor.is_shut_down
    llm.shutdown()


def test_a_failed_load_stops_the_workers(make_spec: Callable, make_runtime: Callable) -> None:
    with pytest.raises(ModelFormatError, match="cut short"):
        build_engine(make_spec({"load_error": "cut short"}), make_runtime())


def test_facts_of_a_loaded_engine(make_spec: Callable, make_runtime: Callable) -> None:
    spec, runtime = make_spec(num_blocks=33), make_runtime()
    core = build_engine(spec, runtime)
    num_blocks = core.scheduler.stats().num_total_blocks
    facts = (core.executor.supported_tasks(), num_blocks, num_blocks * spec.worker_config.block_size)
    assert facts == (("generate", "embed"), 32, 128)
    created = {status.kind for status in core.load_reports()[0].of(PluginState.CREATED)}
    assert {"executor", "scheduler", "worker", "kv_layout", "kv_cache_spec"} <= created
    core.shutdown()


def test_the_package_exports_its_front_ends_lazily() -> None:
    code = (
        "import sys, hardpoint; assert not [m for m in sys.modules if m.startswith('hardpoint.engine')]; hardpoint.LLM"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
    assert hardpoint.LLM is LLM
    with pytest.raises(AttributeError, match="LMM"):
        hardpoint.LMM  # noqa: B018


@pytest.fixture
def ctrl_c() -> Iterator[None]:
    """The handler of an interactive Python, whatever the test runner has in its place."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c")
def test_an_interrupt_ends_the_call_between_steps_and_harms_nobody(make_llm: MakeLLM) -> None:
    """However the signal falls, scheduler and workers stay of one mind."""
    llm = make_llm(script={"step_delay_s": 0.02})
    params = SamplingParams(max_tokens=100, temperature=0.0, ignore_eos=True)
    for delay in (0.05, 0.13, 0.211):
        timer = threading.Timer(delay, signal.raise_signal, (signal.SIGINT,))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            llm.generate([[40, 41, 42]], params)
        timer.join()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        assert not list(llm.core.scheduler.live_request_ids())
    assert len(llm.generate([[40, 41, 42]], SamplingParams(max_tokens=5, temperature=0.0))[0].outputs[0].token_ids) == 5


def test_streams_read_in_turns_lose_nothing(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    first, second = (llm.stream([[40, 41, number]], params) for number in (42, 43))
    pairs = list(itertools.zip_longest(first, second))
    for lane in (0, 1):
        outputs = [pair[lane][1] for pair in pairs if pair[lane] is not None]
        assert outputs[-1].finished
        assert len(outputs[-1].outputs[0].token_ids) == 6


def test_a_call_inside_a_stream_does_not_cut_it_short(make_llm: MakeLLM) -> None:
    llm = make_llm()
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    seen = []
    for _, output in llm.stream([[40, 41, 42]], params):
        seen.append(output)
        llm.generate([[50, 51]], params)
    assert seen[-1].finished
    assert len(seen[-1].outputs[0].token_ids) == 6


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, b"bytes"], ids=repr)
def test_what_is_no_prompt_is_refused_by_name(make_llm: MakeLLM, prompts: Any) -> None:
    with pytest.raises(InvalidRequestError, match="prompts are a text, token ids or a list of such") as refused:
        make_llm().generate(prompts)
    assert refused.value.param == "prompts"


def test_prompts_may_come_from_a_generator(make_llm: MakeLLM) -> None:
    prompts: Any = ([40, number] for number in (41, 42))
    results = make_llm().generate(prompts, SamplingParams(max_tokens=2))
    assert len(results) == 2

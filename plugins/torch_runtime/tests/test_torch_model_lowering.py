"""Which compiler a worker runs, when, and what it says about every range of layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces.compiler import Compiler, LoweredRange, TokenRange
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.plugin import NoOptions
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_torch_runtime.lowering import ResumingCompiler
from hardpoint_torch_runtime.model_lowering import ModelLowering, create_none

WHOLE = LoweredRange(("a", "b", "c"), TokenRange(1, 8))


class Recorder(Compiler):
    """Says what it is told to say, and remembers the models it was given."""

    name = "recorder"

    def __init__(self, *later: list[LoweredRange] | None) -> None:
        self.models: list[object] = []
        self.later = list(later)

    def lower(self, model: Any) -> list[LoweredRange]:
        self.models.append(model)
        return [LoweredRange((), None, "not yet") if self.later else WHOLE]

    def resume(self) -> list[LoweredRange] | None:
        return self.later.pop(0)

    @property
    def is_waiting(self) -> bool:
        return bool(self.later)


@pytest.fixture
def messages(caplog: pytest.LogCaptureFixture) -> Callable[[], list[str]]:
    caplog.set_level(logging.INFO)
    return lambda: [record.message for record in caplog.records if "lowered" in record.message]


def test_every_range_is_told_with_its_tokens_or_its_reason(messages: Callable[[], list[str]]) -> None:
    class Two(Recorder):
        def lower(self, model: Any) -> list[LoweredRange]:
            return [WHOLE, LoweredRange(("d", "e"), None, "they are odd"), LoweredRange((), None, "all is odd")]

    lowering = ModelLowering(Two(), logging.getLogger("test"))
    lowering.lower(object())  # type: ignore[arg-type]
    assert messages() == [
        "lowered by recorder for steps of 1 to 8 tokens: 3 layers from a to c",
        "not lowered by recorder: d and e: they are odd",
        "not lowered by recorder: the whole model: all is odd",
    ]
    assert [one.layer_names for one in lowering.ranges] == [("a", "b", "c"), ("d", "e"), ()]


def test_none_is_a_compiler_that_says_so() -> None:
    context = WorkerContext("none", 1, frozenset())
    (refused,) = create_none(context, NoOptions()).lower(object())
    assert (refused.tokens, refused.reason) == (None, "--compiler none was given")


class TestInTheWorker:
    def test_it_lowers_the_loaded_model_before_the_first_forward(self, world: Any) -> None:
        compiler = Recorder()
        world.plugins.factories["compiler", "recorder"] = lambda context: compiler
        worker = world.start(compiler="recorder")
        assert compiler.models == [worker.loaded.model]
        assert worker.lowering is not None
        assert worker.lowering.ranges == [WHOLE]

    def test_it_is_asked_between_steps_until_it_has_lowered_the_model(self, world: Any) -> None:
        compiler = Recorder(None, None, [WHOLE])
        assert isinstance(compiler, ResumingCompiler)
        world.plugins.factories["compiler", "recorder"] = lambda context: compiler
        request = world.engine_request("one", [1, 2, 3])
        plain = world.generate(world.start(), [request])
        assert world.generate(world.start(compiler="recorder"), [request]) == plain
        assert compiler.later == []

    def test_one_that_is_not_installed_stops_the_start_before_weights_are_read(self, world: Any) -> None:
        worker = world.create(compiler="nobodys")
        worker.init_device()
        with pytest.raises(PluginNotFoundError, match="nobodys"):
            worker.load_model()

    def test_the_platforms_own_is_taken_where_none_is_named(
        self, world: Any, messages: Callable[[], list[str]]
    ) -> None:
        compiler = Recorder()
        world.plugins.factories["compiler", "recorder"] = lambda context: compiler
        prefers(world.platform, "recorder")
        assert world.start().lowering is not None
        assert len(compiler.models) == 1
        del world.plugins.factories["compiler", "recorder"]

    def test_the_platforms_own_may_be_missing(self, world: Any, caplog: pytest.LogCaptureFixture) -> None:
        prefers(world.platform, "recorder")
        assert world.start().lowering is None
        assert "compiler 'recorder'" in caplog.text
        assert "is not installed or not allowed" in caplog.text

    def test_kernels_chosen_by_hand_are_not_taken_away(
        self, world: Any, worker_options: Any, messages: Callable[[], list[str]]
    ) -> None:
        compiler = Recorder()
        world.plugins.factories["compiler", "recorder"] = lambda context: compiler
        prefers(world.platform, "recorder")
        options = worker_options(kernel_overrides={"rms_norm": "reference"})
        assert world.start(options).lowering is None
        assert messages() == ["not lowered by recorder: kernels of rms_norm were chosen by hand"]
        assert world.start(options, compiler="recorder").lowering is not None


def prefers(platform: Platform, name: str) -> None:
    platform.default_compiler = name  # type: ignore[attr-defined]

"""What a logits processor or kernel does wrong in a step is told with the plugin's name and distribution."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.errors import PluginError
from hardpoint.interfaces.kernel_override import KernelOverride
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.ops import SEAMS, check_signature
from hardpoint_torch_runtime.plugin_faults import NamedLogitsProcessor, named_kernel

LABEL = r"logits_processor:odd \(tiny-distribution\)"


class Odd(LogitsProcessor):
    """Does ``result`` to the logits, and raises in the method called ``fails``."""

    def __init__(
        self, result: Callable[[torch.Tensor], Any] = lambda x: x, fails: str = "", invariant: bool = False
    ) -> None:
        self.argmax_invariant = invariant
        self._result, self._fails = result, fails

    def _enter(self, method: str) -> None:
        if method == self._fails:
            raise ValueError("x")

    def add(self, row: NewRow) -> bool:
        self._enter("add")
        return True

    def remove(self, slot: int) -> None:
        self._enter("remove")

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        self._enter("observe")

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        self._enter("apply")
        result: torch.Tensor = self._result(logits)
        return result


def run(world: Any, worker_options: Any, processor: object, **sampling: Any) -> Any:
    world.plugins.factories["logits_processor", "odd"] = lambda ctx: processor
    worker = world.start(worker_options(logits_processors=("odd",)))
    requests = [world.engine_request(name, [1, 2, 3], **sampling) for name in "ab"]
    return world.generate(worker, requests)


@pytest.mark.parametrize("invariant", [False, True])
@pytest.mark.parametrize(
    ("result", "told"),
    [
        (lambda x: x[:, :5], r"float32 \[2, 5\]"),
        (lambda x: x[:1], "float32 "),
        (lambda x: x.to(torch.bfloat16), "bfloat16"),
        (lambda x: x.to(torch.float64), "float64"),
        (lambda x: x.to("meta"), r"float32 .* on meta"),
        (lambda x: None, "None"),
        (lambda x: x.numpy(), "a ndarray"),
    ],
)
def test_logits_of_another_form_are_refused(
    world: Any, worker_options: Any, invariant: bool, result: Callable[[torch.Tensor], Any], told: str
) -> None:
    """At either place of the chain: tokens drawn from them would look like an answer."""
    with pytest.raises(PluginError, match=f"{LABEL} returned {told}.* float32 "):
        run(world, worker_options, Odd(result, invariant=invariant), temperature=1.0, seed=1)


@pytest.mark.parametrize("method", ["add", "remove", "observe", "apply"])
def test_whatever_it_raises_is_told_under_its_name(world: Any, worker_options: Any, method: str) -> None:
    world.max_seqs = 1  # The second request takes the slot of the first.
    with pytest.raises(PluginError, match=f"{LABEL} failed in {method}: ValueError: x") as failure:
        run(world, worker_options, Odd(fails=method))
    assert isinstance(failure.value.__cause__, ValueError)


def test_an_orderly_processor_is_heard(world: Any, worker_options: Any) -> None:
    def only_seven(logits: torch.Tensor) -> torch.Tensor:
        return torch.where(torch.arange(logits.shape[1]) == 7, 0.0, float("-inf")).expand_as(logits)

    tokens = run(world, worker_options, Odd(only_seven))
    assert {token for row in tokens.values() for token in row} == {7}


def test_something_else_than_a_processor_is_refused_at_the_start(world: Any, worker_options: Any) -> None:
    with pytest.raises(PluginError, match=f"{LABEL} returned a str, not a LogitsProcessor"):
        run(world, worker_options, "odd")


def test_a_lie_about_invariance_names_the_plugin(world: Any, worker_options: Any) -> None:
    world.plugins.factories["logits_processor", "odd"] = lambda ctx: Odd(lambda x: x.neg_(), invariant=True)
    worker = world.start(worker_options(logits_processors=("odd",), check_logits_processors=True))
    with pytest.raises(RuntimeError, match=f"{LABEL} declares argmax_invariant"):
        world.generate(worker, [world.engine_request("a", [1, 2], temperature=1.0, seed=1)])


def test_a_failing_kernel_is_told_under_its_name(world: Any, worker_options: Any) -> None:
    def kernel(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
        raise ZeroDivisionError("no lanes")

    made = KernelOverride("top_k_top_p", kernel, frozenset({"cpu"}), frozenset({"float32"}))
    world.plugins.factories["kernel_override", "mine"] = lambda ctx: made
    worker = world.start(worker_options(kernel_overrides={"top_k_top_p": "mine"}))
    told = (
        r"kernel_override:mine \(tiny-distribution\) failed in the kernel of seam 'top_k_top_p': ZeroDivisionError: no"
    )
    with pytest.raises(PluginError, match=told):
        world.generate(worker, [world.engine_request("a", [1, 2], temperature=1.0, top_k=3)])


@pytest.mark.parametrize("name", SEAMS)
def test_a_named_kernel_keeps_its_signature(name: str) -> None:
    """So that a misfit is found when it is chosen."""
    row = SEAMS[name]
    made = named_kernel(KernelOverride(name, row.reference, frozenset(), frozenset()), "label")
    check_signature(row, made.function)
    misfit = named_kernel(KernelOverride(name, lambda nothing: nothing, frozenset(), frozenset()), "label")
    assert list(inspect.signature(misfit.function).parameters) == ["nothing"]
    with pytest.raises(PluginError, match=r"takes \(nothing\)"):
        check_signature(row, misfit.function)


def test_compiled_callables_can_be_named() -> None:
    made = named_kernel(KernelOverride("silu_and_mul", torch.ops.aten.silu, frozenset(), frozenset()), "label")
    check_signature(SEAMS["silu_and_mul"], made.function)
    assert made.function(torch.zeros(2)).tolist() == [0.0, 0.0]
    assert NamedLogitsProcessor(Odd(invariant=True), "label").argmax_invariant

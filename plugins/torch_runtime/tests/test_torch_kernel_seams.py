"""Kernel overrides: the table of seams, how a kernel is chosen and refused, and that layers use the chosen one."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError, PluginError, PluginNotFoundError
from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint_torch_runtime.layers import LayerToolkit, RMSNorm, RopeParameters, RotaryEmbedding, SiluAndMul
from hardpoint_torch_runtime.ops import REFERENCE, SEAMS, Kernels, check_signature, select_kernels

CPU = torch.device("cpu")
CASE = KernelCase("", "cpu", "float32")
ANYTHING = frozenset({"float32", "bfloat16", "float16"})


def override(seam: str, function: Callable[..., Any] | None = None, **changes: Any) -> KernelOverride:
    settings: dict[str, Any] = {"device_types": frozenset({"cpu"}), "dtypes": ANYTHING}
    return KernelOverride(seam, function or SEAMS[seam].reference, **{**settings, **changes})


def shelf(**overrides: KernelOverride) -> Callable[[str], KernelOverride]:
    def create(name: str) -> KernelOverride:
        if name not in overrides:
            raise PluginNotFoundError(f"no kernel_override plugin {name!r}")
        return overrides[name]

    return create


class Counted:
    """Passes calls on to the plain kernel and counts them."""

    def __init__(self, seam: str) -> None:
        self.calls = 0
        self._plain = SEAMS[seam].reference

    def __call__(self, *arguments: Any) -> Any:
        self.calls += 1
        return self._plain(*arguments)


# -- the table


def test_every_kernel_has_a_row_and_every_row_a_kernel() -> None:
    assert list(SEAMS) == [entry.name for entry in fields(Kernels)]


@pytest.mark.parametrize("name", [name for name in SEAMS if name != "linear"])
def test_the_rows_tell_the_signatures_of_the_plain_kernels(name: str) -> None:
    """``linear`` is a function of compiled code that tells nothing."""
    row = SEAMS[name]
    assert tuple(inspect.signature(row.reference).parameters) == row.parameters
    assert set(row.mutates) <= set(row.parameters)
    assert row.signature.startswith(f"{name}(")
    check_signature(row, row.reference)


@pytest.mark.parametrize(
    "function", [lambda x: x, lambda gate_up, out: out, lambda gate_up, *, eps: gate_up, lambda: None, "a name"]
)
def test_a_kernel_with_other_parameters_is_refused(function: Any) -> None:
    """R10.46, R10.49: where it is chosen, not when it is first called."""
    with pytest.raises(PluginError, match=r"seam.*silu_and_mul"):
        check_signature(SEAMS["silu_and_mul"], function)


def test_what_a_kernel_may_look_like() -> None:
    def with_option(gate_up: torch.Tensor, *, eps: float = 0.0) -> torch.Tensor:
        return gate_up + eps

    class Kernel:
        def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
            return gate_up

    row = SEAMS["silu_and_mul"]
    for function in (with_option, Kernel(), partial(with_option, eps=1.0), torch.ops.aten.silu, torch.sigmoid):
        check_signature(row, function)


# -- the choice


def test_without_names_every_kernel_is_the_plain_one() -> None:
    table = select_kernels(shelf(), {}, CASE)
    assert table.kernels == Kernels()
    assert table.overrides == {}
    assert [choice.seam for choice in table.choices] == list(SEAMS)
    assert {choice.reason for choice in table.choices} == {"no override is named"}


def test_a_named_override_replaces_its_seam_and_no_other(caplog: pytest.LogCaptureFixture) -> None:
    kernel = Counted("silu_and_mul")
    logger = logging.getLogger("test.kernels")
    with caplog.at_level(logging.INFO, logger.name):
        table = select_kernels(
            shelf(fast=override("silu_and_mul", kernel)), {"silu_and_mul": ["fast"]}, CASE, logger=logger
        )
    assert table.kernels == Kernels(silu_and_mul=kernel)
    assert table.overrides == {"silu_and_mul": "fast"}
    (line,) = [line for line in caplog.text.splitlines() if "silu_and_mul" in line]
    assert line.split() == ["silu_and_mul", "fast", "(named)"]
    assert caplog.text.count("reference (no override is named)") == len(SEAMS) - 1


def test_the_table_is_not_shown_unasked(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("test.kernels")
    with caplog.at_level(logging.INFO, logger.name):
        select_kernels(shelf(), {}, CASE, logger=logger)
    assert caplog.text == ""


def test_an_unknown_seam_lists_the_seams() -> None:
    with pytest.raises(ConfigError, match=f"no kernel seam 'silu'; .*kernel_overrides .*: {', '.join(SEAMS)}"):
        select_kernels(shelf(), {"silu": ["fast"]}, CASE)
    with pytest.raises(ConfigError, match="no kernel seam 'silu'"):
        select_kernels(shelf(), {}, CASE, candidates={"silu": ["fast"]})


@pytest.mark.parametrize(
    ("changes", "case", "reason"),
    [
        ({"device_types": frozenset({"cuda", "xpu"})}, {}, "it runs on cuda, xpu, not on cpu"),
        ({"device_types": frozenset()}, {}, "it runs on no device, not on cpu"),
        ({"dtypes": frozenset({"bfloat16"})}, {}, "it computes bfloat16, not float32"),
        ({}, {"batch_invariant": True}, "batch invariance is asked for"),
        ({"refuse": lambda case: f"it dislikes {case.dtype}"}, {}, "it dislikes float32"),
    ],
)
def test_a_refusal_is_an_error_with_its_reason(changes: dict[str, Any], case: dict[str, Any], reason: str) -> None:
    """No silent fallback: whoever names an override gets it, or an error."""
    wanted = KernelCase("", "cpu", "float32", **case)
    create = shelf(picky=override("rms_norm", **changes))
    with pytest.raises(ConfigError, match=f"'rms_norm' serves float32 on cpu: picky: {reason}.*add 'reference'"):
        select_kernels(create, {"rms_norm": ["picky"]}, wanted)
    table = select_kernels(create, {"rms_norm": ["picky", REFERENCE]}, wanted)
    (choice,) = [choice for choice in table.choices if choice.seam == "rms_norm"]
    assert choice.kernel == REFERENCE
    assert choice.row().startswith(f"picky refused ({reason}")
    assert choice.row().endswith("reference (named)")


def test_an_override_of_another_seam_is_no_choice() -> None:
    with pytest.raises(ConfigError, match="fast: it replaces the seam 'rms_norm', not 'linear'"):
        select_kernels(shelf(fast=override("rms_norm")), {"linear": ["fast"]}, CASE)


def test_batch_invariance_is_declared() -> None:
    case = KernelCase("", "cpu", "float32", batch_invariant=True)
    create = shelf(steady=override("linear", is_batch_invariant=True))
    assert select_kernels(create, {"linear": ["steady"]}, case).overrides == {"linear": "steady"}


@given(st.lists(st.booleans(), min_size=1, max_size=5), st.booleans())
def test_the_first_that_accepts_is_chosen(accepts: list[bool], may_fall_back: bool) -> None:
    """Order of preference is the order given; what was refused before stays visible."""
    made = {
        f"k{i}": override("linear", refuse=lambda case, yes=yes: None if yes else "no") for i, yes in enumerate(accepts)
    }
    named = [*made, *([REFERENCE] if may_fall_back else [])]
    if not any(accepts) and not may_fall_back:
        with pytest.raises(ConfigError):
            select_kernels(shelf(**made), {"linear": named}, CASE)
        return
    (choice,) = [c for c in select_kernels(shelf(**made), {"linear": named}, CASE).choices if c.seam == "linear"]
    first = accepts.index(True) if any(accepts) else len(accepts)
    assert choice.kernel == named[first]
    assert [name for name, _ in choice.refused] == named[:first]


def test_a_plugin_that_cannot_be_loaded_stops_whatever_else_is_named() -> None:
    with pytest.raises(PluginNotFoundError, match="'absent'"):
        select_kernels(shelf(), {"linear": ["absent", REFERENCE]}, CASE)


def test_a_misfit_stops() -> None:
    create = shelf(odd=override("rms_norm", lambda x, weight: x), wrong="no override")  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"odd does not fit its seam: the kernel takes \(x, weight\), but the seam"):
        select_kernels(create, {"rms_norm": ["odd"]}, CASE)
    with pytest.raises(PluginError, match="wrong returned a str, not a KernelOverride"):
        select_kernels(create, {"rms_norm": ["wrong"]}, CASE)


def test_switched_off_overrides_are_not_even_loaded() -> None:
    table = select_kernels(shelf(), {"linear": ["absent"]}, CASE, enabled=False)
    assert table.kernels == Kernels()
    assert "overrides are switched off, absent too" in str(table)


# -- the platform's candidates


def test_the_platforms_best_candidate_is_taken_where_nothing_is_named(caplog: pytest.LogCaptureFixture) -> None:
    """One that is absent, broken, misfit or refuses is passed over, and the table says why."""
    made = {
        "foreign": override("linear", device_types=frozenset({"cuda"})),
        "misfit": override("linear", lambda x: x),
        "good": override("linear", Counted("linear")),
        "late": override("linear"),
    }
    candidates = {"linear": ["absent", "foreign", "misfit", "good", "late"], "embedding": ["absent"]}
    logger = logging.getLogger("test.kernels")
    with caplog.at_level(logging.INFO, logger.name):
        table = select_kernels(shelf(**made), {}, CASE, candidates=candidates, logger=logger)
    assert table.kernels == Kernels(linear=made["good"].function)
    by_seam = {choice.seam: choice for choice in table.choices}
    assert [name for name, _ in by_seam["linear"].refused] == ["absent", "foreign", "misfit"]
    assert by_seam["linear"].reason == "the platform's choice"
    assert by_seam["embedding"].row().endswith("reference (none of the platform's)")
    for said in ("no kernel_override plugin 'absent'", "it runs on cuda, not on cpu", "the kernel takes (x)"):
        assert said in caplog.text


def test_the_operators_word_comes_before_the_platforms() -> None:
    made = {"ours": override("linear"), "theirs": override("linear", Counted("linear"))}
    candidates = {"linear": ["theirs"]}
    named = select_kernels(shelf(**made), {"linear": ["ours"]}, CASE, candidates=candidates)
    assert named.overrides == {"linear": "ours"}
    plain = select_kernels(shelf(**made), {"linear": [REFERENCE]}, CASE, candidates=candidates)
    assert plain.overrides == {}
    off = select_kernels(shelf(), {}, CASE, candidates=candidates, enabled=False)
    assert off.overrides == {}
    assert "overrides are switched off, theirs too" in str(off)


def test_the_worker_asks_its_platform(world: Any, worker_options: Any) -> None:
    world.platform.kernel_candidates = {"linear": ("mine",)}
    world.plugins.factories["kernel_override", "mine"] = lambda ctx: override("linear")
    assert world.start().kernels.overrides == {"linear": "mine"}
    assert world.start(worker_options(kernel_overrides={"linear": "reference"})).kernels.overrides == {}


def test_sampling_is_in_float32_whatever_the_model_computes_in() -> None:
    case = KernelCase("", "cpu", "bfloat16")
    seen: list[KernelCase] = []
    made = {
        name: override(name, refuse=lambda given_case: seen.append(given_case)) for name in ("top_k_top_p", "embedding")
    }
    select_kernels(shelf(**made), {name: [name] for name in made}, case)
    assert {(entry.seam, entry.dtype) for entry in seen} == {("top_k_top_p", "float32"), ("embedding", "bfloat16")}


# -- the layers


@pytest.fixture
def kernels() -> Kernels:
    return Kernels(**{name: Counted(name) for name in SEAMS})


@pytest.fixture
def toolkit(world: Any, kernels: Kernels) -> LayerToolkit:
    return LayerToolkit.create(
        world.config(), device=CPU, dtype=torch.float32, attention_backend=world.backend, kernels=kernels
    )


def calls(kernels: Kernels) -> dict[str, int]:
    return {name: getattr(kernels, name).calls for name in SEAMS if getattr(kernels, name).calls}


def test_every_layer_uses_the_chosen_kernel(toolkit: LayerToolkit, kernels: Kernels) -> None:
    toolkit.silu_and_mul()(torch.randn(3, 8))
    assert calls(kernels) == {"silu_and_mul": 1}
    norm = toolkit.rms_norm(8, 1e-6)
    norm(torch.randn(3, 8))
    norm.add(torch.randn(3, 8), None)
    norm.add(torch.randn(3, 8), torch.randn(3, 8))
    assert calls(kernels) == {"silu_and_mul": 1, "rms_norm": 2, "add_rms_norm": 1}
    rotary = toolkit.rotary(4, RopeParameters())
    rotary(torch.arange(3), torch.randn(3, 2, 4), torch.randn(3, 1, 4))
    assert calls(kernels)["rotary_embedding"] == 2
    embedding = toolkit.embedding("embed", 10, 8)
    toolkit.lm_head("head", 10, 8, tied_to=embedding)(embedding(torch.arange(3)))
    assert calls(kernels)["embedding"] == 1
    toolkit.lm_head("untied", 10, 8)(torch.randn(3, 8))
    toolkit.column_linear("c", 8, 4, bias=True)(torch.randn(3, 8))
    assert calls(kernels)["linear"] == 3


def test_the_sampler_uses_the_chosen_kernel_for_rows_that_need_it(world: Any, worker_options: Any) -> None:
    kernel = Counted("top_k_top_p")
    world.plugins.factories["kernel_override", "cut"] = lambda ctx: override("top_k_top_p", kernel)
    plain = world.generate(world.start(), [world.engine_request("a", [1, 2, 3], temperature=0.9, top_k=5, seed=3)])
    worker = world.start(worker_options(kernel_overrides={"top_k_top_p": "cut"}))
    assert world.generate(worker, [world.engine_request("b", [1, 2, 3], temperature=0.9, seed=3)])["b"]
    assert kernel.calls == 0
    same = world.generate(worker, [world.engine_request("a", [1, 2, 3], temperature=0.9, top_k=5, seed=3)])
    assert kernel.calls == len(same["a"])
    assert same == plain


def test_plain_layers_need_no_kernels() -> None:
    x = torch.randn(2, 8)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(SiluAndMul()(x), torch.nn.functional.silu(gate) * up)
    norm = RMSNorm(8, 1e-6, torch.float32, CPU)
    torch.testing.assert_close(norm(x), torch.nn.functional.rms_norm(x, (8,), norm.weight, 1e-6))
    rotary = RotaryEmbedding(4, 8, RopeParameters(), CPU)
    states = torch.randn(1, 2, 4)
    torch.testing.assert_close(rotary.rotate_(states.clone(), *rotary.lookup(torch.tensor([0]))), states)


# -- the worker


def test_the_worker_builds_its_model_with_the_named_kernels(world: Any, worker_options: Any) -> None:
    contexts: list[Any] = []

    def create(ctx: Any) -> KernelOverride:
        contexts.append(ctx)
        return override("linear")

    world.plugins.factories["kernel_override", "mine"] = create
    worker = world.start(worker_options(kernel_overrides={"linear": ["mine", "reference"]}))
    assert worker.kernels.overrides == {"linear": "mine"}
    assert worker.loaded.toolkit.kernels is worker.kernels.kernels
    assert contexts[0].device == CPU
    assert contexts[0].distribution == "tiny-distribution"
    off = world.start(worker_options(kernel_overrides={"linear": "mine"}, use_kernel_overrides=False))
    assert off.kernels.overrides == {}
    assert len(contexts) == 1


def test_the_worker_stops_before_the_model_is_created(world: Any, worker_options: Any) -> None:
    def create_model(ctx: Any) -> Any:
        raise AssertionError("the model must not be created")

    world.plugins.factories["model", "TinyForCausalLM"] = create_model
    world.plugins.factories["kernel_override", "other"] = lambda ctx: override("linear", dtypes=frozenset())
    with pytest.raises(ConfigError, match="no kernel seam 'silu'"):
        world.start(worker_options(kernel_overrides={"silu": "other"}))
    with pytest.raises(ConfigError, match="other: it computes no dtype, not float32"):
        world.start(worker_options(kernel_overrides={"linear": "other"}))
    with pytest.raises(PluginNotFoundError, match="kernel_override plugin 'absent'"):
        world.start(worker_options(kernel_overrides={"linear": "absent"}))


def test_the_kernels_are_unknown_before_the_model_is_loaded(world: Any) -> None:
    with pytest.raises(RuntimeError, match="not chosen yet; call load_model"):
        _ = world.create().kernels

"""Conformance of the plugin kind ``compiler``: derive from :class:`CompilerSuite` and name yours.

Tiny models of several families are lowered and run beside themselves as they were: eager execution is the oracle.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import msgspec
import pytest
import torch

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.compiler import Compiler, LoweredRange
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.module_guard import ModuleGuard
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.installed import installed_factory
from hardpoint_testing_torch.local_driver import LocalDriver, build_model, worker_config
from hardpoint_testing_torch.parity import relative_error
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_testing_torch.state_dict_loader import StateDictLoader
from hardpoint_testing_torch.tiny_models import TinyModel, make_tiny_model
from hardpoint_testing_torch.worker_world import KitPlatform
from hardpoint_torch_runtime.layers import ParallelLinear
from hardpoint_torch_runtime.lowering import ResumingCompiler

__all__ = ["CompilerSuite"]

STEPS: tuple[Mapping[str, Sequence[int]], ...] = (
    {"a": [3, 14, 15, 92, 65]},
    {"a": [35], "b": [8, 97, 93, 23, 84, 62, 6]},
    {"a": [43], "b": [38], "c": list(range(1, 30))},
    {"a": [33], "b": [83], "c": [27]},
    {"c": [95]},
)
"""Prompts, single tokens, both together, one token alone."""

EACH_DTYPE = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
ARCHITECTURES: Mapping[str, Mapping[str, Any]] = {
    "LlamaForCausalLM": {"head_dim": 16},
    "GPT2LMHeadModel": {"hidden_size": 64},
    "MixtralForCausalLM": {"head_dim": 16, "num_local_experts": 4},
}
"""Standard blocks, others, and one with experts. Heads are of a size that every attention kernel takes."""


class _Built(NamedTuple):
    model: Any
    driver: LocalDriver

    def answers(self) -> list[dict[str, torch.Tensor]]:
        """Logits of :data:`STEPS`, whose sequences are forgotten again."""
        found = [self.driver.step(step) for step in STEPS]
        for name in {name for step in STEPS for name in step}:
            self.driver.free(name)
        return found


class CompilerSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.compiler.Compiler`.

    ``architectures`` maps names to fields of their tiny configurations; one that is left out, or has no installed
    model, is skipped. The first one is what all else is tried on.
    ``tolerance`` is what the compiler promises, relative to the largest logit. ``lowers_nothing``: it leaves every
    model as it is, by intention. ``max_wait_s``: how long a compiler that resumes may keep a model waiting.
    """

    kind: ClassVar[str] = "compiler"
    architectures: ClassVar[Mapping[str, Mapping[str, Any]]] = ARCHITECTURES
    tolerance: ClassVar[Mapping[str, float]] = {"float32": 2e-5, "bfloat16": 5e-2, "float16": 5e-3}
    lowers_nothing: ClassVar[bool] = False
    max_wait_s: ClassVar[float] = 300.0

    def create_compiler(self, ctx: WorkerContext) -> Compiler:
        """The compiler under test, as its factory makes it."""
        made: Compiler = self.create_plugin(ctx)
        return made

    def create_platform(self) -> Platform:
        """The platform that the compiler is handed."""
        return KitPlatform()

    def create_backend(self, dtype: str) -> AttentionBackend:
        """What computes attention in both models, in ``dtype``."""
        del dtype
        return PlainAttentionBackend()

    @pytest.fixture(params=ARCHITECTURES)
    def tiny(self, request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
        return self._make(request.param, tmp_path_factory)

    @pytest.fixture
    def first(self, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
        """One model, for what does not depend on the family."""
        return self._make(next(iter(self.architectures)), tmp_path_factory)

    def _make(self, architecture: str, folders: pytest.TempPathFactory, seed: int = 0) -> TinyModel:
        if architecture not in self.architectures:
            pytest.skip(f"the class does not list {architecture}")
        try:
            installed_factory("model", architecture)
        except PluginNotFoundError as error:
            pytest.skip(f"a compiler needs a model to lower: {error}")
        return make_tiny_model(
            architecture, folders.mktemp("model") / "tiny", seed=seed, **self.architectures[architecture]
        )

    def config(self, tiny: TinyModel, dtype: str = "float32", **changes: Any) -> Any:
        return msgspec.structs.replace(worker_config(tiny.info, dtype=dtype), **changes)

    def build(self, tiny: TinyModel, dtype: str = "float32") -> _Built:
        """The model with weights, not lowered."""
        factory = installed_factory("model", tiny.info.architecture)
        loader = StateDictLoader(tiny.tensors())
        model, toolkit = build_model(factory, loader, self.config(tiny, dtype), self.create_backend(dtype))
        return _Built(model, LocalDriver(model, toolkit))

    def lower(self, built: _Built, tiny: TinyModel, dtype: str = "float32", **changes: Any) -> list[LoweredRange]:
        """Every range, those included that a compiler lowers only after a while."""
        config = self.config(tiny, dtype, **changes)
        context = self.context(
            WorkerContext, rank=0, config=config, device=torch.device("cpu"), platform=self.create_platform()
        )
        compiler = self.create_compiler(context)
        ranges = list(compiler.lower(built.model))
        if isinstance(compiler, ResumingCompiler):
            end = time.monotonic() + self.max_wait_s
            while compiler.is_waiting:
                assert time.monotonic() < end, f"the model still waits after {self.max_wait_s:g} s"
                ranges += compiler.resume() or ()
                time.sleep(0.01)
            assert not compiler.resume(), "resume() has something to say though nothing waits"
        return ranges

    def check(
        self, found: list[dict[str, torch.Tensor]], wanted: list[dict[str, torch.Tensor]], allowed: float, what: str
    ) -> None:
        for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
            for name in other:
                error = relative_error(one[name].float(), other[name].float())
                assert error <= allowed, (
                    f"{what}: in step {number} the logits of {name!r} are off by {error:.3g} of the largest, "
                    f"tolerance is {allowed:g}"
                )

    def test_it_has_a_name(self, first: TinyModel) -> None:
        """Log lines begin with it."""
        context = self.context(
            WorkerContext, config=self.config(first), device=torch.device("cpu"), platform=self.create_platform()
        )
        name = self.create_compiler(context).name
        assert isinstance(name, str), f"its name is {name!r}"
        assert name.strip(), "its name is empty"

    @EACH_DTYPE
    def test_every_range_is_accounted_for(self, tiny: TinyModel, dtype: str) -> None:
        """Lowered, for steps that there are, or left alone for a reason; names are those of the model's parts."""
        built = self.build(tiny, dtype)
        # A stack's layers are named like the weights, so are attention layers, which own none.
        parts = _names(built.model)
        ranges = self.lower(built, tiny, dtype)
        assert ranges, "nothing is said about the model: report what stays eager, and why"
        for one in ranges:
            assert isinstance(one, LoweredRange), f"lower() reports a {type(one).__name__}"
            if one.tokens is None:
                assert one.reason, f"{one.layer_names or 'the model'}: not lowered, without a reason"
                assert one.reason.strip(), "an empty reason"
            else:
                assert one.reason is None, f"{one.layer_names}: lowered, and yet there is a reason: {one.reason}"
                assert one.layer_names, "a lowered range names its layers"
                assert 1 <= one.tokens.first <= one.tokens.last, f"{one.layer_names}: no step has {one.tokens}"
            strange = [name for name in one.layer_names if name not in parts]
            assert strange == [], f"the model has no part {', '.join(strange)}"

    def test_it_lowers_something(self, first: TinyModel) -> None:
        """Otherwise nothing of what follows says anything about it."""
        if self.lowers_nothing:
            pytest.skip("it lowers nothing, by intention")
        ranges = self.lower(self.build(first), first)
        reasons = [one.reason for one in ranges if one.reason]
        assert any(one.tokens for one in ranges), f"it lowers nothing of a {first.info.architecture}: {reasons}"

    @EACH_DTYPE
    def test_results_equal_eager_ones(self, tiny: TinyModel, dtype: str) -> None:
        """I9.2: prompts, single tokens and both together; a model that is left alone keeps every bit."""
        built = self.build(tiny, dtype)
        wanted = built.answers()
        ranges = self.lower(built, tiny, dtype)
        allowed = self.tolerance[dtype] if any(one.tokens for one in ranges) else 0.0
        self.check(built.answers(), wanted, allowed, f"{tiny.info.architecture} in {dtype}")

    @pytest.mark.parametrize("tokens", [1, 2, 3, 8, 17, 64, 200])
    def test_steps_of_any_size(self, first: TinyModel, tokens: int) -> None:
        """At the ends of what was lowered, within it and beyond it."""
        built = self.build(first)
        step = {"a": [(7 * i + 3) % first.info.vocab_size for i in range(tokens)]}
        wanted = [built.driver.step(step)]
        built.driver.free("a")
        ranges = self.lower(built, first)
        allowed = self.tolerance["float32"] if any(one.tokens for one in ranges) else 0.0
        self.check([built.driver.step(step)], wanted, allowed, f"a step of {tokens} tokens")

    def test_equal_steps_give_equal_results(self, first: TinyModel) -> None:
        """Nothing is left behind by an earlier step, of another size in particular."""
        built = self.build(first)
        self.lower(built, first)
        before = built.answers()
        self.check(built.answers(), before, 0.0, "the same steps once more")

    def test_other_models_stay_as_they_are(self, first: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> None:
        """What is installed belongs to one model: not to its class, and not to layers of the same name."""
        second = self._make(first.info.architecture, tmp_path_factory, seed=1)
        left, other, apart = self.build(first), self.build(second), self.build(first)
        wanted, wanted_other, wanted_apart = left.answers(), other.answers(), apart.answers()
        self.lower(left, first)
        self.check(apart.answers(), wanted_apart, 0.0, "a model that was not lowered, after another one was")
        self.lower(other, second)
        self.check(left.answers(), wanted, self.tolerance["float32"], "the first of two lowered models")
        self.check(other.answers(), wanted_other, self.tolerance["float32"], "the second of two lowered models")

    def test_rows_do_not_depend_on_others_where_promised(self, first: TinyModel) -> None:
        """With ``batch_invariant`` a lowered linear layer gives a row the same bits, whatever comes with it."""
        built = self.build(first)
        ranges = self.lower(built, first, batch_invariant=True)
        lowered = {name for one in ranges if one.tokens for name in one.layer_names}
        layers = [part for part in built.model.modules() if isinstance(part, ParallelLinear) and part.name in lowered]
        if not layers:
            pytest.skip("no linear layer is lowered by name")
        generator = torch.Generator().manual_seed(3)
        for layer in layers:
            rows = torch.randn(33, layer.shape.input_size, generator=generator)
            together = layer(rows)
            for row in (0, 1, 16, 32):
                alone = layer(rows[row : row + 1])
                assert torch.equal(together[row : row + 1], alone), f"{layer.name}: row {row} depends on its batch"

    def test_lowering_patches_nothing(self, first: TinyModel) -> None:
        """P12.4: no function or class of core, runtime or framework changes, by the lowering or by a step."""
        built = self.build(first)
        built.answers()
        guard = ModuleGuard(("hardpoint", "hardpoint_torch_runtime"), self_changing=("torch",))
        self.lower(built, first)
        built.answers()
        changed = guard.changes()
        assert changed == [], f"it replaced {', '.join(changed)}"


def _names(model: torch.nn.Module) -> set[str]:
    """Paths of modules, and the names that layers go by themselves."""
    return {path for path, _ in model.named_modules()} | {
        name for part in model.modules() if isinstance(name := getattr(part, "name", None), str)
    }

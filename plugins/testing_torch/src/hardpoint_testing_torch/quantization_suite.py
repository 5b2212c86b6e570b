"""Conformance of the plugin kind ``quantization``: derive from :class:`QuantizationSuite` and name yours.

A method that quantizes dense checkpoints while they load needs nothing but its name; one with stored formats of its own
overrides :meth:`QuantizationSuite.store`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from hardpoint.errors import ModelFormatError, PluginNotFoundError
from hardpoint.interfaces.model_source import ModelInfo, WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.installed import installed_factory
from hardpoint_testing_torch.linear_bench import LAYERS, SIZES, LinearBench, bench_info, make_weights, relative_norm
from hardpoint_testing_torch.local_driver import LocalDriver, build_model, worker_config
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_testing_torch.state_dict_loader import TensorLoader, weight_tensor
from hardpoint_testing_torch.tiny_models import TinyModel, make_tiny_model

__all__ = ["QuantizationSuite"]

MakeBench = Callable[..., LinearBench]
ALL = tuple(LAYERS)
INPUTS = {"no token": (0,), "one token": (1,), "a few": (5,), "many": (70,), "two dimensions": (2, 3)}
MODEL_SIZES: Mapping[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2}


class QuantizationSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.quantization.QuantizationMethod`.

    What the method promises, and may be held to:

    * ``max_relative_error``: of a product, as norm of the deviation over norm of the exact one;
    * ``max_bytes_per_weight``: all that a quantized layer keeps, over its number of weights; None: less than a dense
      weight in the compute dtype, which for a method that only changes the arithmetic has to be set;
    * ``min_agreement``: share of positions whose most probable token a tiny quantized model shares with the original;
    * ``dtypes``: compute dtypes; ``device_type``: where it is tested.
    """

    kind: ClassVar[str] = "quantization"
    max_relative_error: ClassVar[float] = 0.02
    max_bytes_per_weight: ClassVar[float | None] = None
    min_agreement: ClassVar[float] = 0.9
    dtypes: ClassVar[tuple[str, ...]] = ("float32", "bfloat16")
    device_type: ClassVar[str] = "cpu"
    architecture: ClassVar[str] = "LlamaForCausalLM"

    def create_method(self, ctx: WorkerContext) -> QuantizationMethod:
        """The method under test, as its factory makes it."""
        made: QuantizationMethod = self.create_plugin(ctx)
        return made

    def store(self, name: str, weight: torch.Tensor) -> Sequence[WeightTensor]:
        """What a checkpoint for this method holds for the projection ``name``: float32 ``weight`` [output, input].

        By default the dense weight itself.
        """
        return [weight_tensor(f"{name}.weight", weight)]

    def method_for(self, info: ModelInfo, dtype: str = "float32") -> QuantizationMethod:
        """A method for the model ``info``; skips the test where it refuses it."""
        config = msgspec.structs.replace(worker_config(info, dtype=dtype), quantization=self.plugin or "under-test")
        device = torch.device(self.device_type)
        method = self.create_method(self.context(WorkerContext, rank=0, config=config, device=device))
        reason = method.refuse(info, self.device_type)
        if reason is not None:
            pytest.skip(f"{method.name} refuses: {reason}")
        return method

    @pytest.fixture
    def method(self) -> QuantizationMethod:
        return self.method_for(bench_info())

    @pytest.fixture
    def bench(self) -> MakeBench:
        """``bench(size="even", dtype="float32", weights=None, biases=False)``: loaded layers under the method."""

        def make(
            size: str = "even",
            dtype: str = "float32",
            weights: Mapping[str, torch.Tensor] | None = None,
            biases: bool = False,
        ) -> LinearBench:
            return self.unloaded(size, dtype, weights, biases).load(self.store)

        return make

    def unloaded(self, size: str, dtype: str, weights: Mapping[str, torch.Tensor] | None, biases: bool) -> LinearBench:
        """Layers whose weights are still missing."""
        sizes = SIZES[size]
        given = {name: torch.linspace(-1, 1, shape[0]) for name, shape in sizes.stored().items()} if biases else None
        method = self.method_for(bench_info(), dtype)
        return LinearBench(method, sizes, weights or make_weights(sizes), dtype=dtype, biases=given)

    def check(self, bench: LinearBench, name: str, x: torch.Tensor) -> torch.Tensor:
        """The layer's product is near enough to the exact one; returns it."""
        before = x.clone()
        output: torch.Tensor = bench.layer(name)(x)
        assert torch.equal(x, before), f"{name}: apply() wrote into its input"
        expected = bench.expected(name, x)
        assert output.shape == expected.shape, f"{name}: {list(output.shape)} instead of {list(expected.shape)}"
        assert output.dtype == x.dtype, f"{name}: the output is {output.dtype}, the input {x.dtype}"
        self.check_error(name, output, expected)
        return output

    def check_error(self, name: str, output: torch.Tensor, expected: torch.Tensor) -> None:
        """``output`` is within the promised error, plus what rounding to its dtype costs."""
        error = relative_norm(output, expected)
        allowed = self.max_relative_error + 4 * torch.finfo(output.dtype).eps
        assert error <= allowed, (
            f"{name}: relative error {error:.4g} is over max_relative_error = {self.max_relative_error}; "
            "if the method cannot do better, raise the number in your class"
        )

    def test_it_describes_itself(self, method: QuantizationMethod) -> None:
        assert isinstance(method.name, str), "a method has a name"
        assert method.name.strip(), "a method has a name"
        assert isinstance(method.accepts_packed, frozenset), "accepts_packed is a frozenset of format names"

    @pytest.mark.parametrize("device_type", ["cpu", "cuda", "abacus"])
    def test_refusing_is_an_answer(self, device_type: str) -> None:
        """Reason or None for any model and device, the same each time; never an exception."""
        method = self.create_method(
            self.context(WorkerContext, rank=0, config=worker_config(bench_info()), device=torch.device("cpu"))
        )
        strange = msgspec.structs.replace(
            bench_info(), config={"quantization_config": {"quant_method": "of_nobody", "bits": 3}}
        )
        for info in (bench_info(), strange):
            answer = method.refuse(info, device_type)
            assert answer is None or (isinstance(answer, str) and answer.strip()), f"refuse() answers {answer!r}"
            assert method.refuse(info, device_type) == answer, "refuse() answers the same question in another way"

    def test_it_quantizes_something(self, method: QuantizationMethod) -> None:
        """A method that leaves every linear of a decoder alone does nothing."""
        chosen = [
            method.linear_method(f"model.layers.0.{name}", LinearShape(shape[1], (shape[0],), "float32"))
            for sizes in SIZES.values()
            for name, shape in sizes.stored().items()
        ]
        assert all(entry is None or isinstance(entry, LinearMethod) for entry in chosen), (
            "linear_method() answers None or a LinearMethod"
        )
        assert any(entry is not None for entry in chosen), (
            "linear_method() answers None for every layer of a decoder, so nothing is quantized"
        )

    @pytest.mark.parametrize("name", ALL)
    @pytest.mark.parametrize("size", SIZES)
    def test_products_are_near(self, bench: MakeBench, size: str, name: str) -> None:
        """Plain and fused layers in several sizes, some of them no multiple of anything."""
        made = bench(size)
        generator = torch.Generator().manual_seed(1)
        for tokens in INPUTS.values():
            self.check(made, name, torch.randn(*tokens, made.weights[LAYERS[name][0]].shape[1], generator=generator))

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
    def test_dtypes(self, bench: MakeBench, dtype: str) -> None:
        if dtype not in self.dtypes:
            pytest.skip(f"the method does not declare to compute in {dtype}")
        made = bench(dtype=dtype)
        for name in ALL:
            x = _inputs(made, name).to(getattr(torch, dtype))
            self.check(made, name, x)

    def test_biases_are_added(self, bench: MakeBench) -> None:
        """Once, and in the order of the fused parts."""
        with_bias, without = bench(biases=True), bench()
        for name in ALL:
            x = _inputs(with_bias, name)
            self.check(with_bias, name, x)
            bias = torch.cat([with_bias.biases[stored] for stored in LAYERS[name]])
            torch.testing.assert_close(with_bias.layer(name)(x), without.layer(name)(x) + bias, rtol=1e-4, atol=1e-4)

    def test_inputs_need_not_be_contiguous(self, bench: MakeBench) -> None:
        made = bench()
        for name in ALL:
            x = _inputs(made, name)
            wide = torch.cat((torch.full_like(x, 7.0), x), dim=1)[:, x.shape[1] :]
            assert not wide.is_contiguous()
            torch.testing.assert_close(self.check(made, name, wide), made.layer(name)(x), rtol=1e-5, atol=1e-5)
            turned = x.T.contiguous().T
            self.check(made, name, turned)

    def test_a_token_does_not_depend_on_its_neighbors(self, bench: MakeBench) -> None:
        """Scales of activations, where there are any, belong to a token: one loud request must not blur the others."""
        made = bench()
        for name in ALL:
            x = _inputs(made, name)
            alone = made.layer(name)(x[:1])
            loud = x.clone()
            loud[1:] *= 100
            torch.testing.assert_close(made.layer(name)(loud)[:1], alone, rtol=1e-4, atol=1e-4)

    def test_parts_of_a_fused_layer_do_not_blur_each_other(self, bench: MakeBench) -> None:
        """A loud query projection next to a soft value projection: each part keeps the promised error."""
        loudness = {"q_proj": 100.0, "v_proj": 0.01, "gate_proj": 50.0}
        weights = {name: weight * loudness.get(name, 1.0) for name, weight in make_weights(SIZES["even"]).items()}
        made = bench(weights=weights)
        for name in ("qkv_proj", "gate_up_proj"):
            x = _inputs(made, name)
            sizes = [weights[stored].shape[0] for stored in LAYERS[name]]
            outputs, expected = made.layer(name)(x).split(sizes, -1), made.expected(name, x).split(sizes, -1)
            for stored, output, exact in zip(LAYERS[name], outputs, expected, strict=True):
                self.check_error(f"{stored} of {name}", output, exact)

    def test_each_of_two_ranks_gets_its_share(self) -> None:
        """R8: of every fused part its own slice of outputs, of row-parallel layers its own slice of inputs."""
        sizes, method = SIZES["even"], self.method_for(bench_info())
        weights = make_weights(sizes)
        ranks = [LinearBench(method, sizes, weights, rank=rank, ranks=2).load(self.store) for rank in range(2)]
        for name in ("qkv_proj", "gate_up_proj"):
            x = _inputs(ranks[0], name)
            exact = ranks[0].expected(name, x).split([weights[stored].shape[0] for stored in LAYERS[name]], -1)
            for rank, bench in enumerate(ranks):
                mine = torch.cat([part.chunk(2, -1)[rank] for part in exact], dim=-1)
                self.check_error(f"{name} of rank {rank} of 2", bench.layer(name)(x), mine)
        for name in ("o_proj", "down_proj"):
            x = _inputs(ranks[0], name)
            parts = [bench.layer(name)(half) for bench, half in zip(ranks, x.chunk(2, -1), strict=True)]
            self.check_error(f"{name}, summed over 2 ranks", parts[0] + parts[1], ranks[0].expected(name, x))

    def test_zeros_stay_zeros(self, bench: MakeBench) -> None:
        """All-zero rows and weights have no scale to divide by."""
        weights = make_weights(SIZES["even"])
        weights["o_proj"] = torch.zeros_like(weights["o_proj"])
        weights["q_proj"][::2] = 0
        made = bench(weights=weights)
        assert not made.layer("o_proj")(_inputs(made, "o_proj")).any(), "a layer of zeros yields something else"
        output = self.check(made, "qkv_proj", _inputs(made, "qkv_proj"))
        assert not output[:, : weights["q_proj"].shape[0] : 2].any(), "rows of zeros yield something else"
        assert not made.layer("down_proj")(torch.zeros(3, weights["down_proj"].shape[1])).any()

    def test_equal_inputs_give_equal_bits(self, bench: MakeBench) -> None:
        made = bench()
        for name in ALL:
            x = _inputs(made, name)
            assert torch.equal(made.layer(name)(x), made.layer(name)(x)), f"{name} gives another result each time"

    def test_processing_twice_changes_nothing(self, bench: MakeBench) -> None:
        """A model may be loaded again into the same layers' methods; repacking what is packed must not spoil it."""
        made = bench()
        for name in ALL:
            layer, x = made.layer(name), _inputs(made, name)
            before, size = layer(x), made.num_bytes(name)
            layer.method.process_after_loading(layer)
            assert torch.equal(layer(x), before), f"{name}: another process_after_loading() changes the result"
            assert made.num_bytes(name) == size, f"{name}: another process_after_loading() changes the memory"

    def test_memory_is_what_it_promises(self, bench: MakeBench) -> None:
        """Parameters, buffers and tensors that the layer holds once loading is over; the float weight must be gone."""
        made = bench("larger")
        kept, weights = 0, 0
        for name in ALL:
            if not _is_quantized(made, name):
                continue
            kept, weights = kept + made.num_bytes(name), weights + made.num_weights(name)
        if not weights:
            pytest.skip("the method quantizes none of the larger layers")
        per_weight = kept / weights
        if self.max_bytes_per_weight is None:
            assert per_weight < 4, f"{per_weight:.3f} bytes per weight: not less than the dense float32 weight"
        else:
            assert per_weight <= self.max_bytes_per_weight, (
                f"{per_weight:.3f} bytes per weight, promised are {self.max_bytes_per_weight}; was the weight that was "
                "loaded dropped in process_after_loading()?"
            )

    def test_parameters_are_not_trained(self, bench: MakeBench) -> None:
        made = bench()
        trained = [name for name, parameter in made.named_parameters() if parameter.requires_grad]
        assert not trained, f"requires_grad is set on {', '.join(trained)}"

    def test_missing_and_unknown_tensors_are_named(self) -> None:
        """R8-style loading: every stored tensor is either used or named in one error."""
        made = self.unloaded("even", "float32", None, False)
        for name, weight in made.weights.items():
            for tensor in self.store(name, weight):
                with pytest.raises(ModelFormatError, match=tensor.name):
                    self.unloaded("even", "float32", None, False).load(self.store, without=tensor.name)
        nobody = weight_tensor("q_proj.of_nobody", torch.zeros(2))
        with pytest.raises(ModelFormatError, match=r"q_proj\.of_nobody"):
            made.load(self.store, extra=[nobody])

    def test_a_tiny_model_still_says_the_same(self, tmp_path: Path) -> None:
        """Finite logits, and the same most probable token as unquantized at the promised share of positions."""
        try:
            factory = installed_factory("model", self.architecture)
        except PluginNotFoundError as error:
            pytest.skip(f"a model is needed to run: {error}")
        tiny = make_tiny_model(self.architecture, tmp_path, **MODEL_SIZES)
        method = self.method_for(tiny.info)
        config = worker_config(tiny.info)
        loader = TensorLoader(self._stored_model(tiny))
        model, toolkit = build_model(factory, loader, config, PlainAttentionBackend(), quantization=method)
        driver = LocalDriver(model, toolkit)
        same, total = 0, 0
        for index, length in enumerate((40, 25, 33, 47)):
            prompt = [(7 * i * i + 13 * i + index) % tiny.info.vocab_size for i in range(length)]
            logits = driver.step({f"p{index}": prompt})[f"p{index}"]
            assert bool(torch.isfinite(logits).all()), "the quantized model's logits are not finite"
            same += int((logits.argmax(-1) == tiny.logits(prompt).argmax(-1)).sum())
            total += length
        assert same / total >= self.min_agreement, (
            f"{same} of {total} positions keep their most probable token, promised is a share of {self.min_agreement}"
        )

    def _stored_model(self, tiny: TinyModel) -> list[WeightTensor]:
        stored: list[WeightTensor] = []
        for name, tensor in tiny.tensors().items():
            owner = name.removesuffix(".weight")
            is_linear = owner.rpartition(".")[2] in {part for parts in LAYERS.values() for part in parts}
            if not (is_linear and name.endswith(".weight")):
                stored.append(weight_tensor(name, tensor))
                continue
            stored += [
                replace(entry, name=entry.name.replace(owner.rpartition(".")[2], owner, 1))
                for entry in self.store(owner.rpartition(".")[2], tensor.float())
            ]
        return stored


def _inputs(bench: LinearBench, name: str, tokens: int = 9) -> torch.Tensor:
    size = bench.weights[LAYERS[name][0]].shape[1]
    return torch.randn(tokens, size, generator=torch.Generator().manual_seed(3))


def _is_quantized(bench: LinearBench, name: str) -> Any:
    return not type(bench.layer(name).method).__module__.startswith("hardpoint_torch_runtime.")

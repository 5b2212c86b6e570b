"""Conformance of the plugin kind ``model``: derive from :class:`ModelSuite` and name yours.

Where Hugging Face knows the architecture, a tiny random checkpoint and the oracle are made from it; otherwise override
:meth:`ModelSuite.create_checkpoint`. Models that do not generate are held to their hidden states instead of logits,
encoders to prompts that are computed in one step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import pytest
import torch

from hardpoint.errors import HardpointError, ModelFormatError
from hardpoint.interfaces.model import Model, ModelContext, StageOutput, StageRange
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.local_driver import LocalDriver, create_model, worker_config
from hardpoint_testing_torch.parity import ParityHarness, relative_error
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from hardpoint_testing_torch.state_dict_loader import StateDictLoader
from hardpoint_testing_torch.tiny_models import ModelCheckpoint, make_tiny_model
from hardpoint_torch_runtime import ForwardContext, LayerToolkit, WeightReport, load_weights, set_forward_context

__all__ = ["ModelSuite"]

PROMPT = [3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]
SIZES = ("hidden_size", "num_attention_heads", "num_hidden_layers", "vocab_size")


class ModelSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.model.Model`, over a tiny checkpoint.

    ``checkpoint_config`` are fields of the configuration for :meth:`create_checkpoint`. ``max_relative_error`` bounds
    logits in float32 by the largest one, ``max_bfloat16_error`` those in bfloat16. Switches declare optional behavior:
    ``splits_into_stages``, ``takes_embeddings``, ``runs_others`` (the plugin runs architectures that it is not named
    after). ``size_names`` maps sizes of ``SIZES`` to the names that the family's
    configurations have for them. ``unknown_config`` are fields whose values nobody implements, which a model must
    refuse rather than ignore.
    """

    kind: ClassVar[str] = "model"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {}
    max_relative_error: ClassVar[float] = 1e-4
    max_bfloat16_error: ClassVar[float] = 0.15
    splits_into_stages: ClassVar[bool] = True
    takes_embeddings: ClassVar[bool] = True
    runs_others: ClassVar[bool] = False
    size_names: ClassVar[Mapping[str, str]] = {}
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody"}

    def create_model(self, ctx: ModelContext) -> Model:
        """The model under test, as its factory makes it."""
        made: Model = self.create_plugin(ctx)
        return made

    def create_checkpoint(self, folder: Path) -> ModelCheckpoint:
        """A tiny checkpoint for the architecture, with its oracle."""
        try:
            return make_tiny_model(self._name(), folder, **self.checkpoint_config)
        except AttributeError as error:
            raise TypeError(
                f"Hugging Face has no {self._name()}: override create_checkpoint() of {type(self).__name__} and return "
                "an object with info, tensors() and logits(token_ids)"
            ) from error

    @pytest.fixture(scope="class")
    @classmethod
    def checkpoint(cls, tmp_path_factory: pytest.TempPathFactory) -> ModelCheckpoint:
        return cls().create_checkpoint(tmp_path_factory.mktemp("checkpoint"))

    @pytest.fixture
    def harness(self, checkpoint: ModelCheckpoint) -> ParityHarness:
        """The loaded model beside its oracle."""
        return ParityHarness(checkpoint, self._factory, PlainAttentionBackend())

    def _factory(self, ctx: ModelContext, options: Any) -> Model:
        del options
        return self.create_model(ctx)

    def build(
        self,
        info: ModelInfo,
        *,
        dtype: str = "float32",
        stage: StageRange | None = None,
        quantization: QuantizationMethod | None = None,
    ) -> tuple[Any, LayerToolkit]:
        """A model without weights, and the toolkit that it was built with."""
        return create_model(
            self._factory,
            worker_config(info, dtype=dtype),
            PlainAttentionBackend(),
            stage=stage,
            quantization=quantization,
        )

    @staticmethod
    def load(
        model: Any, checkpoint: ModelCheckpoint, tensors: Mapping[str, torch.Tensor] | None = None
    ) -> WeightReport:
        """Fill ``model`` from ``tensors``, by default all that the checkpoint stores."""
        stored = checkpoint.tensors() if tensors is None else tensors
        return load_weights(model, StateDictLoader(stored), checkpoint.info, show_progress=False)

    def close(self, actual: torch.Tensor, expected: torch.Tensor, what: str) -> None:
        """``actual`` is within ``max_relative_error`` of ``expected``."""
        error = relative_error(actual.float(), expected.float())
        assert error <= self.max_relative_error, f"{what}: relative error {error:.3g} over {self.max_relative_error}"

    def test_it_is_a_model(self, checkpoint: ModelCheckpoint) -> None:
        model, _ = self.build(checkpoint.info)
        assert isinstance(model, torch.nn.Module), f"{type(model).__name__} is no torch.nn.Module"
        missing = [
            name
            for name in ("info", "weight_rules", "embed", "forward", "logits", "kv_cache_specs", "named_layers")
            if not hasattr(model, name)
        ]
        assert not missing, f"{type(model).__name__} lacks {', '.join(missing)}"
        assert model.info == checkpoint.info, "info is the one from the worker's configuration"
        if self.plugin is not None and not self.runs_others:
            assert checkpoint.info.architecture == self.plugin, (
                "the entry point is named like the architecture in config.json, or the model is never found"
            )

    def test_every_weight_is_loaded(self, checkpoint: ModelCheckpoint) -> None:
        """Each stored tensor goes somewhere, and each part of each parameter is filled."""
        model, _ = self.build(checkpoint.info)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(torch.nan)
        report = self.load(model, checkpoint)
        # What a stack holds is counted one by one.
        assert report.num_tensors + len(report.ignored) >= len(checkpoint.tensors())
        unfilled = [name for name, parameter in model.named_parameters() if bool(torch.isnan(parameter).any())]
        assert not unfilled, f"nothing, or not everything, was loaded into {', '.join(unfilled)}"

    def test_missing_tensors_are_named(self, checkpoint: ModelCheckpoint) -> None:
        """One at a time; optional ones and those that are ignored on purpose may be absent."""
        tensors = checkpoint.tensors()
        model, _ = self.build(checkpoint.info)
        spared = set(self.load(model, checkpoint).ignored)
        spared |= {rule.pattern for rule in model.weight_rules() if rule.optional}
        for name in tensors.keys() - spared:
            rest = {other: tensor for other, tensor in tensors.items() if other != name}
            fault = self._fault(checkpoint, rest)
            assert name in fault, f"without {name} loading says: {fault or 'nothing'}"

    def test_unknown_and_ill_shaped_tensors_are_named(self, checkpoint: ModelCheckpoint) -> None:
        """A checkpoint of something else never loads halfway."""
        tensors = checkpoint.tensors()
        for name in ("of_nobody.weight", f"{next(iter(tensors)).rpartition('.')[0]}.of_nobody"):
            fault = self._fault(checkpoint, {**tensors, name: torch.zeros(3)})
            assert name in fault, f"with a tensor {name} too many loading says: {fault or 'nothing'}"
        model, _ = self.build(checkpoint.info)
        ignored = self.load(model, checkpoint).ignored
        name, tensor = next((n, t) for n, t in tensors.items() if n not in ignored and t.dim() == 2)
        fault = self._fault(checkpoint, {**tensors, name: torch.cat((tensor, tensor[:1]))})
        assert name in fault, f"with a row too many in {name} loading says: {fault or 'nothing'}"

    def _fault(self, checkpoint: ModelCheckpoint, tensors: Mapping[str, torch.Tensor]) -> str:
        model, _ = self.build(checkpoint.info)
        try:
            self.load(model, checkpoint, tensors)
        except ModelFormatError as error:
            return str(error)
        return ""

    @pytest.mark.parametrize("field", SIZES)
    def test_a_configuration_without_a_size_is_refused(self, checkpoint: ModelCheckpoint, field: str) -> None:
        field = self.size_names.get(field, field)
        config = {name: value for name, value in checkpoint.info.config.items() if name != field}
        if len(config) == len(checkpoint.info.config):
            pytest.skip(f"the configuration has no {field}")
        with pytest.raises(HardpointError, match=field):
            self.build(msgspec.structs.replace(checkpoint.info, config=config))

    def test_what_it_cannot_compute_is_refused(self, checkpoint: ModelCheckpoint) -> None:
        """A field that asks for something else must not be passed over."""
        known = {name: value for name, value in self.unknown_config.items() if name in checkpoint.info.config}
        if not known:
            pytest.skip("the configuration has none of the fields in unknown_config")
        for name, value in known.items():
            info = msgspec.structs.replace(checkpoint.info, config={**checkpoint.info.config, name: value})
            with pytest.raises(HardpointError, match=name):
                self.build(info)

    @pytest.mark.parametrize("way", ["prefill", "chunked", "decode", "batched"])
    def test_logits_equal_the_oracles(self, harness: ParityHarness, way: str) -> None:
        """A prompt at once, in chunks with padding behind them, token by token, and next to others."""
        if way in ("chunked", "decode"):
            self._need_chunks(harness)
        error = getattr(harness, way)()
        assert error <= self.max_relative_error, f"{way}: relative error {error:.3g} over {self.max_relative_error}"

    def test_greedy_tokens_equal_the_oracles(self, harness: ParityHarness) -> None:
        if not self._generates(harness.model):
            pytest.skip("the model does not generate")
        assert harness.greedy_differences(count=24) == 0, "greedy tokens differ where the oracle has no near-tie"

    @pytest.mark.parametrize("block_size", [1, 16])
    def test_block_sizes(self, checkpoint: ModelCheckpoint, block_size: int) -> None:
        harness = ParityHarness(checkpoint, self._factory, PlainAttentionBackend(), block_size=block_size)
        self._need_chunks(harness)
        assert harness.chunked() <= self.max_relative_error

    def test_bfloat16(self, checkpoint: ModelCheckpoint) -> None:
        """Computing in another dtype: all weights follow, logits stay near."""
        model, toolkit = self.build(checkpoint.info, dtype="bfloat16")
        self.load(model, checkpoint)
        others = [n for n, p in model.named_parameters() if p.is_floating_point() and p.dtype == torch.float32]
        assert len(others) < len(list(model.parameters())), "the compute dtype of the toolkit is not used"
        logits = LocalDriver(model, toolkit).step({"a": PROMPT})["a"]
        error = relative_error(logits.float(), checkpoint.logits(PROMPT))
        assert error <= self.max_bfloat16_error, f"relative error {error:.3g} over {self.max_bfloat16_error}"

    def test_equal_steps_give_equal_bits(self, harness: ParityHarness) -> None:
        first, second = (harness.driver.step({name: PROMPT})[name] for name in "ab")
        assert torch.equal(first, second), "the same prompt gives other bits the second time"

    @torch.inference_mode()
    def test_logits_of_any_rows(self, harness: ParityHarness) -> None:
        """[S, C] to [S, V]: only sampled rows are projected, sometimes none, and the hidden states stay. A model that
        does not generate says so."""
        hidden = harness.driver.run({"a": PROMPT})
        hidden = self._hidden(hidden, len(PROMPT))
        before = hidden.clone()
        if not self._generates(harness.model):
            with pytest.raises(RuntimeError):
                harness.model.logits(hidden)
            return
        whole = harness.model.logits(hidden)
        assert torch.equal(hidden, before), "logits() wrote into the hidden states"
        assert whole.shape == (len(PROMPT), harness.tiny.info.vocab_size)
        self.close(harness.model.logits(hidden[[7, 2]]), whole[[7, 2]], "logits of two rows")
        assert harness.model.logits(hidden[:0]).shape == (0, harness.tiny.info.vocab_size)

    @staticmethod
    def _generates(model: Model) -> bool:
        return "generate" in model.info.tasks

    def _outcome(self, model: Model, hidden: torch.Tensor) -> torch.Tensor:
        """What the oracle tells: logits, or the hidden states of a model that has none."""
        return model.logits(hidden) if self._generates(model) else hidden

    @staticmethod
    def _need_chunks(harness: ParityHarness) -> None:
        if not harness.driver.takes_chunks:
            pytest.skip("prompts of an encoder are computed in one step")

    def _hidden(self, output: torch.Tensor | StageOutput, tokens: int) -> torch.Tensor:
        if not isinstance(output, StageOutput):
            return output
        for extra in output.auxiliary:
            assert extra.shape[0] == tokens, "auxiliary states have one row per token"
        assert output.hidden is not None, "the last stage yields hidden states"
        return output.hidden

    def test_it_can_be_profiled(self, harness: ParityHarness) -> None:
        """R5.40: without attention metadata and cache, for the largest step."""
        context = ForwardContext(attention_metadata=None, slot_mapping={}, kv_caches={}, num_tokens=64)
        with torch.inference_mode(), set_forward_context(context):
            output = harness.model.forward(torch.zeros(64, dtype=torch.int64), torch.arange(64))
        assert bool(torch.isfinite(self._hidden(output, 64)).all())

    def test_layers_can_be_found(self, checkpoint: ModelCheckpoint) -> None:
        """By dotted name, each of them, in order; what they keep in the KV cache is what the toolkit made."""
        model, toolkit = self.build(checkpoint.info)
        modules, layers = dict(model.named_modules()), list(model.named_layers())
        wrong = [name for name, layer in layers if modules.get(name) is not layer]
        assert not wrong, f"named_layers() gives names that lead elsewhere: {', '.join(wrong)}"
        wanted = checkpoint.info.config.get(self.size_names.get("num_hidden_layers", "num_hidden_layers"))
        if wanted is not None:
            assert len(layers) == wanted, f"{len(layers)} of {wanted} layers are named"
        specs = model.kv_cache_specs()
        assert list(specs.items()) == list(toolkit.kv_cache_specs().items()), (
            "kv_cache_specs() must list every attention layer of the toolkit, in model order"
        )
        others = {name: spec.block_size for name, spec in specs.items() if spec.block_size != toolkit.config.block_size}
        assert not others, f"block sizes that are not the configured one: {others}"

    def test_every_linear_can_be_quantized(self, checkpoint: ModelCheckpoint) -> None:
        """Linear layers come from the toolkit, under their own dotted names."""
        recorder = _Recorder()
        model, _ = self.build(checkpoint.info, quantization=recorder)
        bare = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear)]
        assert not bare, f"made without the toolkit, so no method can quantize them: {', '.join(bare)}"
        assert recorder.names, "the model asks the toolkit for no linear layer"
        assert len(set(recorder.names)) == len(recorder.names), "two linear layers have one name"
        lost = [name for name in recorder.names if name not in dict(model.named_modules())]
        assert not lost, f"names that are no dotted path in the model: {', '.join(lost)}"

    @torch.inference_mode()
    def test_embeddings_may_replace_ids(self, harness: ParityHarness) -> None:
        """What ``embed`` gives, or somebody else's; they belong to the caller."""
        if not self.takes_embeddings:
            pytest.skip("the model declares not to take embeddings")
        embeddings = harness.model.embed(torch.tensor(PROMPT))
        assert embeddings.shape[0] == len(PROMPT)
        before = embeddings.clone()
        hidden = self._hidden(harness.driver.run({"a": PROMPT}, embeddings=embeddings), len(PROMPT))
        assert torch.equal(embeddings, before), "forward() wrote into the embeddings it was given"
        self.close(self._outcome(harness.model, hidden), harness.tiny.logits(PROMPT), "from embeddings")

    @torch.inference_mode()
    def test_stages_together_are_the_whole(self, checkpoint: ModelCheckpoint) -> None:
        """Cut anywhere: each stage loads and keeps only its own, and hands on what the next one needs."""
        count = self._num_layers(checkpoint)
        whole, _ = self.build(checkpoint.info)
        for cut in range(1, count):
            built = []
            for stage in self._stages(cut, count):
                model, toolkit = self.build(checkpoint.info, stage=stage)
                self.load(model, checkpoint)
                built.append((model, LocalDriver(model, toolkit)))
            names = [name for model, _ in built for name in model.kv_cache_specs()]
            assert names == list(whole.kv_cache_specs()), f"cut at layer {cut}: the stages keep {names}"
            (_, first), (last, second) = built
            handed = first.run({"a": PROMPT})
            assert isinstance(handed, StageOutput), "a stage without head yields a StageOutput"
            assert handed.intermediates, "a stage without head hands nothing on"
            copies = {name: tensor.clone() for name, tensor in handed.intermediates.items()}
            hidden = self._hidden(second.run({"a": PROMPT}, intermediates=handed.intermediates), len(PROMPT))
            for name, tensor in copies.items():
                assert torch.equal(handed.intermediates[name], tensor), f"forward() wrote into intermediate {name!r}"
            self.close(self._outcome(last, hidden), checkpoint.logits(PROMPT), f"cut at layer {cut}")

    def test_a_stage_says_what_it_lacks(self, checkpoint: ModelCheckpoint) -> None:
        count = self._num_layers(checkpoint)
        first, _ = next(self.build(checkpoint.info, stage=stage) for stage in self._stages(1, count))
        with pytest.raises(RuntimeError):
            first.logits(torch.zeros(1, int(checkpoint.info.config.get("hidden_size", 8))))

    def _num_layers(self, checkpoint: ModelCheckpoint) -> int:
        if not self.splits_into_stages:
            pytest.skip("the model declares not to be split into stages")
        return int(checkpoint.info.config[self.size_names.get("num_hidden_layers", "num_hidden_layers")])

    @staticmethod
    def _stages(cut: int, count: int) -> Iterator[StageRange]:
        yield StageRange(0, cut, has_head=False)
        yield StageRange(cut, count, has_embedding=False)


class _Recorder(QuantizationMethod):
    """Leaves all layers alone and remembers their names."""

    name = "recorder"

    def __init__(self) -> None:
        self.names: list[str] = []

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        del info, device_type
        return None

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        del shape
        self.names.append(layer_name)
        return None

"""Weight loading by declared rules: where tensors go, and one message for everything that does not fit."""

from __future__ import annotations

import io
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import WeightRule
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime import WeightReport, load_weights
from hardpoint_torch_runtime.layers import (
    LinearFactory,
    MergedColumnParallelLinear,
    Placement,
    TensorParallel,
    UnquantizedLinearMethod,
)
from hardpoint_torch_runtime.weights import RuleBook, WeightInventor, WeightPlan

CPU = torch.device("cpu")
INFO = ModelInfo(
    artifact=ModelArtifact(name="tiny", root="/models/tiny", files=("model.safetensors",), source="test"),
    architecture="A",
    config={},
    max_position=8,
    vocab_size=8,
    dtype="float32",
    loader="listed",
)
RULES = [
    WeightRule("blocks.*.gate_proj.*", "blocks.*.gate_up.*", "gate"),
    WeightRule("blocks.*.up_proj.*", "blocks.*.gate_up.*", "up"),
    WeightRule("blocks.*.norm.weight", "blocks.*.norm"),
    WeightRule("old_table", None),
    WeightRule("extra.weight", "extra", optional=True),
]


class ListedLoader(WeightLoader):
    def __init__(self, tensors: Sequence[WeightTensor]) -> None:
        self._tensors = tensors

    def accepts(self, artifact: ModelArtifact) -> bool:
        return True

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        return INFO

    def num_bytes(self, info: ModelInfo) -> int:
        return sum(tensor.data.nbytes for tensor in self._tensors)

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        yield from self._tensors


class Block(torch.nn.Module):
    def __init__(self, factory: LinearFactory) -> None:
        super().__init__()
        self.gate_up = MergedColumnParallelLinear("gate_up", factory, 3, {"gate": 2, "up": 2}, bias=True)
        self.norm = torch.nn.Parameter(torch.zeros(3, dtype=factory.dtype), requires_grad=False)


class TinyModel(torch.nn.Module):
    """Just the part of a model that loading looks at."""

    def __init__(self, dtype: torch.dtype = torch.float32, method: LinearMethod | None = None) -> None:
        super().__init__()
        self.method = method or UnquantizedLinearMethod(dtype, CPU)
        self.blocks = torch.nn.ModuleList([Block(LinearFactory(self.choose, TensorParallel(), dtype, CPU))])

    def choose(self, name: str, shape: LinearShape) -> LinearMethod:
        return self.method

    def weight_rules(self) -> Sequence[WeightRule]:
        return RULES


def complete() -> dict[str, np.ndarray]:
    generator = np.random.default_rng(0)
    shapes: Mapping[str, tuple[int, ...]] = {
        "blocks.0.gate_proj.weight": (2, 3),
        "blocks.0.gate_proj.bias": (2,),
        "blocks.0.up_proj.weight": (2, 3),
        "blocks.0.up_proj.bias": (2,),
        "blocks.0.norm.weight": (3,),
    }
    return {name: generator.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def stored(arrays: Mapping[str, np.ndarray]) -> list[WeightTensor]:
    return [WeightTensor(name, str(array.dtype), array.shape, array) for name, array in arrays.items()]


def load(model: Any, tensors: Sequence[WeightTensor], show_progress: bool = False) -> WeightReport:
    return load_weights(model, ListedLoader(tensors), INFO, show_progress=show_progress)


def test_parts_of_a_fused_layer_land_side_by_side_in_any_order() -> None:
    model, arrays = TinyModel(), complete()
    report = load(model, list(reversed(stored(arrays))))
    block = model.blocks[0]
    expected = np.concatenate([arrays["blocks.0.gate_proj.weight"], arrays["blocks.0.up_proj.weight"]])
    np.testing.assert_array_equal(block.get_parameter("gate_up.weight").numpy(), expected)
    np.testing.assert_array_equal(block.get_parameter("norm").numpy(), arrays["blocks.0.norm.weight"])
    assert report.num_tensors == 5
    assert report.num_bytes == sum(array.nbytes for array in arrays.values())
    assert report.ignored == ()


FUSED_RULES = [*RULES, WeightRule("blocks.*.gate_up_proj.*", "blocks.*.gate_up.*")]


class FusedTinyModel(TinyModel):
    """Takes checkpoints that hold the parts in one tensor as well."""

    def weight_rules(self) -> Sequence[WeightRule]:
        return FUSED_RULES


def fused(arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    parts = {name: array for name, array in arrays.items() if "_proj" not in name}
    for kind in ("weight", "bias"):
        halves = [arrays[f"blocks.0.{part}_proj.{kind}"] for part in ("gate", "up")]
        parts[f"blocks.0.gate_up_proj.{kind}"] = np.concatenate(halves)
    return parts


def test_parts_may_be_stored_fused_or_one_by_one() -> None:
    one, other = FusedTinyModel(), FusedTinyModel()
    load(one, stored(fused(complete())))
    load(other, stored(complete()))
    assert dict(one.named_parameters())
    for (name, found), (_, expected) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_what_is_missing_may_have_come_either_way_until_a_part_comes() -> None:
    arrays = complete()
    with pytest.raises(ModelFormatError) as caught:
        load(FusedTinyModel(), stored({"blocks.0.norm.weight": arrays["blocks.0.norm.weight"]}))
    assert "4 tensors missing blocks.0.gate_proj.weight or blocks.0.gate_up_proj.weight, " in str(caught.value)
    del arrays["blocks.0.up_proj.weight"]
    with pytest.raises(ModelFormatError, match=r"1 tensors missing blocks\.0\.up_proj\.weight\. Check"):
        load(FusedTinyModel(), stored(arrays))


@pytest.mark.parametrize("is_first", [True, False])
def test_a_part_that_is_stored_twice_over_is_refused(is_first: bool) -> None:
    part = {"blocks.0.gate_proj.weight": complete()["blocks.0.gate_proj.weight"]}
    arrays = {**part, **fused(complete())} if is_first else {**fused(complete()), **part}
    with pytest.raises(ModelFormatError, match="loaded already, by this or another name"):
        load(FusedTinyModel(), stored(arrays))


def test_an_inventor_is_asked_for_the_parts_alone() -> None:
    plan = WeightPlan(RuleBook(FUSED_RULES), [name for name, _ in FusedTinyModel().named_parameters()])
    assert sorted(expected.stored_name for _, expected in plan.wanted()) == sorted(complete())


def unpacked(name: str, alive: list[weakref.ref[np.ndarray]]) -> WeightTensor:
    array = complete()[name].copy()
    alive.append(weakref.ref(array))
    return WeightTensor(name, "float32", array.shape, array)


def test_one_unpacked_tensor_is_alive_at_a_time() -> None:
    class Unpacking(ListedLoader):
        """As loaders do it: nothing of a tensor stays behind in the generator."""

        def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
            alive: list[weakref.ref[np.ndarray]] = []
            for name in complete():
                assert all(entry() is None for entry in alive), "an earlier tensor still takes memory"
                yield unpacked(name, alive)

    model: Any = TinyModel()
    report = load_weights(model, Unpacking(()), INFO, show_progress=False)
    assert report.num_tensors == 5


def test_everything_that_does_not_fit_is_in_one_error_with_the_artifact() -> None:
    arrays = complete()
    del arrays["blocks.0.up_proj.weight"], arrays["blocks.0.norm.weight"]
    arrays["blocks.0.gate_proj.weight"] = np.zeros((4, 3), dtype=np.float32)
    arrays["blocks.7.norm.weight"] = np.zeros(3, dtype=np.float32)
    arrays["stranger"] = np.zeros(3, dtype=np.float32)
    with pytest.raises(ModelFormatError) as caught:
        load(TinyModel(), stored(arrays))
    message = str(caught.value)
    for part in (
        "'tiny' in /models/tiny (model.safetensors)",
        "2 tensors missing blocks.0.norm.weight, blocks.0.up_proj.weight",
        "2 tensors unexpected blocks.7.norm.weight, stranger",
        "blocks.0.gate_proj.weight [4, 3] (expected [2, 3])",
    ):
        assert part in message


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int32, np.bool_])
def test_whole_numbers_are_no_weights(dtype: type[np.generic]) -> None:
    """They belong to a quantized checkpoint whose configuration does not say so."""
    arrays = complete() | {"blocks.0.up_proj.weight": np.ones((2, 3), dtype)}
    name = {"bool_": "bool"}.get(dtype.__name__, np.dtype(dtype).name)
    with pytest.raises(ModelFormatError, match=rf"1 tensors of whole numbers .* blocks\.0\.up_proj\.weight \({name}\)"):
        load(TinyModel(), stored(arrays))


def test_floats_of_any_width_are_weights() -> None:
    arrays = complete() | {"blocks.0.up_proj.weight": np.full((2, 3), 0.5, np.float64)}
    model = TinyModel()
    load(model, stored(arrays))
    weight = model.get_parameter("blocks.0.gate_up.weight")
    assert weight[2:].tolist() == [[0.5] * 3] * 2


def test_long_lists_are_cut() -> None:
    strangers = {f"stranger.{index}": np.zeros(1, dtype=np.float32) for index in range(50)}
    with pytest.raises(ModelFormatError, match=r"50 tensors unexpected stranger\.0, .*and 42 more"):
        load(TinyModel(), stored({**complete(), **strangers}))


def test_ignored_and_absent_optional_tensors_are_no_problem() -> None:
    report = load(TinyModel(), stored({**complete(), "old_table": np.zeros(2, dtype=np.float32)}))
    assert report.ignored == ("old_table",)


def test_a_parameter_without_a_rule_is_the_plugins_fault() -> None:
    model = TinyModel()
    model.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    with pytest.raises(ModelFormatError, match=r"without a weight rule in the model plugin: forgotten"):
        load(model, stored(complete()))


def test_bfloat16_travels_as_uint16_and_is_kept_or_widened_exactly() -> None:
    values = {name: torch.from_numpy(array).bfloat16() for name, array in complete().items()}
    tensors = [
        WeightTensor(name, "bfloat16", tuple(value.shape), value.view(torch.uint16).numpy())
        for name, value in values.items()
    ]
    for dtype in (torch.bfloat16, torch.float32):
        model = TinyModel(dtype)
        load(model, tensors)
        norm = model.blocks[0].get_parameter("norm")
        assert norm.dtype == dtype
        assert torch.equal(norm.data, values["blocks.0.norm.weight"].to(dtype))


def test_read_only_mappings_are_read_without_a_warning() -> None:
    arrays = complete()
    for array in arrays.values():
        array.flags.writeable = False
    load(TinyModel(), stored(arrays))


def test_packed_tensors_are_dequantized_for_a_plain_layer() -> None:
    arrays = complete()
    packed = [
        WeightTensor(tensor.name, "gguf.q4_0", tensor.shape, np.zeros(1, dtype=np.uint8), lambda t=tensor: t.data)  # type: ignore[misc]
        for tensor in stored(arrays)
    ]
    model = TinyModel()
    load(model, packed)
    np.testing.assert_array_equal(model.blocks[0].get_parameter("norm").numpy(), arrays["blocks.0.norm.weight"])


class PackedMethod(UnquantizedLinearMethod):
    def __init__(self) -> None:
        super().__init__(torch.float32, CPU)
        self.received: list[tuple[str, str, Placement]] = []
        self.finished = 0

    def load_packed(self, layer: torch.nn.Module, parameter: str, placement: Placement, tensor: WeightTensor) -> None:
        self.received.append((tensor.dtype, parameter, placement))

    def process_after_loading(self, layer: torch.nn.Module) -> None:
        self.finished += 1


def test_a_packed_method_gets_the_tensor_as_stored_and_finishes_once() -> None:
    method = PackedMethod()
    model = TinyModel(method=method)
    tensors = stored(complete())
    first = tensors[0]
    tensors[0] = WeightTensor(first.name, "gguf.q4_0", first.shape, np.zeros(1, dtype=np.uint8), lambda: first.data)
    load(model, tensors)
    assert method.received == [("gguf.q4_0", "weight", Placement((2, 3), 0, 0, 0, 2))]
    assert method.finished == 1


def test_a_packed_tensor_without_a_way_to_unpack_is_refused() -> None:
    tensors = stored(complete())
    norm = tensors[-1]
    tensors[-1] = WeightTensor(norm.name, "gguf.q4_0", norm.shape, np.zeros(1, dtype=np.uint8))
    with pytest.raises(ModelFormatError, match=r"'blocks\.0\.norm\.weight' is stored as 'gguf\.q4_0'"):
        load(TinyModel(), tensors)


class SecondStage(TinyModel):
    def holds(self, parameter: str) -> bool:
        return not parameter.startswith("blocks.1.")


def test_tensors_of_other_stages_are_passed_over() -> None:
    arrays = {**complete(), "blocks.1.norm.weight": np.zeros(3, dtype=np.float32)}
    assert load(SecondStage(), stored(arrays)).ignored == ("blocks.1.norm.weight",)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_the_bar_counts_stored_bytes_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    for stream, shown, wanted in ((Terminal(), True, True), (Terminal(), False, False), (io.StringIO(), True, False)):
        monkeypatch.setattr("sys.stderr", stream)
        load(TinyModel(), stored(complete()), show_progress=shown)
        assert ("Loading weights of tiny: 100%" in stream.getvalue()) is wanted


class Inventing(ListedLoader):
    """Makes up zeros, and keeps what it was asked for."""

    def __init__(self) -> None:
        super().__init__(())
        self.asked: list[tuple[str, tuple[int, ...]]] = []

    def invent(self, wanted: Iterable[tuple[str, tuple[int, ...]]]) -> Iterator[WeightTensor]:
        for name, shape in wanted:
            self.asked.append((name, shape))
            yield WeightTensor(name, "float32", shape, np.zeros(shape, dtype=np.float32))

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        raise AssertionError("there are no files")


def test_an_inventor_is_asked_for_all_that_the_rules_expect() -> None:
    """Stored names and shapes, the parts of a fused layer apart, in the order of the model."""
    loader, model = Inventing(), TinyModel()
    assert isinstance(loader, WeightInventor)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(torch.nan)
    report = load_weights(model, loader, INFO, show_progress=False)  # type: ignore[arg-type]
    assert dict(loader.asked) == {name: array.shape for name, array in complete().items()}
    assert report.num_tensors == len(loader.asked) == 5
    assert not any(bool(parameter.isnan().any()) for parameter in model.parameters())


def test_an_inventor_cannot_make_up_for_a_forgotten_rule() -> None:
    model = TinyModel()
    model.register_parameter("forgotten", torch.nn.Parameter(torch.zeros(1), requires_grad=False))
    with pytest.raises(ModelFormatError, match=r"without a weight rule in the model plugin: forgotten"):
        load_weights(model, Inventing(), INFO, show_progress=False)  # type: ignore[arg-type]


def test_something_that_is_no_module_is_refused() -> None:
    with pytest.raises(TypeError, match=r"object is no torch\.nn\.Module"):
        load(object(), [])


# The rule book alone.

segment = st.text(alphabet="abz019_", min_size=1, max_size=5)


@given(layer=segment, rest=segment)
def test_rules_work_in_both_directions(layer: str, rest: str) -> None:
    book = RuleBook([WeightRule("m.*.q.*", "n.*.qkv.*", "q"), WeightRule("m.*.k.*", "n.*.qkv.*", "k")])
    destination = book.destination(f"m.{layer}.k.{rest}")
    assert destination is not None
    assert destination.parameter == f"n.{layer}.qkv.{rest}"
    assert destination.shard == "k"
    assert [one.stored_name for one in book.expected(destination.parameter)] == [
        f"m.{layer}.q.{rest}",
        f"m.{layer}.k.{rest}",
    ]


def test_a_star_is_exactly_one_segment_and_dots_are_literal() -> None:
    book = RuleBook([WeightRule("a.*.b", "x.*")])
    assert book.destination("a.1.b") is not None
    for name in ("a.1.2.b", "a..b", "aX1Xb", "a.1.b.c", "z.a.1.b"):
        assert book.destination(name) is None


def test_the_first_matching_rule_counts() -> None:
    book = RuleBook([WeightRule("a.b", None), WeightRule("a.*", "x.*")])
    found = book.destination("a.b")
    assert found is not None
    assert found.parameter is None


def test_unequal_stars_are_refused() -> None:
    with pytest.raises(ValueError, match="equally many"):
        RuleBook([WeightRule("a.*", "x")])


def test_a_quicker_way_to_unpack_is_asked_first() -> None:
    """What it declines unpacks itself, and plain tensors are not its affair."""
    arrays, asked = complete(), []
    quick, slow = "blocks.0.gate_proj.weight", "blocks.0.up_proj.weight"
    raw = np.zeros(1, dtype=np.uint8)

    def packed(name: str, values: np.ndarray) -> WeightTensor:
        return WeightTensor(name, "gguf.q8_0", values.shape, raw, lambda: values)

    tensors = [one for one in stored(arrays) if one.name not in (quick, slow)]
    tensors += [packed(quick, np.full_like(arrays[quick], np.nan)), packed(slow, arrays[slow])]

    def unpack(tensor: WeightTensor) -> torch.Tensor | None:
        asked.append(tensor.name)
        return torch.from_numpy(arrays[quick]) if tensor.name == quick else None

    model: Any = TinyModel()
    load_weights(model, ListedLoader(tensors), INFO, show_progress=False, unpack=unpack)
    expected = np.concatenate([arrays[quick], arrays[slow]])
    np.testing.assert_array_equal(model.blocks[0].get_parameter("gate_up.weight").numpy(), expected)
    assert asked == [quick, slow]

"""Rules for stacks and for alternative names: one model, however its checkpoints bundle and name the same matrices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import WeightRule
from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_testing_torch.state_dict_loader import TensorLoader
from hardpoint_torch_runtime import WeightReport, load_weights
from hardpoint_torch_runtime.layers import (
    LinearFactory,
    MergedColumnParallelLinear,
    TensorParallel,
    UnquantizedLinearMethod,
)
from hardpoint_torch_runtime.weights import RuleBook, StackRule, WeightPlan

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
    WeightRule("b.*.w.*.gate.weight", "b.*.w.*.gate_up.weight", "gate"),
    WeightRule("b.*.w.*.up.weight", "b.*.w.*.gate_up.weight", "up"),
    WeightRule("old.*.*.gate.weight", "b.*.w.*.gate_up.weight", "gate"),
    WeightRule("old.*.*.up.weight", "b.*.w.*.gate_up.weight", "up"),
    WeightRule("b.*.w.gate_up", None, unstacked=("b.*.w.*.gate.weight", "b.*.w.*.up.weight")),
]


def plain(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return UnquantizedLinearMethod(torch.float32, CPU)


class Block(torch.nn.Module):
    def __init__(self, parallel: TensorParallel) -> None:
        super().__init__()
        factory = LinearFactory(plain, parallel, torch.float32, CPU)
        linears = [MergedColumnParallelLinear(f"w.{i}.gate_up", factory, 3, {"gate": 4, "up": 4}) for i in range(2)]
        self.w = torch.nn.ModuleList([torch.nn.ModuleDict({"gate_up": linear}) for linear in linears])


class TwoByTwo(torch.nn.Module):
    """Two blocks with two fused matrices each."""

    def __init__(self, parallel: TensorParallel | None = None) -> None:
        super().__init__()
        self.b = torch.nn.ModuleList([Block(parallel or TensorParallel()) for _ in range(2)])

    def weight_rules(self) -> Sequence[WeightRule]:
        return RULES

    def filled(self) -> torch.Tensor:
        """[block, matrix, gate and up rows, 3]."""
        return torch.stack(list(self.parameters())).unflatten(0, (2, 2))


STACKS = np.random.default_rng(0).standard_normal((2, 2, 8, 3)).astype(np.float32)
"""[block, matrix, gate and up rows, 3]."""


def stacked() -> dict[str, np.ndarray]:
    return {f"b.{block}.w.gate_up": STACKS[block] for block in range(2)}


def apart(pattern: str) -> dict[str, np.ndarray]:
    rows = {"gate": slice(0, 4), "up": slice(4, 8)}
    return {
        pattern.format(block=block, matrix=matrix, part=part): STACKS[block, matrix, where]
        for block in range(2)
        for matrix in range(2)
        for part, where in rows.items()
    }


def load(model: Any, arrays: Mapping[str, np.ndarray]) -> WeightReport:
    tensors = [WeightTensor(name, str(array.dtype), array.shape, array) for name, array in arrays.items()]
    return load_weights(model, TensorLoader(tensors), INFO, show_progress=False)


@pytest.mark.parametrize(
    "arrays",
    [
        stacked(),
        apart("b.{block}.w.{matrix}.{part}.weight"),
        apart("old.{block}.{matrix}.{part}.weight"),
        {
            "b.1.w.gate_up": STACKS[1],
            **{name: array for name, array in apart("old.{block}.{matrix}.{part}.weight").items() if "old.0" in name},
        },
    ],
    ids=["stacked", "apart", "other-names", "mixed"],
)
def test_bundling_and_names_make_no_difference(arrays: dict[str, np.ndarray]) -> None:
    model = TwoByTwo()
    report = load(model, arrays)
    np.testing.assert_array_equal(model.filled().numpy(), STACKS)
    assert report.num_tensors == 8
    assert report.num_bytes == STACKS.nbytes


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_take_their_share_of_each_part_of_a_stack(rank: int) -> None:
    model = TwoByTwo(TensorParallel(rank, 2))
    load(model, stacked())
    gate, up = STACKS[:, :, :4], STACKS[:, :, 4:]
    mine = slice(2 * rank, 2 * rank + 2)
    np.testing.assert_array_equal(model.filled().numpy(), np.concatenate([gate[:, :, mine], up[:, :, mine]], axis=2))


class LaidOut(TwoByTwo):
    """The same matrices with biases, from stacks in a layout of their own."""

    def __init__(self, is_transposed: bool, alternates: bool, parallel: TensorParallel | None = None) -> None:
        super().__init__(parallel)
        self._is_transposed, self._alternates = is_transposed, alternates
        self.linears = [module for module in self.modules() if isinstance(module, MergedColumnParallelLinear)]
        for linear in self.linears:
            linear.bias = torch.nn.Parameter(torch.full((linear.shape.output_size,), torch.nan), requires_grad=False)

    def weight_rules(self) -> Sequence[WeightRule]:
        weights, biases = ((f"b.*.w.*.gate.{kind}", f"b.*.w.*.up.{kind}") for kind in ("weight", "bias"))
        return [
            WeightRule("b.*.w.*.gate.*", "b.*.w.*.gate_up.*", "gate"),
            WeightRule("b.*.w.*.up.*", "b.*.w.*.gate_up.*", "up"),
            StackRule(
                "b.*.w.gate_up", None, unstacked=weights, is_transposed=self._is_transposed, alternates=self._alternates
            ),
            StackRule("b.*.w.gate_up_bias", None, unstacked=biases, alternates=self._alternates),
        ]


@pytest.mark.parametrize("alternates", [False, True], ids=["behind", "in-turns"])
@pytest.mark.parametrize("is_transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("size", [1, 2])
def test_outputs_may_be_columns_and_parts_may_take_turns(size: int, is_transposed: bool, alternates: bool) -> None:
    stored, biases = STACKS, STACKS[..., 0]
    if alternates:
        gate_and_up = STACKS.reshape(2, 2, 2, 4, 3)
        stored = gate_and_up.swapaxes(2, 3).reshape(STACKS.shape)
        biases = stored[..., 0]
    weights = stored.swapaxes(2, 3) if is_transposed else stored
    arrays = {f"b.{block}.w.gate_up": np.ascontiguousarray(weights[block]) for block in range(2)}
    arrays |= {f"b.{block}.w.gate_up_bias": np.ascontiguousarray(biases[block]) for block in range(2)}
    for rank in range(size):
        model = LaidOut(is_transposed, alternates, TensorParallel(rank, size))
        load(model, arrays)
        mine = [start + row for start in (0, 4) for row in range(rank * 4 // size, (rank + 1) * 4 // size)]
        for number, linear in enumerate(model.linears):
            expected = STACKS[divmod(number, 2)][mine]
            np.testing.assert_array_equal(linear.get_parameter("weight").numpy(), expected)
            np.testing.assert_array_equal(linear.get_parameter("bias").numpy(), expected[:, 0])


def test_a_stack_of_columns_that_do_not_divide_is_named() -> None:
    arrays = {"b.0.w.gate_up": np.zeros((2, 8, 3), np.float32)}
    with pytest.raises(ModelFormatError, match=r"b\.0\.w\.gate_up \[2, 8, 3\] \(expected a stack of"):
        load(LaidOut(is_transposed=True, alternates=False), arrays)


def test_a_missing_stack_is_named_beside_what_it_would_hold() -> None:
    arrays = stacked()
    del arrays["b.1.w.gate_up"]
    with pytest.raises(ModelFormatError, match=r"4 tensors missing b\.1\.w\.0\.gate\.weight or .* b\.1\.w\.gate_up,"):
        load(TwoByTwo(), arrays)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"b.0.w.gate_up": STACKS[0][:1]}, r"2 tensors missing b\.0\.w\.1\.gate\.weight or old\.0\.1\.gate\.weight"),
        ({"b.0.w.gate_up": np.concatenate([STACKS[0]] * 2)}, r"unexpected b\.0\.w\.2\.gate\.weight"),
        ({"b.0.w.gate_up": STACKS[0][:, :6]}, r"b\.0\.w\.0\.gate\.weight \[3, 3\] \(expected \[4, 3\]\)"),
        ({"b.0.w.gate_up": STACKS[0][:, :7]}, r"b\.0\.w\.gate_up \[2, 7, 3\] \(expected a stack of .*gate.* and .*up"),
        ({"b.0.w.gate_up": STACKS[0, 0, 0, :2]}, r"b\.0\.w\.gate_up \[2\] \(expected a stack"),
        ({"b.0.w.1.up.weight": STACKS[0, 1, 4:]}, r"unexpected b\.0\.w\.1\.up\.weight \(loaded already"),
        ({"old.0.1.up.weight": STACKS[0, 1, 4:]}, r"unexpected old\.0\.1\.up\.weight \(loaded already"),
    ],
)
def test_what_does_not_fit_is_named(change: dict[str, np.ndarray], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        load(TwoByTwo(), {**stacked(), **change})


def test_packed_stacks_are_refused_with_a_way_out() -> None:
    tensor = WeightTensor(
        "b.0.w.gate_up", "gguf.q4_1", (2, 8, 3), np.zeros(20, dtype=np.uint8), lambda: np.zeros((2, 8, 3))
    )
    model: Any = TwoByTwo()
    with pytest.raises(ModelFormatError, match=r"'b\.0\.w\.gate_up' is a stack stored as 'gguf\.q4_1'.*Store"):
        load_weights(model, TensorLoader([tensor]), INFO, show_progress=False)


@pytest.mark.parametrize(
    "rule",
    [
        WeightRule("a.*.stack", None, unstacked=("a.*.one",)),
        WeightRule("a.*.stack", "a.*.one", unstacked=("a.*.*.one",)),
    ],
)
def test_a_rule_for_a_stack_must_leave_room_for_the_number(rule: WeightRule) -> None:
    with pytest.raises(ValueError, match="one '\\*' more than the pattern, and the rule no target"):
        RuleBook([rule])


def test_a_part_is_optional_only_if_all_its_names_are() -> None:
    book = RuleBook([WeightRule("x", "p", optional=True), WeightRule("y", "p"), WeightRule("z", "q", optional=True)])
    assert WeightPlan(book, ["p", "q"]).missing() == ("x or y",)
    plan = WeightPlan(book, ["p", "q"])
    assert [plan.arrived(name) for name in ("x", "y", "stranger")] == [True, False, True]
    assert plan.missing() == ()


def test_of_alternatives_the_first_one_is_wanted() -> None:
    book = RuleBook([WeightRule("x", "p", optional=True), WeightRule("y", "p"), WeightRule("z", "q"), *RULES])
    plan = WeightPlan(book, ["p", "q", "b.0.w.1.gate_up.weight"])
    wanted = [(parameter, expected.stored_name, expected.shard) for parameter, expected in plan.wanted()]
    fused = "b.0.w.1.gate_up.weight"
    assert wanted == [
        ("p", "x", None),
        ("q", "z", None),
        (fused, "b.0.w.1.gate.weight", "gate"),
        (fused, "b.0.w.1.up.weight", "up"),
    ]

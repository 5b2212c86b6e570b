"""What manifests say that a model takes beside tokens is what it takes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.interfaces.request import Feature
from hardpoint.testing.model_facts import installed_models
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_testing_torch import (
    ParityCase,
    StateDictLoader,
    build_model,
    installed_factory,
    make_tiny_model,
    worker_config,
)
from model_cases_encdec import ENCODER_DECODER_CASES
from model_cases_tiles import TILE_CASES
from model_cases_vision import VISION_CASES

CASES = (*ENCODER_DECODER_CASES, *TILE_CASES, *VISION_CASES)
FIRST = {case.architecture: case for case in reversed(CASES)}
DECLARED = {
    model.architecture: model.inputs
    for model in installed_models().models
    if model.distribution == "hardpoint-models" and model.inputs
}
OPTIONAL = ", may be left out"


def changed(feature: Feature, **data: Any) -> Feature:
    """``feature`` with other arrays, without those that are None."""
    arrays = {**feature.data, **data}
    return msgspec.structs.replace(feature, data={name: array for name, array in arrays.items() if array is not None})


def test_every_model_that_takes_more_than_tokens_says_so() -> None:
    assert set(DECLARED) == set(FIRST)


@pytest.mark.slow
@pytest.mark.parametrize("case", FIRST.values(), ids=FIRST)
def test_arrays_are_as_declared(case: ParityCase, tmp_path: Path) -> None:
    tiny = make_tiny_model(case.architecture, tmp_path, **case.config)
    model: Any = build_model(
        installed_factory("model", case.architecture),
        StateDictLoader(tiny.tensors()),
        worker_config(tiny.info, block_size=case.block_size),
        ReferenceBackend(),
    )[0]
    example: Feature = model.example_input(16)
    forms = DECLARED[case.architecture][example.modality]
    needed = {name for name, form in forms.items() if not form.endswith(OPTIONAL)}
    assert needed <= set(example.data) <= set(forms)
    assert model.refuse_input(example) is None
    for name in needed:
        dtype, _, shape = forms[name].partition("]")[0].partition(" ")
        array = example.data[name]
        assert (str(array.dtype), array.ndim) == (dtype, shape.count(",") + 1)
        assert name in model.refuse_input(changed(example, **{name: None}))
        assert model.refuse_input(changed(example, **{name: array[None, None]})) is not None
    assert model.refuse_input(changed(example, undeclared=array)) is not None

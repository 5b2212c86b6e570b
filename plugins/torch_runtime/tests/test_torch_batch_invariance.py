"""``--batch-invariant``: a model with a layer that couples rows is refused, with the layer and what to choose."""

from __future__ import annotations

import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime.batch_invariance import require_batch_invariance
from hardpoint_torch_runtime.layers import (
    LayerNorm,
    LinearFactory,
    ReplicatedLinear,
    TensorParallel,
    UnquantizedLinearMethod,
)

CPU = torch.device("cpu")


class SteadyMethod(UnquantizedLinearMethod):
    """One order of additions, it says."""

    is_batch_invariant = True


def linear(name: str = "up", *, steady: bool) -> ReplicatedLinear:
    kind = SteadyMethod if steady else UnquantizedLinearMethod

    def choose(layer: str, shape: LinearShape) -> LinearMethod:
        return kind(torch.float32, CPU)

    factory = LinearFactory(choose, TensorParallel(), torch.float32, CPU)
    return ReplicatedLinear(name, factory, 4, 3)


def model(*layers: torch.nn.Module) -> torch.nn.Module:
    return torch.nn.Sequential(*layers)


def test_what_computes_row_by_row_is_taken() -> None:
    norm = LayerNorm(4, 1e-5, torch.float32, CPU)
    require_batch_invariance(model(norm, linear(steady=True)), 2)  # type: ignore[arg-type]


def test_a_plain_product_is_named() -> None:
    with pytest.raises(ConfigError, match=r"up, down are computed by UnquantizedLinearMethod.*--compiler none"):
        require_batch_invariance(model(linear(steady=False), linear("down", steady=False)), 1)  # type: ignore[arg-type]


def test_a_plain_product_with_an_override_that_keeps_the_promise_is_taken() -> None:
    require_batch_invariance(model(linear(steady=False)), 1, has_linear_kernel=True)  # type: ignore[arg-type]


def test_a_layer_that_nobody_vouches_for_is_named() -> None:
    with pytest.raises(ConfigError, match="1 is a Conv1d, which has no kernel that keeps rows apart"):
        require_batch_invariance(model(linear(steady=True), torch.nn.Conv1d(1, 1, 1)), 1)  # type: ignore[arg-type]


def test_more_ranks_than_two_add_in_no_fixed_order() -> None:
    with pytest.raises(ConfigError, match="by 4 ranks.*--tensor-parallel-size to 2"):
        require_batch_invariance(model(linear(steady=True)), 4)  # type: ignore[arg-type]

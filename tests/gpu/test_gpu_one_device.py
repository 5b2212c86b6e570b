"""Models compute on the device that they are made for: nothing of theirs stays on the host, and nothing is mixed.

The device is the framework's meta device, whose tensors have no contents.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint_testing_torch import ParityCase, installed_backend, installed_factory, make_tiny_model, worker_config
from hardpoint_torch_runtime import LayerToolkit
from hardpoint_torch_runtime.runner.runner import profile_forward
from model_cases import CASES

META = torch.device("meta")
NUM_TOKENS = 8


MOVERS = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)
INDEXING = (torch.ops.aten.index.Tensor, torch.ops.aten.index_put_.default)
"""Devices take the host's indices."""


class WithoutContents(TorchDispatchMode):
    """Refuses operators between devices, as a real device does, and answers what the host asks of tensors that hold
    nothing: conditions are true, and the first expert gets all."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        places = {leaf.device.type for leaf in tree_leaves((args, kwargs)) if torch.is_tensor(leaf) and leaf.dim()}
        if len(places) > 1 and func not in (*MOVERS, *INDEXING):
            raise RuntimeError(f"{func} mixes tensors of several devices: {', '.join(sorted(places))}")
        is_meta = bool(args) and isinstance(args[0], torch.Tensor) and args[0].device.type == "meta"
        if is_meta and func is torch.ops.aten._local_scalar_dense.default:
            return True if args[0].dtype is torch.bool else 1
        if is_meta and func is torch.ops.aten.bincount.default:
            minimum = (kwargs or {}).get("minlength", args[2] if len(args) > 2 else 1)
            return torch.tensor([args[0].numel(), *[0] * (minimum - 1)])
        return func(*args, **(kwargs or {}))


def model_on_meta(case: ParityCase, folder: Path) -> Model:
    tiny = make_tiny_model(case.architecture, folder / "model", **case.config)
    config = worker_config(tiny.info)
    toolkit = LayerToolkit.create(
        config,
        device=META,
        dtype=torch.float32,
        attention_backend=installed_backend("torch_reference"),
        quantization=None,
    )
    context = ModelContext(
        name=case.architecture,
        api_version=1,
        roles=frozenset({ProcessRole.WORKER}),
        rank=0,
        config=config,
        layers=toolkit,
    )
    made: Model = installed_factory("model", case.architecture)(context, NoOptions())
    return made


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.name}")
def test_a_forward_stays_on_its_device(case: ParityCase, tmp_path: Path) -> None:
    with WithoutContents():
        model = model_on_meta(case, tmp_path)
        profile_forward(model, NUM_TOKENS, 64, META, num_rows=3)


@pytest.mark.slow
def test_a_mix_would_be_noticed() -> None:
    with pytest.raises(RuntimeError, match="mixes tensors of several devices: cpu, meta"), WithoutContents():
        torch.mm(torch.zeros(3, 3, device=META), torch.ones(3, 3))
    with WithoutContents():
        assert torch.ones(3).to(META)[torch.tensor([0])].device == META

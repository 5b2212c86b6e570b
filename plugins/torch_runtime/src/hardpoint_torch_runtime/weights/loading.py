"""Streams stored tensors into a model's parameters: one at a time, one copy each."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from tqdm import tqdm

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import Model
from hardpoint.interfaces.model_source import ModelInfo, WeightLoader, WeightTensor
from hardpoint_torch_runtime.layers.embedding import VocabEmbedding
from hardpoint_torch_runtime.layers.linear import ParallelLinear
from hardpoint_torch_runtime.layers.linear_method import PackedLinearMethod, StreamingLinearMethod
from hardpoint_torch_runtime.layers.placement import Placement, ShardedModule
from hardpoint_torch_runtime.weights.invented import WeightInventor
from hardpoint_torch_runtime.weights.report import PartialModel, Problems, WeightReport
from hardpoint_torch_runtime.weights.rules import RuleBook, WeightPlan
from hardpoint_torch_runtime.weights.stacks import is_stack, unstack

__all__ = ["Unpack", "UnpackingPlatform", "as_torch", "load_weights", "shared_tensor"]

Unpack = Callable[[WeightTensor], torch.Tensor | None]
"""The values of a tensor in a packed format, of its shape: the bits that its own ``dequantize`` gives. None where there
is no quicker way."""


@runtime_checkable
class UnpackingPlatform(Protocol):
    """A platform with kernels that unpack stored tensors."""

    def unpack(self, tensor: WeightTensor) -> torch.Tensor | None:
        """See ``Unpack``."""


@dataclass(frozen=True, slots=True)
class _Slot:
    """A parameter with the module that owns it and its name there."""

    module: torch.nn.Module
    name: str
    parameter: torch.Tensor

    def place(self, shard: str | None) -> Placement:
        if isinstance(self.module, ShardedModule):
            return self.module.place(self.name, shard)
        if shard is not None:
            raise KeyError(f"{type(self.module).__name__} takes no part {shard!r}")
        return Placement.whole(tuple(self.parameter.shape))


@dataclass(slots=True)
class _Progress:
    num_tensors: int = 0
    num_bytes: int = 0
    ignored: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    ill_shaped: list[str] = field(default_factory=list)
    ill_typed: list[str] = field(default_factory=list)


def load_weights(
    model: Model,
    loader: WeightLoader,
    info: ModelInfo,
    *,
    show_progress: bool,
    rank: int = 0,
    unpack: Unpack | None = None,
) -> WeightReport:
    """Fill every parameter of ``model`` (a torch module) from ``loader`` by ``model.weight_rules()``.

    Values are converted to the parameters' dtype. Afterwards each linear's method repacks what it wants to. Raises
    one ``ModelFormatError`` naming the artifact and all missing, unexpected, ill-shaped and ill-typed tensors. A loader
    that is a :class:`WeightInventor` is asked for just what the rules expect. ``unpack`` is asked for the values of
    packed tensors before these unpack themselves.
    """
    started = time.perf_counter()
    slots = _slots(model)
    plan = WeightPlan(RuleBook(model.weight_rules()), slots)
    progress = _Progress()
    with torch.no_grad(), _bar(loader, info, show_progress and rank == 0) as bar:
        for tensor in _tensors(loader, info, plan, slots):
            for part in _parts(tensor, plan, progress):
                _take(part, model, slots, plan, progress, unpack)
                # Or it would live on while the loader unpacks the next one.
                del part
            bar.update(tensor.data.nbytes)
            del tensor
    problems = Problems(
        plan.missing(), progress.unexpected, progress.ill_shaped, plan.without_rule, ill_typed=progress.ill_typed
    )
    problems.raise_if_any(info.artifact)
    for module in _module(model).modules():
        if isinstance(module, ParallelLinear | VocabEmbedding):
            module.finish_loading()
    seconds = time.perf_counter() - started
    return WeightReport(progress.num_tensors, progress.num_bytes, seconds, tuple(progress.ignored))


def _module(model: Model) -> torch.nn.Module:
    if not isinstance(model, torch.nn.Module):
        raise TypeError(f"{type(model).__name__} is no torch.nn.Module; a model on the torch worker must be one")
    return model


def _slots(model: Model) -> dict[str, _Slot]:
    slots = {}
    for prefix, module in _module(model).named_modules():
        for name, parameter in module.named_parameters(recurse=False):
            slots[f"{prefix}.{name}" if prefix else name] = _Slot(module, name, parameter)
    return slots


def _tensors(
    loader: WeightLoader, info: ModelInfo, plan: WeightPlan, slots: Mapping[str, _Slot]
) -> Iterator[WeightTensor]:
    if not isinstance(loader, WeightInventor):
        return loader.tensors(info)
    # Before the first one arrives, which changes what is still wanted.
    wanted = [
        (expected.stored_name, slots[parameter].place(expected.shard).stored_shape)
        for parameter, expected in plan.wanted()
    ]
    return loader.invent(wanted)


@contextmanager
def _bar(loader: WeightLoader, info: ModelInfo, shown: bool) -> Iterator[tqdm]:
    total = loader.num_bytes(info) if shown else None
    label = f"Loading weights of {info.artifact.name}"
    # None: shown on a terminal only. A log file would keep every redrawn frame.
    disable = None if shown and sys.stderr is not None else True
    with tqdm(total=total, desc=label, unit="B", unit_scale=True, disable=disable, dynamic_ncols=True) as bar:
        yield bar


def _parts(tensor: WeightTensor, plan: WeightPlan, progress: _Progress) -> Iterable[WeightTensor]:
    """The tensor, or what it is a stack of."""
    layout = plan.book.stack(tensor.name)
    if layout is None:
        return (tensor,)
    if not is_stack(tensor, layout):
        expected = " and ".join(layout.names)
        progress.ill_shaped.append(f"{tensor.name} {list(tensor.shape)} (expected a stack of {expected})")
        return ()
    return unstack(tensor, layout)


def _take(
    tensor: WeightTensor,
    model: Model,
    slots: dict[str, _Slot],
    plan: WeightPlan,
    progress: _Progress,
    unpack: Unpack | None,
) -> None:
    destination = plan.book.destination(tensor.name)
    if destination is None:
        progress.unexpected.append(tensor.name)
        return
    if destination.parameter is None or _is_elsewhere(model, destination.parameter):
        progress.ignored.append(tensor.name)
        return
    slot = slots.get(destination.parameter)
    if slot is None:
        known = progress.ignored if destination.is_optional else progress.unexpected
        known.append(tensor.name)
        return
    if not plan.arrived(tensor.name):
        progress.unexpected.append(f"{tensor.name} (loaded already, by this or another name)")
        return
    try:
        placement = slot.place(destination.shard)
    except KeyError as error:
        raise ModelFormatError(f"weight rule for {tensor.name!r}: {error.args[0]}") from None
    if tuple(tensor.shape) != placement.stored_shape:
        progress.ill_shaped.append(f"{tensor.name} {list(tensor.shape)} (expected {list(placement.stored_shape)})")
        return
    if not _copy(tensor, slot, placement, unpack):
        progress.ill_typed.append(f"{tensor.name} ({tensor.dtype})")
        return
    progress.num_tensors += 1
    progress.num_bytes += tensor.data.nbytes


def _is_elsewhere(model: Model, parameter: str) -> bool:
    return isinstance(model, PartialModel) and not model.holds(parameter)


def _copy(tensor: WeightTensor, slot: _Slot, placement: Placement, unpack: Unpack | None) -> bool:
    """False, and nothing is copied, where the stored values are no floats but the parameter's are."""
    method = _method(slot)
    if tensor.dequantize is not None and isinstance(method, PackedLinearMethod):
        method.load_packed(slot.module, slot.name, placement, tensor)
        return True
    unpacked = None if unpack is None or tensor.dequantize is None else unpack(tensor)
    values = as_torch(tensor) if unpacked is None else unpacked
    if isinstance(method, StreamingLinearMethod):
        if values.is_floating_point():
            method.load_dense(slot.module, placement, placement.source(values))
        return values.is_floating_point()
    if slot.parameter.is_floating_point() and not values.is_floating_point():
        return False
    placement.target(slot.parameter).copy_(placement.source(values))
    return True


def _method(slot: _Slot) -> object:
    """Who takes the stored tensor of a parameter, where that is not simply copied. Biases are the layers' own."""
    owns = slot.name != "bias" and isinstance(slot.module, ParallelLinear | VocabEmbedding)
    return slot.module.method if owns else None


def as_torch(tensor: WeightTensor) -> torch.Tensor:
    """The stored values as a torch tensor of ``tensor.shape``, sharing memory unless they must be dequantized.

    The result of a read-only mapping must not be written to.
    """
    if tensor.dequantize is not None:
        return shared_tensor(tensor.dequantize()).reshape(tensor.shape)
    values = shared_tensor(tensor.data)
    target: Any = getattr(torch, tensor.dtype, None)
    if not isinstance(target, torch.dtype):
        raise ModelFormatError(
            f"tensor {tensor.name!r} is stored as {tensor.dtype!r}, which is no dense format; its loader must supply a "
            "way to dequantize it, or a quantization method must take it packed"
        )
    return (values if values.dtype == target else values.view(target)).reshape(tensor.shape)


def shared_tensor(array: np.ndarray) -> torch.Tensor:
    """``array`` as a tensor over the same memory, which must not be written to where the array is read-only."""
    if array.flags.writeable:
        return torch.from_numpy(array)
    with warnings.catch_warnings():
        # Weights are only ever read from here; torch cannot express that and warns about mapped files.
        warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
        return torch.from_numpy(array)

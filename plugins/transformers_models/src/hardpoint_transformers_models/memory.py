"""Gives the rest of a model memory on the worker's device: parameters to be loaded, and buffers that are computed."""

from __future__ import annotations

import re
from typing import Any

import torch

from hardpoint_transformers_models.refusal import refusal

__all__ = ["materialize"]

MAX_COMPUTED = 1 << 28
"""Values of one table, such as one of positions: a gigabyte."""


def materialize(model: Any, dtype: torch.dtype, device: torch.device, own: frozenset[torch.nn.Module]) -> None:
    """Move ``model`` off the device without memory, but for modules that are the worker's ``own``.

    Buffers that checkpoints hold become parameters, so that they are loaded like these. Others are computed by the
    library's own initialization. Raises ``UnsupportedModelError`` for buffers that it leaves as they are.
    """
    if device.type == "meta":
        return
    for name, module in model.named_modules():
        if module in own:
            continue
        _parameters(model, name, module, dtype, device)
        _buffers(model, name, module, device)


def _parameters(model: Any, prefix: str, module: torch.nn.Module, dtype: torch.dtype, device: torch.device) -> None:
    for name, parameter in list(module.named_parameters(recurse=False)):
        path = f"{prefix}.{name}" if prefix else name
        kept = torch.float32 if name == "sinks" or _stays_wide(model, path, dtype) else dtype
        wanted = kept if parameter.is_floating_point() else parameter.dtype
        _set_parameter(module, name, torch.empty(parameter.shape, dtype=wanted, device=device))
    for name, buffer in list(module.named_buffers(recurse=False)):
        if name in module._non_persistent_buffers_set:
            continue
        if not buffer.is_floating_point():
            path = f"{prefix}.{name}" if prefix else name
            raise refusal(type(model).__name__, f"{path} is a stored table of {buffer.dtype}")
        delattr(module, name)
        _set_parameter(module, name, torch.empty(buffer.shape, dtype=buffer.dtype, device=device))


def _set_parameter(module: torch.nn.Module, name: str, values: torch.Tensor) -> None:
    module.register_parameter(name, torch.nn.Parameter(values, requires_grad=False))


def _buffers(model: Any, prefix: str, module: torch.nn.Module, device: torch.device) -> None:
    waiting = [name for name, _ in module.named_buffers(recurse=False)]
    for name in waiting:
        buffer = module.get_buffer(name)
        module._buffers[name] = _unset(model, name, buffer, device)
    if not waiting:
        return
    # Under the device: tables that the initialization makes must not be on the host while buffers are elsewhere.
    with torch.no_grad(), device:
        model._init_weights(module)
    for name in waiting:
        if bool(_is_unset(module.get_buffer(name)).any()):
            raise refusal(type(model).__name__, f"nothing in the library computes the table {prefix}.{name} anew")


def _unset(model: Any, name: str, buffer: torch.Tensor, device: torch.device) -> torch.Tensor:
    if buffer.numel() > MAX_COMPUTED:
        raise refusal(type(model).__name__, f"{name} is a table of {buffer.numel()} values to compute")
    if buffer.dtype is torch.bool:
        raise refusal(type(model).__name__, f"{name} is a table of switches, of which none shows that it was computed")
    return torch.full(buffer.shape, _mark(buffer.dtype), dtype=buffer.dtype, device=device)


def _is_unset(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.isnan() if buffer.is_floating_point() else buffer == _mark(buffer.dtype)


def _mark(dtype: torch.dtype) -> float | int:
    return float("nan") if dtype.is_floating_point else torch.iinfo(dtype).min


def _stays_wide(model: Any, path: str, dtype: torch.dtype) -> bool:
    """Whether the library computes with this parameter in float32 whatever the model's dtype is."""
    always = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    in_half = getattr(model, "_keep_in_fp32_modules", None) or () if dtype is torch.float16 else ()
    return any(re.search(rf"(^|\.){re.escape(part)}(\.|$)", path) for part in (*always, *in_half))

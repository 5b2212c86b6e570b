"""Holds an operator against its fake and its declarations, for tests (R10.32, R10.33, R10.40)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["check_operator"]


def check_operator(
    operator: Callable[..., Any], samples: Iterable[tuple[Any, ...]], mutates: Iterable[str] = ()
) -> list[str]:
    """What is wrong with a registered ``operator`` on any of ``samples``; empty if nothing is.

    Compares real outputs with the fake's in number, shape, dtype, device and stride; looks for outputs that share
    memory with arguments or each other, for arguments that change without being in ``mutates``, and runs the
    framework's own check. Arguments are copied first.
    """
    faults: list[str] = []
    count = 0
    for count, sample in enumerate(samples, start=1):
        text = f"sample {count} {_described(sample)}"
        faults += [f"{text}: {fault}" for fault in _check_sample(operator, sample, frozenset(mutates))]
    return faults if count else ["it has no samples to be checked with"]


def _check_sample(operator: Callable[..., Any], sample: tuple[Any, ...], mutates: frozenset[str]) -> Iterator[str]:
    arguments = _copies(sample)
    try:
        outputs = operator(*arguments)
    except Exception as error:
        yield f"the real operator raises {type(error).__name__}: {error}"
        return
    yield from _check_memory(operator, sample, arguments, outputs, mutates)
    try:
        with FakeTensorMode() as mode:
            faked = operator(*tree_map(lambda leaf: _to_fake(mode, leaf), sample))
    except Exception as error:
        yield f"the fake raises {type(error).__name__}: {error}"
        return
    yield from _compare(tree_leaves(outputs), tree_leaves(faked))
    for test, verdict in torch.library.opcheck(operator, _copies(sample), raise_exception=False).items():  # type: ignore[arg-type]
        if verdict != "SUCCESS":
            yield f"{test}: {verdict}"


def _check_memory(
    operator: Callable[..., Any], before: tuple[Any, ...], after: tuple[Any, ...], outputs: Any, mutates: frozenset[str]
) -> Iterator[str]:
    names = [argument.name for argument in operator._schema.arguments]  # type: ignore[attr-defined]
    for name, old, new in zip(names, before, after, strict=False):
        pairs = zip(tree_leaves(old), tree_leaves(new), strict=True)
        changed = any(isinstance(a, torch.Tensor) and not _same(a, b) for a, b in pairs)
        if changed and name not in mutates:
            yield f"it writes to {name!r}, which is not declared as mutated"
    taken = {_storage(leaf) for leaf in tree_leaves(after) if isinstance(leaf, torch.Tensor) and leaf.numel()}
    for index, leaf in enumerate(tree_leaves(outputs)):
        if isinstance(leaf, torch.Tensor) and leaf.numel():
            if _storage(leaf) in taken:
                yield f"output {index} shares memory with an argument or another output"
            taken.add(_storage(leaf))


def _compare(real: list[Any], fake: list[Any]) -> Iterator[str]:
    if len(real) != len(fake):
        yield f"the fake returns {len(fake)} values, the real operator {len(real)}"
        return
    for index, (mine, faked) in enumerate(zip(real, fake, strict=True)):
        if not isinstance(mine, torch.Tensor) or not isinstance(faked, torch.Tensor):
            if type(mine) is not type(faked):
                yield f"output {index} is a {type(mine).__name__}, but the fake's a {type(faked).__name__}"
            continue
        for what, is_value, fake_value in (
            ("shape", tuple(mine.shape), tuple(faked.shape)),
            ("dtype", mine.dtype, faked.dtype),
            ("device", mine.device.type, faked.device.type),
            ("stride", mine.stride(), faked.stride()),
        ):
            if is_value != fake_value:
                yield f"output {index} has {what} {is_value}, but the fake's has {fake_value}"


def _to_fake(mode: FakeTensorMode, leaf: Any) -> Any:
    return mode.from_tensor(leaf) if isinstance(leaf, torch.Tensor) else leaf


def _copies(sample: tuple[Any, ...]) -> tuple[Any, ...]:
    """Copies that keep strides; plain ``clone`` makes some tensors contiguous."""
    copied: tuple[Any, ...] = tree_map(
        lambda leaf: (
            torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=leaf.device).copy_(leaf)
            if isinstance(leaf, torch.Tensor)
            else leaf
        ),
        sample,
    )
    return copied


def _same(first: torch.Tensor, second: torch.Tensor) -> bool:
    return torch.equal(first.isnan(), second.isnan()) and torch.equal(first.nan_to_num(), second.nan_to_num())


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def _described(sample: tuple[Any, ...]) -> str:
    parts = [
        f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" if isinstance(leaf, torch.Tensor) else repr(leaf)
        for leaf in sample
    ]
    return f"({', '.join(parts)})"

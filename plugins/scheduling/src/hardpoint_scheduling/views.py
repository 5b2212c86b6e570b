"""Read-only windows onto growing sequences."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar, overload

T = TypeVar("T")


class ReadOnlyView(Sequence[T], Generic[T]):
    """``base`` from position ``start`` on. Growth of ``base`` shows; there is no way to write through the view."""

    __slots__ = ("_base", "_start")

    def __init__(self, base: Sequence[T], start: int = 0) -> None:
        self._base = base
        self._start = start

    def __len__(self) -> int:
        return len(self._base) - self._start

    @overload
    def __getitem__(self, index: int) -> T: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[T]: ...
    def __getitem__(self, index: int | slice) -> T | Sequence[T]:
        length = len(self)
        if isinstance(index, slice):
            return [self._base[self._start + i] for i in range(*index.indices(length))]
        if not -length <= index < length:
            raise IndexError(f"index {index} is outside a view of {length} items")
        return self._base[self._start + index % length]

    def __iter__(self) -> Iterator[T]:
        return islice(iter(self._base), self._start, None)

    def __repr__(self) -> str:
        return f"ReadOnlyView({list(self)!r})"

"""Variables that mask devices: what they hide, and which devices they name."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["first_set", "hides_everything", "physical_numbers"]

_NOTHING = frozenset({"-1", "none", "void", "no"})


def hides_everything(value: str | None) -> bool:
    """Whether a mask is set and lets nothing through: empty, or beginning with what runtimes take as the end."""
    if value is None:
        return False
    first = value.split(",")[0].strip().lower()
    return not first or first in _NOTHING


def physical_numbers(value: str, below: str, resolve: Callable[[str], int]) -> str:
    """The mask ``value`` in physical numbers where another mask, ``below``, is applied first: numbers in ``value`` then
    count what the lower one lets through.

    Items that are no numbers are left as they are. Raises ``ValueError`` for a number that the lower mask hides.
    """
    lower = [item.strip() for item in below.split(",") if item.strip()]
    if not value.strip():
        return ",".join(lower)
    items = []
    for item in (part.strip() for part in value.split(",")):
        if not item.isdecimal():
            items.append(str(resolve(item)))
        elif int(item) < len(lower):
            named = lower[int(item)]
            items.append(named if named.isdecimal() else str(resolve(named)))
        else:
            raise ValueError(f"item {item!r} counts beyond the {len(lower)} devices that {below!r} lets through")
    return ",".join(items)


def first_set(environment: Mapping[str, str], names: tuple[str, ...]) -> str | None:
    """The value of the first variable of ``names`` that is set to something; None where none is."""
    return next((environment[name] for name in names if environment.get(name, "").strip()), None)

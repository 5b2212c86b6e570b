"""Wording that several parts of the plugin system share."""

from __future__ import annotations

from collections.abc import Iterable

from hardpoint.errors import PluginNotFoundError
from hardpoint.plugins.kinds import kind_spec
from hardpoint.plugins.suggest import did_you_mean

__all__ = ["install_hint", "missing_plugin", "no_candidate"]


def install_hint(kind: str, name: str) -> str:
    """What to install so that ``kind`` has a plugin ``name``. The core knows no distribution by name."""
    return (
        f"install a distribution that provides the entry point {kind_spec(kind).group}:{name} "
        "(a newly added entry point is seen only after its distribution is installed again, editable ones too)"
    )


def missing_plugin(kind: str, name: str, installed: Iterable[str], why: str = "") -> PluginNotFoundError:
    """The error for a name nobody provides; ``why`` tells of a plugin that is installed but refused."""
    if why:
        return PluginNotFoundError(f"{kind} plugin {name!r} is installed but refused: {why}")
    names = sorted(installed)
    return PluginNotFoundError(
        f"no {kind} plugin {name!r}{did_you_mean(name, names)}; "
        f"installed: {', '.join(names) or 'none'}; {install_hint(kind, name)}"
    )


def no_candidate(kind: str) -> str:
    """What to say when a kind that is needed has no plugin at all."""
    return f"no {kind} plugin is installed; {install_hint(kind, '<name>')}"

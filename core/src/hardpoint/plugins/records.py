"""What discovery finds, as frozen records. All of them can be written as JSON."""

from __future__ import annotations

import msgspec


class DiscoveredPlugin(msgspec.Struct, frozen=True):
    """One entry point of a known kind and API version, from metadata alone.

    ``entry_point`` is ``module:attribute``; ``path`` the metadata folder; ``requires`` the distribution's own
    requirements on the core.
    """

    kind: str
    name: str
    api_version: int
    distribution: str
    version: str
    entry_point: str
    path: str
    requires: tuple[str, ...] = ()


class RefusedPlugin(msgspec.Struct, frozen=True):
    """A plugin that is installed but is not used, and why. Its code was not imported."""

    kind: str
    name: str
    distribution: str
    reason: str


class ShadowedDistribution(msgspec.Struct, frozen=True):
    """Two metadata folders of one distribution. ``same_folder`` means a damaged installation."""

    distribution: str
    used_path: str
    shadowed_path: str
    same_folder: bool

    @property
    def fault(self) -> str:
        """One line on what is wrong, and what to do about a damaged installation."""
        text = f"{self.distribution} is installed twice: {self.used_path} is used, {self.shadowed_path} is not"
        return f"{text}; remove the folder of the older one, or install it anew" if self.same_folder else text


class Discovery(msgspec.Struct, frozen=True):
    """Result of one scan, plugins in the order of the search path."""

    plugins: tuple[DiscoveredPlugin, ...] = ()
    refused: tuple[RefusedPlugin, ...] = ()
    shadowed: tuple[ShadowedDistribution, ...] = ()
    num_distributions: int = 0

    def of(self, kind: str) -> tuple[DiscoveredPlugin, ...]:
        return tuple(plugin for plugin in self.plugins if plugin.kind == kind)

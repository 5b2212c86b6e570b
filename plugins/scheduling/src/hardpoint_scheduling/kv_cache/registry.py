"""Which manager serves which spec class, and which specs may share a group."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    KVBlockPool,
    KVCacheManager,
    KVCacheSpec,
    KVSpecRegistration,
    MixedSizeSpec,
    PluginAccess,
)
from hardpoint_scheduling.kv_cache import (
    chunked_local,
    cross_attention,
    encoder_only,
    full_attention,
    mamba,
    mla,
    sliding_window,
)

ManagerFactory = Callable[..., KVCacheManager]


def builtin_registrations() -> tuple[KVSpecRegistration, ...]:
    """What this distribution itself registers."""
    kinds = (full_attention, mla, sliding_window, chunked_local, cross_attention, encoder_only, mamba)
    return tuple(kind.REGISTRATION for kind in kinds)


class SpecRegistry:
    """Spec class to registration, looked up along the class's method resolution order (R1.60-R1.65).

    A subclass of a registered spec works unregistered; register only what differs. ``builtins`` is asked once, on the
    first query or registration.
    """

    def __init__(self, builtins: Callable[[], Iterable[KVSpecRegistration]] = builtin_registrations) -> None:
        self._builtins: Callable[[], Iterable[KVSpecRegistration]] | None = builtins
        self._by_class: dict[type[KVCacheSpec], KVSpecRegistration] = {}
        self._by_role: dict[str, ManagerFactory] = {}

    def register(self, registration: KVSpecRegistration) -> None:
        """Raises ``ConfigError`` for a grouping base that is no ancestor, or data that contradict an earlier entry.

        Registering equal data again changes nothing.
        """
        self._load_builtins()
        self._add(registration)

    def register_role(self, role: str, manager: ManagerFactory) -> None:
        """Serve every group of ``role`` by ``manager``, whatever its spec (R1.62)."""
        self._load_builtins()
        self._add_role(role, manager)

    def _add_role(self, role: str, manager: ManagerFactory) -> None:
        known = self._by_role.setdefault(role, manager)
        if known is not manager:
            raise ConfigError(f"group role {role!r} already has the manager {_name(known)}; {_name(manager)} conflicts")

    def registration_for(self, spec_class: type[KVCacheSpec]) -> KVSpecRegistration | None:
        """The registration of the nearest registered ancestor, or None."""
        self._load_builtins()
        for ancestor in spec_class.__mro__:
            found = self._by_class.get(ancestor)
            if found is not None:
                return found
        return None

    def manager_for(self, spec_class: type[KVCacheSpec], role: str | None = None) -> ManagerFactory:
        """Raises ``ConfigError`` when neither the role nor an ancestor of the class is registered."""
        self._load_builtins()
        if role is not None and role in self._by_role:
            return self._by_role[role]
        if issubclass(spec_class, MixedSizeSpec):
            return self._manager_of_mixed
        found = self.registration_for(spec_class)
        if found is None:
            raise ConfigError(self._missing("", spec_class))
        return found.manager

    def grouping_base(self, spec_class: type[KVCacheSpec]) -> type[KVCacheSpec]:
        """The class whose specs may form one group with ``spec_class``. Raises ``ConfigError`` if unregistered."""
        found = self.registration_for(spec_class)
        if found is None:
            raise ConfigError(self._missing("", spec_class))
        return found.grouping_base or found.spec_class

    def check(self, specs: Mapping[str, KVCacheSpec]) -> None:
        """Start-up check (R1.64): every layer's spec has a manager and a grouping base, or ``ConfigError``."""
        for layer, spec in specs.items():
            for part in spec.layers if isinstance(spec, MixedSizeSpec) else (spec,):
                if self.registration_for(type(part)) is None:
                    raise ConfigError(self._missing(f"layer {layer!r}: ", type(part)))

    def classes(self) -> dict[str, type[KVCacheSpec]]:
        """Registered spec classes by their ``kind``, for rebuilding specs from the wire."""
        self._load_builtins()
        return {spec_class.kind: spec_class for spec_class in self._by_class}

    def _manager_of_mixed(self, pool: KVBlockPool, group_id: int, spec: MixedSizeSpec) -> KVCacheManager:
        """Layers of one group need the same slots, so the manager of the first serves all."""
        return self.manager_for(type(spec.layers[0]))(pool, group_id, spec.layers[0])

    def _load_builtins(self) -> None:
        if self._builtins is not None:
            builtins, self._builtins = self._builtins, None
            for registration in builtins():
                self._add(registration)

    def _add(self, registration: KVSpecRegistration) -> None:
        spec_class, base = registration.spec_class, registration.grouping_base
        if base is not None and base not in spec_class.__mro__:
            raise ConfigError(
                f"KV cache spec {spec_class.__name__}: its grouping base {base.__name__} is not one of its ancestors; "
                f"allowed: {', '.join(c.__name__ for c in spec_class.__mro__ if issubclass(c, KVCacheSpec))}"
            )
        for role in registration.roles:
            self._add_role(role, registration.manager)
        known = self._by_class.setdefault(spec_class, registration)
        if _facts(known) != _facts(registration):
            raise ConfigError(
                f"KV cache spec {spec_class.__name__} is registered twice with different data: "
                f"manager {_name(known.manager)} and manager {_name(registration.manager)}; remove one of the plugins"
            )

    def _missing(self, where: str, spec_class: type[KVCacheSpec]) -> str:
        names = ", ".join(sorted(c.__name__ for c in self._by_class)) or "none"
        return (
            f"{where}KV cache spec type {spec_class.__name__} has no manager; registered: {names}. "
            "Install or enable a kv_cache_spec plugin that provides it"
        )


def load_registry(plugins: PluginAccess | None, kinds: Iterable[str]) -> SpecRegistry:
    """The registrations of the ``kv_cache_spec`` plugins named ``kinds``.

    With plugin access nothing is built in: this distribution's own specs come through their entry points like anyone
    else's, so a pinned replacement wins. Without it (a scheduler used as a library) the built-ins serve. Raises the
    plugin errors of ``PluginAccess.create``.
    """
    if plugins is None:
        return SpecRegistry()
    registry = SpecRegistry(builtins=lambda: ())
    for kind in sorted(set(kinds)):
        registry.register(plugins.create("kv_cache_spec", kind, plugins.context("kv_cache_spec", kind)))
    return registry


def _facts(registration: KVSpecRegistration) -> tuple[object, ...]:
    return registration.manager, registration.grouping_base or registration.spec_class, registration.roles


def _name(value: object) -> str:
    return getattr(value, "__qualname__", repr(value))

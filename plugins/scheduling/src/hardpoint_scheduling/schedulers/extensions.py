"""One place that calls scheduler extensions; hooks nobody overrides cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hardpoint.errors import ConfigError
from hardpoint.interfaces import ExternalMatch, RequestView, RunnerOutput, SchedulerExtension, SchedulerOutput


@dataclass(frozen=True, slots=True)
class ExtensionHost:
    """Fans hooks out in the given order. Build it with :func:`host_extensions`.

    One tuple per hook holds only those who override it, so the step loop can ask ``if host.lookahead`` before it
    leaves the array path.
    """

    all: tuple[SchedulerExtension, ...]
    added: tuple[SchedulerExtension, ...]
    blocking: tuple[SchedulerExtension, ...]
    external: tuple[SchedulerExtension, ...]
    lookahead: tuple[SchedulerExtension, ...]
    allocation: tuple[SchedulerExtension, ...]
    metadata: tuple[SchedulerExtension, ...]
    output: tuple[SchedulerExtension, ...]
    holding: tuple[SchedulerExtension, ...]

    def on_added(self, request: RequestView) -> None:
        for extension in self.added:
            extension.on_added(request)

    def is_blocked(self, request: RequestView) -> bool:
        return any(extension.is_blocked(request) for extension in self.blocking)

    def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
        """The first match that brings tokens. None as soon as one extension cannot answer yet."""
        for extension in self.external:
            match = extension.match_external(request, num_local_tokens)
            if match is None:
                return None
            if match.asynchronous and match.num_tokens > 0:
                raise ConfigError(
                    f"extension {extension.name!r} loads KV asynchronously, which this scheduler does not support; "
                    "configure it for synchronous loads or choose another --scheduler"
                )
            if match.num_tokens > 0:
                return match
        return _NO_MATCH

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return max((extension.num_lookahead_tokens(request) for extension in self.lookahead), default=0)

    def after_allocation(self, request: RequestView, blocks: Sequence[Sequence[int]], num_external: int) -> None:
        for extension in self.allocation:
            extension.after_allocation(request, blocks, num_external)

    def attach_metadata(self, step: SchedulerOutput) -> None:
        """Fill the step's ``extensions``, keyed by extension name."""
        for extension in self.metadata:
            payload = extension.build_metadata(step)
            if payload is not None:
                step.extensions[extension.name] = payload

    def on_output(self, step: SchedulerOutput, output: RunnerOutput) -> None:
        for extension in self.output:
            extension.on_output(step, output.extensions.get(extension.name))

    def may_free(self, request: RequestView) -> bool:
        # Everybody is asked, so that each extension learns of the end.
        answers = [extension.may_free(request) for extension in self.holding]
        return all(answers)

    def take_freeable(self) -> Iterable[str]:
        for extension in self.holding:
            yield from extension.take_freeable()


_NO_MATCH = ExternalMatch(0)


def host_extensions(extensions: Sequence[SchedulerExtension]) -> ExtensionHost:
    """Raises ``ConfigError`` for a nameless extension or a name used twice: names key the structs in a step."""
    names = [extension.name for extension in extensions]
    for extension, name in zip(extensions, names, strict=True):
        if not name:
            raise ConfigError(f"scheduler extension {type(extension).__name__} has no name; set its 'name' attribute")
        if names.count(name) > 1:
            raise ConfigError(f"scheduler extension name {name!r} is used {names.count(name)} times; names are unique")

    def who(hook: str) -> tuple[SchedulerExtension, ...]:
        inherited = getattr(SchedulerExtension, hook)
        return tuple(extension for extension in extensions if getattr(type(extension), hook) is not inherited)

    return ExtensionHost(
        all=tuple(extensions),
        added=who("on_added"),
        blocking=who("is_blocked"),
        external=who("match_external"),
        lookahead=who("num_lookahead_tokens"),
        allocation=who("after_allocation"),
        metadata=who("build_metadata"),
        output=who("on_output"),
        holding=who("may_free"),
    )

"""One place that calls scheduler extensions; hooks nobody overrides cost nothing."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    ENCODER_INPUTS,
    ExternalMatch,
    LoadResult,
    RequestView,
    RunnerOutput,
    SchedulerExtension,
    SchedulerOutput,
    WaitReason,
)


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
    loading: tuple[SchedulerExtension, ...]
    lookahead: tuple[SchedulerExtension, ...]
    drafting: tuple[SchedulerExtension, ...]
    allocation: tuple[SchedulerExtension, ...]
    metadata: tuple[SchedulerExtension, ...]
    output: tuple[SchedulerExtension, ...]
    holding: tuple[SchedulerExtension, ...]

    def on_added(self, request: RequestView) -> None:
        for extension in self.added:
            extension.on_added(request)

    def blocker(self, request: RequestView) -> WaitReason | None:
        """Why the request cannot be admitted now, None when nobody holds it back."""
        for extension in self.blocking:
            if extension.is_blocked(request):
                return extension.wait_reason
        return None

    def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
        """The first match that brings tokens. None as soon as one extension cannot answer yet."""
        for extension in self.external:
            match = extension.match_external(request, num_local_tokens)
            if match is None:
                return None
            if match.asynchronous and match.num_tokens > 0 and extension not in self.loading:
                raise ConfigError(
                    f"extension {extension.name!r} loads KV asynchronously, but never reports the end of a load: it "
                    "has no 'take_loaded'"
                )
            if match.num_tokens > 0:
                return match
        return _NO_MATCH

    def take_loaded(self) -> Iterable[LoadResult]:
        for extension in self.loading:
            yield from extension.take_loaded()

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return max((extension.num_lookahead_tokens(request) for extension in self.lookahead), default=0)

    def num_expected_drafts(self, request: RequestView) -> int:
        """Guesses that the worker will have after the next sample of the request, without telling first."""
        return max((extension.num_lookahead_tokens(request) for extension in self.drafting), default=0)

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
    """Raises ``ConfigError`` for a missing, reserved or repeated name: names key the structs in a step."""
    names = [extension.name for extension in extensions]
    for extension, name in zip(extensions, names, strict=True):
        if not name:
            raise ConfigError(f"scheduler extension {type(extension).__name__} has no name; set its 'name' attribute")
        if name == ENCODER_INPUTS:
            raise ConfigError(f"scheduler extension {type(extension).__name__} is named {name!r}, which is reserved")
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
        loading=who("take_loaded"),
        lookahead=who("num_lookahead_tokens"),
        drafting=tuple(extension for extension in extensions if extension.drafts_on_worker),
        allocation=who("after_allocation"),
        metadata=who("build_metadata"),
        output=who("on_output"),
        holding=who("may_free"),
    )

"""Runs the compiler of a worker, at loading and between steps, and says what became of every range of layers."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from hardpoint.interfaces.compiler import Compiler, LoweredRange
from hardpoint.interfaces.model import Model
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.plugin import NoOptions, PluginAccess, plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_torch_runtime.lowering import CompilingPlatform, ResumingCompiler

__all__ = ["ModelLowering", "NoCompiler", "chosen_compiler", "create_none"]


def chosen_compiler(
    wanted: str | None, platform: Platform, plugins: PluginAccess, logger: logging.Logger
) -> str | None:
    """The operator's ``compiler`` plugin, else the platform's where it may be used, else None."""
    if wanted is not None:
        return wanted
    preferred = platform.default_compiler if isinstance(platform, CompilingPlatform) else ""
    if preferred and preferred not in plugins.names("compiler"):
        logger.warning(
            "the model runs as it is: compiler %r, which platform %r prefers, is not installed or not allowed",
            preferred,
            platform.name,
        )
        return None
    return preferred or None


class ModelLowering:
    """One compiler on one model."""

    def __init__(self, compiler: Compiler, logger: logging.Logger) -> None:
        self._compiler = compiler
        self._resuming: ResumingCompiler | None = compiler if isinstance(compiler, ResumingCompiler) else None
        self._logger = logger
        self.ranges: list[LoweredRange] = []

    def lower(self, model: Model) -> None:
        """Once weights are loaded, before the first forward."""
        self._report(self._compiler.lower(model))

    def between_steps(self) -> None:
        """Let a compiler that could not lower the model yet try again."""
        if self._resuming is not None:
            self._report(self._resuming.resume() or ())

    @property
    def is_waiting(self) -> bool:
        """Whether there is something left to do between steps."""
        return self._resuming is not None and self._resuming.is_waiting

    def _report(self, ranges: Sequence[LoweredRange]) -> None:
        self.ranges.extend(ranges)
        for one in ranges:
            if one.tokens is None:
                self._logger.info("not lowered by %s: %s: %s", self._compiler.name, _named(one), one.reason)
            else:
                self._logger.info(
                    "lowered by %s for steps of %d to %d tokens: %s",
                    self._compiler.name,
                    one.tokens.first,
                    one.tokens.last,
                    _named(one),
                )


def _named(one: LoweredRange) -> str:
    names = one.layer_names
    if len(names) < 3:
        return " and ".join(names) or "the whole model"
    return f"{len(names)} layers from {names[0]} to {names[-1]}"


class NoCompiler(Compiler):
    """What ``--compiler none`` names: the model runs as it is, also where the platform has a compiler of its own."""

    name = "none"

    def lower(self, model: Model) -> list[LoweredRange]:
        del model
        return [LoweredRange((), None, "--compiler none was given")]


@plugin("compiler")
def create_none(ctx: WorkerContext, options: NoOptions) -> Compiler:
    """Entry point ``hardpoint.compiler.v1`` ``none``."""
    del ctx, options
    return NoCompiler()

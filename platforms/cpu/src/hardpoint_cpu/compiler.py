"""The compiler ``cpu_native``: lets a loaded model compute with the CPU's kernels, now or once they are compiled."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from functools import partial

import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.compiler import Compiler, LoweredRange, TokenRange
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.worker import WorkerConfig, WorkerContext
from hardpoint_cpu.kernels import KernelProvider, KernelState
from hardpoint_cpu.linear_method import PackRefusedError, take_over, take_over_head, take_over_rows
from hardpoint_cpu.lowered_stack import StackRefusedError, lower_stack
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_cpu.platform import CpuPlatform
from hardpoint_torch_runtime.layers import LMHead, ParallelLinear, VocabEmbedding
from hardpoint_torch_runtime.lowering import DescribedStack, NotStandard

__all__ = ["NativeCompiler", "create"]


class NativeCompiler(Compiler):
    """Gives every linear layer whose weight has a kernel that kernel, and makes one call of standard decoder blocks.

    Results differ by rounding only.

    Raises ``ConfigError`` under a platform without such kernels.
    """

    name = "cpu_native"

    def __init__(self, kernels: KernelProvider, config: WorkerConfig, logger: logging.Logger) -> None:
        self._kernels = kernels
        self._config = config
        self._logger = logger
        self._waiting: torch.nn.Module | None = None

    @property
    def is_waiting(self) -> bool:
        """Whether a model waits for kernels that are being compiled."""
        return self._waiting is not None

    def lower(self, model: torch.nn.Module) -> list[LoweredRange]:
        if self._config.dtype != "float32":
            return [_refused((), f"kernels compute in float32, and --dtype is {self._config.dtype}")]
        # Changing over from plain torch later changes bits, which must not happen within a run that promised otherwise.
        library = self._kernels.wait() if self._config.batch_invariant else self._kernels.library()
        if library is not None:
            return list(self._lower(model, library))
        report = self._kernels.report()
        if report.state is KernelState.COMPILING:
            self._waiting = model
            return [_refused((), "kernels are being compiled; the model is lowered once they are")]
        return [_refused((), f"there are no kernels: {report.reason}")]

    def resume(self) -> list[LoweredRange] | None:
        """Lower the waiting model if the kernels are there by now."""
        if self._waiting is None:
            return None
        library = self._kernels.library()
        if library is None:
            if self._kernels.report().state is KernelState.COMPILING:
                return None
            self._waiting = None
            return [_refused((), f"there are no kernels: {self._kernels.report().reason}")]
        model, self._waiting = self._waiting, None
        return list(self._lower(model, library))

    def _lower(self, model: torch.nn.Module, library: NativeLibrary) -> Iterator[LoweredRange]:
        lowered: list[str] = []
        tokens = TokenRange(1, self._config.max_num_batched_tokens)
        reasons: dict[str, list[str]] = {}
        for name, take in self._layers(model, library):
            try:
                take()
                lowered.append(name)
            except PackRefusedError as error:
                reasons.setdefault(str(error), []).append(name)
        if lowered:
            yield LoweredRange(tuple(lowered), tokens)
        for reason, names in reasons.items():
            yield _refused(tuple(names), reason)
        for embedding in (module for module in model.modules() if isinstance(module, VocabEmbedding)):
            take_over_rows(embedding, library)
        for stack in (module for module in model.modules() if isinstance(module, DescribedStack)):
            yield from self._lower_stack(stack, library, tokens)

    def _lower_stack(self, stack: DescribedStack, library: NativeLibrary, tokens: TokenRange) -> Iterator[LoweredRange]:
        """The layers as one call, or as two per layer with the reason."""
        described = stack.describe()
        if isinstance(described, NotStandard):
            yield _refused((), described.reason)
            return
        names = tuple(block.name for block in described.blocks)
        try:
            lowered = lower_stack(library, described, self._logger)
        except StackRefusedError as error:
            yield _refused(names, str(error))
            return
        stack.lowered = lowered
        yield LoweredRange(names, tokens)
        if not lowered.attends:
            backends = {block.attention.backend.name for block in described.blocks}
            reason = f"attention is computed by {', '.join(sorted(backends))}, between two native calls per layer"
            yield _refused(tuple(block.attention.name for block in described.blocks), reason)

    def _layers(self, model: torch.nn.Module, library: NativeLibrary) -> Iterator[tuple[str, Callable[[], None]]]:
        """Every linear layer by name, and what lets it compute with a kernel."""
        invariant = self._config.batch_invariant
        for module in list(model.modules()):
            if isinstance(module, ParallelLinear):
                yield module.name, partial(take_over, module, library, invariant=invariant)
            elif isinstance(module, LMHead) and module.projection is None:
                yield module.name, partial(take_over_head, module, library, invariant=invariant)


def _refused(names: tuple[str, ...], reason: str) -> LoweredRange:
    return LoweredRange(names, None, reason)


@plugin("compiler")
def create(ctx: WorkerContext, options: NoOptions) -> Compiler:
    """Entry point ``hardpoint.compiler.v1`` ``cpu_native``."""
    del options
    if not isinstance(ctx.platform, CpuPlatform) or ctx.config is None:
        name = None if ctx.platform is None else ctx.platform.name
        raise ConfigError(f"compiler 'cpu_native' needs the kernels of platform 'cpu', not {name!r}; unset --compiler")
    return NativeCompiler(ctx.platform.kernels, ctx.config, ctx.logger)

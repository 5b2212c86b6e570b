"""Triton kernels checked without a GPU: compiled ahead of time for every target, their resource use held to a table.

A distribution lists its kernels in a function that returns :class:`KernelCase` records, one for each configuration that
may be launched, commits the table of what they use, and holds the two together with
:class:`hardpoint_testing_torch.triton_aot_suite.KernelResourceSuite`. The table is written by::

    python -m hardpoint_testing_torch.triton_aot tests/my_kernel_cases.py:cases --write kernel_resources.json

Importing this module does not import Triton.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import FunctionType, MappingProxyType, ModuleType
from typing import Any

__all__ = ["TARGETS", "ArgumentType", "KernelCase", "Resources", "Target", "load_cases", "main"]

ArgumentType = str | tuple[Any, ...]
"""A type by name, or those of a tuple's entries; see :class:`KernelCase`."""


@dataclass(frozen=True, slots=True)
class Target:
    """A device to compile for, as Triton calls it. ``shared_limit``: bytes that one block may use."""

    name: str
    backend: str
    arch: int | str
    warp_size: int
    shared_limit: int


TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            Target("sm_80", "cuda", 80, 32, 163 * 1024),
            Target("sm_90", "cuda", 90, 32, 227 * 1024),
            Target("sm_100", "cuda", 100, 32, 227 * 1024),
            Target("gfx942", "hip", "gfx942", 64, 64 * 1024),
        )
    }
)


@dataclass(frozen=True, slots=True)
class KernelCase:
    """One kernel in one configuration.

    Attributes:
        name: unique among a distribution's cases; it is the row of the table.
        function: made by ``triton.jit``, perhaps wrapped by ``triton.autotune`` or ``triton.heuristics``, whose own
            configurations are not looked at: give each a case, or use :meth:`tuned`.
        signature: type by argument name as Triton spells it, such as ``*fp16`` or ``i32``; constants left out. Of an
            argument that is a tuple, a tuple of these, where ``:16`` behind a type says that the entry is divisible by
            16, and None or a number is a constant.
        constexprs: value by argument name, also for arguments that Triton specializes (None, and 1 where it is fixed).
        divisible_by_16: arguments that always are: pointers by alignment, integers by value.
        options: further options of the compiler's backend, such as ``maxnreg``.
        targets: names from :data:`TARGETS`; empty for all.
        spill_budget: bytes a thread may keep in memory for want of registers, on every target.
    """

    name: str
    function: Any
    signature: Mapping[str, ArgumentType]
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    divisible_by_16: tuple[str, ...] = ()
    num_warps: int = 4
    num_stages: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    targets: tuple[str, ...] = ()
    spill_budget: int = 0

    def __post_init__(self) -> None:
        unknown = sorted(set(self.targets) - set(TARGETS))
        if unknown:
            raise ValueError(f"case {self.name!r}: no target {', '.join(unknown)}; there are: {', '.join(TARGETS)}")
        both = sorted(set(self.signature) & set(self.constexprs))
        if both:
            raise ValueError(f"case {self.name!r}: {', '.join(both)} in both signature and constexprs; keep one")
        stray = sorted(set(self.divisible_by_16) - set(self.signature))
        if stray:
            raise ValueError(f"case {self.name!r}: divisible_by_16 names {', '.join(stray)}, not in the signature")

    @classmethod
    def tuned(
        cls,
        name: str,
        function: Any,
        signature: Mapping[str, ArgumentType],
        constexprs: Mapping[str, Any] = MappingProxyType({}),
        **settings: Any,
    ) -> tuple[KernelCase, ...]:
        """A case for every configuration of an autotuned ``function``; ``settings`` are further attributes of each."""
        cases = []
        for config in function.configs:
            title = ",".join(f"{key}={value}" for key, value in config.kwargs.items())
            cases.append(
                cls(
                    f"{name}[{title},warps={config.num_warps},stages={config.num_stages}]",
                    function,
                    signature,
                    {**constexprs, **config.kwargs},
                    num_warps=config.num_warps,
                    num_stages=config.num_stages,
                    **settings,
                )
            )
        return tuple(cases)

    @property
    def all_targets(self) -> tuple[Target, ...]:
        return tuple(TARGETS[name] for name in (self.targets or TARGETS))


@dataclass(frozen=True, slots=True)
class Resources:
    """What a compiled kernel needs. ``hash``: of the sources, settings, compiler version and target it came from.

    Attributes:
        registers: per thread; on AMD devices vector registers, accumulation ones included.
        shared_bytes: per block.
        spill_bytes: memory per thread that stands in for registers.
    """

    hash: str
    registers: int
    shared_bytes: int
    spill_bytes: int


def load_cases(provider: str) -> tuple[KernelCase, ...]:
    """The cases of ``package.module:function`` or ``folder/file.py:function``.

    Raises ``ValueError`` for another form, a function that is not there or fails, source that cannot be imported, equal
    names, functions that are not Triton's, and what is not cases; ``ModuleNotFoundError`` where there is no module.
    """
    place, sign, name = provider.rpartition(":")
    if not sign or not name:
        raise ValueError(f"{provider!r} is no PACKAGE:FUNCTION, such as my_package.cases:all or tests/cases.py:all")
    make = getattr(module := _load(place), name, None)
    if not callable(make):
        there = ", ".join(other for other, value in vars(module).items() if callable(value)) or "none"
        raise ValueError(f"{place} has no function {name!r}; it has: {there}")
    try:
        cases: tuple[Any, ...] = tuple(make() or ())
    except Exception as error:
        raise ValueError(f"{provider} fails: {_described(error)}; it takes nothing and returns cases") from error
    found: dict[str, KernelCase] = {}
    for case in cases:
        if not isinstance(case, KernelCase):
            raise ValueError(f"{provider} yields {case!r}, which is no KernelCase; let it return a list of these")
        if case.name in found:
            raise ValueError(f"{provider} has two cases named {case.name!r}; give each its own name")
        if not _is_of_triton(case.function):
            raise ValueError(
                f"{provider}: the function of case {case.name!r} is {case.function!r}, which Triton cannot compile; "
                "put @triton.jit above its definition"
            )
        found[case.name] = case
    if not found:
        raise ValueError(f"{provider} yields no case; let it return a list of KernelCase")
    return tuple(found.values())


def _is_of_triton(function: Any) -> bool:
    """Whether ``function`` is a Python function in wrappers of Triton, one at least; an interpreted one counts too."""
    inner = function
    while inner is not None and not isinstance(inner, FunctionType):
        inner = getattr(inner, "fn", None)
    return inner is not None and type(function).__module__.startswith("triton.")


def _load(place: str) -> ModuleType:
    is_file = place.endswith(".py")
    if is_file and not Path(place).is_file():
        raise ValueError(f"{place} is no file with Python source; it is looked for from the current folder")
    try:
        return _load_file(Path(place)) if is_file else import_module(place)
    except ModuleNotFoundError:
        raise
    except Exception as error:  # Whatever the source does when it is run.
        raise ValueError(f"{place} cannot be imported: {_described(error)}; correct that first") from error


def _described(error: Exception) -> str:
    """Kind, text and place, on a line."""
    if isinstance(error, SyntaxError):
        return f"{type(error).__name__} in {error.filename}, line {error.lineno}: {error.msg}"
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} in {frame.filename}, line {frame.lineno}: {error}"


def _load_file(path: Path) -> ModuleType:
    """A module that is in no package, such as one beside tests."""
    spec = spec_from_file_location(f"kernel_cases_of_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path} is not loaded as Python source here")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 1 on")
    return int(text)


def main(arguments: list[str] | None = None) -> int:
    """0 when everything compiles within its budget and, without ``--write``, as the table says; 1 otherwise."""
    from hardpoint_testing_torch.triton_aot_check import compile_all
    from hardpoint_testing_torch.triton_aot_table import ResourceTable

    parser = argparse.ArgumentParser(
        prog="python -m hardpoint_testing_torch.triton_aot",
        description="Compile Triton kernels for all targets, without a GPU; check or write the table of what they use.",
    )
    parser.add_argument("provider", metavar="PACKAGE:FUNCTION", help="the function that returns the kernel cases")
    where = parser.add_mutually_exclusive_group(required=True)
    where.add_argument("--write", metavar="FILE", type=Path, help="write the table")
    where.add_argument("--check", metavar="FILE", type=Path, help="compare with the table")
    parser.add_argument("--jobs", type=_at_least_one, default=2, help="processes that compile (default: 2)")
    parser.add_argument("--cold", action="store_true", help="use no results of earlier runs")
    given = parser.parse_args(arguments)
    try:
        load_cases(given.provider)
        committed = None if given.check is None else ResourceTable.read(given.check)
        if given.write is not None and not given.write.absolute().parent.is_dir():
            raise ValueError(f"--write {given.write}: {given.write.parent} is no folder; create it")
    except (ValueError, ModuleNotFoundError, OSError) as error:
        parser.error(str(error))
    try:
        outcome = compile_all(given.provider, jobs=given.jobs, cold=given.cold)
    except RuntimeError as error:
        parser.exit(1, f"{error}\n")
    faults = list(outcome.faults)
    if committed is not None:
        faults += outcome.table.differences(committed)
    elif not faults:
        outcome.table.write(given.write)
    for fault in faults:
        print(fault, file=sys.stderr)
    print(f"{outcome.table.num_rows} compilations, {outcome.num_cached} of them cached, {len(faults)} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    # Under the module's own name, so that the records are those that the cases are made of.
    sys.exit(import_module("hardpoint_testing_torch.triton_aot").main())

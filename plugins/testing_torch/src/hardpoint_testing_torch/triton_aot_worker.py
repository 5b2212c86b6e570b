"""One of the processes that compile: a share of the cases, each result a line of JSON on standard output."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from hardpoint_testing_torch.triton_aot import KernelCase, Resources, Target, load_cases
from hardpoint_testing_torch.triton_aot_hash import case_hash

__all__ = ["amd_usage", "cached", "compile_case", "keep", "main"]


def compile_case(case: KernelCase, target: Target) -> Resources:
    """Compile and measure. Raises ``ValueError`` for a case that does not fit its function, and what Triton raises."""
    function = case.function
    while not isinstance(function, JITFunction):
        function = function.fn
    names: list[str] = function.arg_names
    given = {**case.signature, **dict.fromkeys(case.constexprs, "constexpr")}
    if set(names) != set(given):
        missing, unknown = sorted(set(names) - set(given)), sorted(set(given) - set(names))
        raise ValueError(f"the case gives no type or value for {missing or 'nothing'}, and unknown {unknown or 'none'}")
    attributes: dict[Any, Any] = {(names.index(name),): [["tt.divisibility", 16]] for name in case.divisible_by_16}
    constants: dict[Any, Any] = dict(case.constexprs)
    types = {name: _argument(given[name], (place,), constants, attributes) for place, name in enumerate(names)}
    source = ASTSource(function, types, constants, attributes)
    compiled = triton.compile(
        source,
        target=GPUTarget(target.backend, target.arch, target.warp_size),
        options={"num_warps": case.num_warps, "num_stages": case.num_stages, **case.options},
    )
    shared = int(compiled.metadata.shared)
    if target.backend == "hip":
        registers, spilled = amd_usage(compiled.asm["amdgcn"])
    else:
        registers, spilled = _nvidia_usage(compiled.asm["cubin"])
    return Resources(case_hash(case, target), registers, shared, spilled)


def _argument(stated: Any, path: tuple[int, ...], constants: dict[Any, Any], attributes: dict[Any, Any]) -> Any:
    """The compiler's type of an argument; what ``KernelCase`` states within tuples goes to the two others by place."""
    if isinstance(stated, tuple):
        return tuple(_argument(entry, (*path, place), constants, attributes) for place, entry in enumerate(stated))
    if not isinstance(stated, str):
        constants[path] = stated
        return "constexpr"
    name, _, divisor = stated.partition(":")
    if divisor:
        attributes[path] = [["tt.divisibility", int(divisor)]]
    return name


def amd_usage(assembly: str) -> tuple[int, int]:
    """(vector registers, spilled bytes) from the metadata that the assembler writes."""

    def entry(key: str) -> int:
        found = re.search(rf"^\s*\.{key}:\s+(\d+)", assembly, re.MULTILINE)
        if found is None:
            raise RuntimeError(f"the assembly tells no {key}; this version of triton writes another form")
        return int(found.group(1))

    return entry("vgpr_count"), 4 * entry("vgpr_spill_count")


def _nvidia_usage(binary: bytes) -> tuple[int, int]:
    """(registers, bytes of the stack frame) from the tool that comes with Triton."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        done = subprocess.run([str(tool), "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"REG:(\d+) STACK:(\d+) .*LOCAL:(\d+)", done.stdout)
    if found is None:
        raise RuntimeError(f"cuobjdump tells no resource use, but: {done.stdout.strip()}")
    registers, stack, local = map(int, found.groups())
    return registers, stack + local


def cached(cache: Path | None, digest: str) -> Resources | None:
    """What an earlier run found, or None; a file that cannot be read counts as none."""
    if cache is None:
        return None
    try:
        values: dict[str, Any] = json.loads((cache / f"{digest}.json").read_text(encoding="utf-8"))
        return Resources(**values)
    except (OSError, ValueError, TypeError):
        return None


def keep(cache: Path | None, resources: Resources) -> None:
    """Put a result where :func:`cached` finds it, whole or not at all; where nothing can be written it is not kept."""
    if cache is None:
        return
    fresh = cache / f"{resources.hash}.{os.getpid()}"
    with contextlib.suppress(OSError):
        cache.mkdir(parents=True, exist_ok=True)
        fresh.write_text(json.dumps(asdict(resources)), encoding="utf-8")
        fresh.replace(cache / f"{resources.hash}.json")


def _answer(case: KernelCase, target: Target, cache: Path | None) -> dict[str, Any]:
    answer: dict[str, Any] = {"case": case.name, "target": target.name, "cached": True}
    try:
        resources = cached(cache, case_hash(case, target))
        if resources is None:
            answer["cached"] = False
            resources = compile_case(case, target)
            keep(cache, resources)
    except Exception as error:  # Whatever any stage of the compiler raises is the answer.
        lines = str(error).strip().splitlines() or [""]
        return {**answer, "cached": False, "error": f"{type(error).__name__}: {' | '.join(lines[-6:])}"}
    return {**answer, "resources": asdict(resources)}


def main(arguments: list[str] | None = None) -> int:
    """Always 0: faults are part of the answers."""
    parser = argparse.ArgumentParser(prog="python -m hardpoint_testing_torch.triton_aot_worker")
    parser.add_argument("provider")
    parser.add_argument("--share", required=True, help="such as 0/2")
    parser.add_argument("--cache", type=Path)
    given = parser.parse_args(arguments)
    share, num_shares = map(int, given.share.split("/"))
    pairs = [(case, target) for case in load_cases(given.provider) for target in case.all_targets]
    for case, target in pairs[share::num_shares]:
        print(json.dumps(_answer(case, target, given.cache)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

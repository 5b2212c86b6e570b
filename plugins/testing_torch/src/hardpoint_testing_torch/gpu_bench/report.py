"""The page that is made of a result; without one it says that nobody has run it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hardpoint_testing_torch.gpu_bench.records import Generation, KernelRow, Result, Roof, Skipped

__all__ = ["page", "summary"]

_HEAD = """# Kernels and models on graphics processors

<!-- Written by `make bench-gpu` from docs/performance/gpu-result.json and hardpoint_testing_torch.gpu_bench.report. -->

`make bench-gpu` runs every kernel that is installed on the device at hand, compares it with a float64 oracle, times it
beside the plain computation (attention: one call of the framework's attention per sequence, over dense keys and
values, without windows and caps), and lets a model answer requests. *Roof* is the least time that the problem's bytes
and operations take at the speed of the device's own largest copy and matrix product, as a share of the time measured.
[How to run it](operate/gpu.md).
"""
_NOTHING = """
**Not yet run on a graphics processor.** In the tests all Triton kernels are compiled ahead of time for sm_80, sm_90,
sm_100 and gfx942, and compared with their oracles by interpreter. No figure of a real device has been measured, and
none is claimed.
"""


def page(result: Result | None) -> str:
    """Markdown."""
    return _HEAD + (_NOTHING if result is None else "\n" + "\n".join(_sections(result)) + "\n")


def summary(result: Result) -> str:
    """One line for the terminal."""
    wrong = [f"{row.name} ({row.case})" for row in result.kernels if not row.is_right]
    apart = [f"{row.setting} x {row.num_requests}" for row in result.generation if not row.agrees]
    told = f"{len(result.kernels)} kernel cases, {len(result.generation)} of generation, {len(result.skipped)} skipped"
    return f"{told}; wrong: {', '.join(wrong + apart) or 'none'}"


def _sections(result: Result) -> Iterator[str]:
    machine = result.machine
    yield f"Measured on {machine.device} ({machine.architecture}) with torch {machine.torch} in {machine.dtype}."
    copies, products = f"{machine.roof.bytes_per_s / 1e9:,.0f} GB/s", f"{machine.roof.flops_per_s / 1e12:,.1f} TFLOP/s"
    yield f"Its copies move {copies}, its matrix products do {products}."
    yield ""
    groups = list(dict.fromkeys(row.group for row in result.kernels))
    for group in groups:
        yield f"## {group}"
        yield ""
        yield from _kernel_table([row for row in result.kernels if row.group == group], machine.roof)
        yield ""
    if result.generation:
        yield "## Generation"
        yield ""
        yield from _generation_table(result.generation)
        yield ""
    if result.skipped:
        yield "## Not measured"
        yield ""
        yield "| what | why |"
        yield "|---|---|"
        yield from _skipped_rows(result.skipped)
        yield ""


def _skipped_rows(rows: Sequence[Skipped]) -> Iterator[str]:
    """One row per reason: a backend that is missing refuses every case alike."""
    names: dict[str, list[str]] = {}
    for row in rows:
        names.setdefault(" ".join(row.reason.split()).replace("|", "/"), []).append(row.name)
    for reason, found in names.items():
        more = f" and {len(found) - 1} more" if len(found) > 1 else ""
        yield f"| {found[0]}{more} | {reason} |"


def _kernel_table(rows: Sequence[KernelRow], roof: Roof) -> Iterator[str]:
    yield "| kernel | case | error (allowed) | µs | plain, µs | times faster | roof | bound by |"
    yield "|---|---|--:|--:|--:|--:|--:|---|"
    for row in rows:
        error = f"{row.error:.1e} ({row.tolerance:.0e})" + ("" if row.is_right else " **wrong**")
        bound = "memory" if row.is_memory_bound(roof) else "arithmetic"
        yield (
            f"| {row.name} | {row.case} | {error} | {row.seconds * 1e6:,.1f} | {row.plain_seconds * 1e6:,.1f} | "
            f"{row.plain_seconds / row.seconds:.2f} | {row.roof_fraction(roof):.0%} | {bound} |"
        )


def _generation_table(rows: Sequence[Generation]) -> Iterator[str]:
    yield "| attention | requests at once | tokens/s | tokens as with the plain one |"
    yield "|---|--:|--:|---|"
    for row in rows:
        agrees = "yes" if row.agrees else "**no**"
        yield f"| {row.setting} | {row.num_requests} | {row.tokens_per_s:,.0f} | {agrees} |"

"""``python -m hardpoint_testing_torch.gpu_bench``: measure, keep the result, write the page."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib.metadata import entry_points
from pathlib import Path

import msgspec
import torch

from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_testing_torch.gpu_bench.attention import attention_cases, create_backend, measure_attention
from hardpoint_testing_torch.gpu_bench.generation import measure_generation
from hardpoint_testing_torch.gpu_bench.kernels import measure_override
from hardpoint_testing_torch.gpu_bench.measure import measure_roof
from hardpoint_testing_torch.gpu_bench.operators import measure_operators
from hardpoint_testing_torch.gpu_bench.records import Generation, KernelRow, Machine, Result, Scale, Skipped
from hardpoint_testing_torch.gpu_bench.report import page, summary

__all__ = ["main", "measure", "write_page"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Status 1 where something computed is wrong, 2 where there is no device."""
    given = _parser().parse_args(arguments)
    if given.write_only:
        write_page(given.output, given.document)
        return 0
    device = torch.device(given.device)
    if device.type != "cpu" and not torch.accelerator.is_available():
        print("no graphics processor that torch can use; see `hardpoint plugins doctor platform`", file=sys.stderr)
        return 2
    result = measure(device, getattr(torch, given.dtype), Scale.tiny() if given.tiny else Scale.full(), given.model)
    if given.output is not None:
        given.output.parent.mkdir(parents=True, exist_ok=True)
        given.output.write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
        if given.document is not None:
            write_page(given.output, given.document)
    print(summary(result))
    is_right = all(row.is_right for row in result.kernels) and all(row.agrees for row in result.generation)
    return 0 if is_right else 1


def write_page(result: Path, document: Path) -> None:
    """The page of what ``result`` holds, or of nothing where there is no such file."""
    found = msgspec.json.decode(result.read_bytes(), type=Result) if result.is_file() else None
    document.write_text(page(found), encoding="utf-8")


def measure(
    device: torch.device, dtype: torch.dtype, scale: Scale, model: str | None, backends: Sequence[str] | None = None
) -> Result:
    """Everything that is installed. ``model`` is what generates; None leaves generation out."""
    description = describe(device)
    rows: list[KernelRow | Skipped] = []
    for name in sorted(backends if backends is not None else _names("attention_backend")):
        try:
            backend = create_backend(name, device)
        except Exception as fault:  # whatever a plugin raises, the others are measured
            rows.append(Skipped(name=name, reason=f"{type(fault).__name__}: {fault}"))
            continue
        for case in attention_cases(scale, dtype):
            print(f"{name}: {case.title}", file=sys.stderr)
            rows.append(measure_attention(backend, case, device, description, scale))
    for name in sorted(_names("kernel_override")):
        print(name, file=sys.stderr)
        rows.append(measure_override(name, device, dtype, scale))
    for name in sorted(_names("custom_op")):
        print(name, file=sys.stderr)
        rows += measure_operators(name, device, dtype, scale)
    generation: list[Generation] = []
    skipped = [row for row in rows if isinstance(row, Skipped)]
    if model is not None:
        generation, left = measure_generation(model, scale)
        skipped += left
    machine = Machine(
        device=description.name,
        architecture=", ".join(sorted(name for name in description.features if name.startswith(("sm_", "gfx")))) or "-",
        torch=str(torch.__version__),
        dtype=str(dtype).removeprefix("torch."),
        roof=measure_roof(device, dtype, scale),
    )
    kernels = [row for row in rows if isinstance(row, KernelRow)]
    return Result(machine=machine, kernels=kernels, generation=generation, skipped=skipped)


def describe(device: torch.device) -> DeviceDescription:
    """As the framework tells it, without a platform."""
    if device.type == "cpu":
        return DeviceDescription(device_type="cpu", name="the host")
    found = torch.cuda.get_device_properties(device)
    hip = getattr(found, "gcnArchName", "").partition(":")[0]
    is_hip = torch.version.hip is not None
    features = {"rocm", hip} if is_hip else {"cuda", f"sm_{found.major}{found.minor}"}
    return DeviceDescription(
        device_type=device.type,
        name=found.name,
        capability=(found.major, found.minor),
        memory_bytes=found.total_memory,
        features=frozenset(features),
    )


def _names(kind: str) -> set[str]:
    return set(entry_points(group=f"hardpoint.{kind}.v1").names)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m hardpoint_testing_torch.gpu_bench", description=__doc__)
    parser.add_argument("--device", default="cuda", help="the framework's name of the device (default: cuda)")
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16", "float32"))
    parser.add_argument("--model", help="what generates text; left out by default")
    parser.add_argument("--tiny", action="store_true", help="small problems, to try the benchmark itself")
    parser.add_argument("--output", type=Path, help="keep the result in this file")
    parser.add_argument("--document", type=Path, help="write the page of the result to this file")
    parser.add_argument("--write-only", action="store_true", help="only write the page of the result that is kept")
    return parser


if __name__ == "__main__":
    sys.exit(main())

"""Kernels beside what torch has for the same: ``python -m hardpoint_cpu.native.bench``.

Both sides take turns in one process, on weights that lie further apart than caches reach, as in a model whose layers
come one after the other. What counts is the ratio: absolute figures move with the machine's other work.
"""

from __future__ import annotations

import argparse
import itertools
import os
import platform
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

# Torch's threads would poll for work after each of its turns, on the cores that ours then need. Read at its import.
os.environ.setdefault("GOMP_SPINCOUNT", "1000")

import torch

from hardpoint_cpu.host import Host
from hardpoint_cpu.native.build import find_build
from hardpoint_cpu.native.grouped import linear_gguf, linear_int4
from hardpoint_cpu.native.int8 import linear_int8, quantize_rows
from hardpoint_cpu.native.levels import named_level
from hardpoint_cpu.native.library import NativeLibrary, NativeLinear

__all__ = ["KINDS", "Kind", "Measurement", "main", "measure"]

Product = Callable[[torch.Tensor], torch.Tensor]

# Outputs and inputs of SmolLM2-135M: fused q, k and v; attention's output; gate and up; down; head.
SHAPES = ((960, 576), (576, 576), (3072, 576), (576, 1536), (49152, 576))
ROWS = (1, 8, 32, 128, 1024)
GROUP = 32
# Longer than anybody waits: a head over a thousand rows is not computed in one step.
MOST_OPERATIONS = 2e10


@dataclass(frozen=True, slots=True)
class Kind:
    """One way to keep a weight. ``prepare`` makes of a float32 [O, I] our product and torch's, for x float32 [T, I]."""

    name: str
    bytes_per_weight: float
    prepare: Callable[[NativeLibrary, torch.Tensor], tuple[Product, Product]]


@dataclass(frozen=True, slots=True)
class Measurement:
    """Medians in seconds of ``ours`` and ``theirs``; ``weight_bytes`` and ``operations`` of one product."""

    kind: str
    outputs: int
    inputs: int
    rows: int
    ours: float
    theirs: float
    weight_bytes: float

    @property
    def ratio(self) -> float:
        """Above one: ours is faster."""
        return self.theirs / self.ours

    @property
    def operations(self) -> float:
        return 2.0 * self.outputs * self.inputs * self.rows

    def line(self) -> str:
        return (
            f"{self.kind:6} {self.outputs:6}x{self.inputs:<5} {self.rows:5} {self.ours * 1e6:10.0f} "
            f"{self.theirs * 1e6:10.0f} {self.ratio:6.2f} {self.operations / self.ours / 1e9:9.0f} "
            f"{self.weight_bytes / self.ours / 1e9:7.1f}"
        )


HEADER = (
    f"{'kind':6} {'weight':>12} {'rows':>5} {'ours us':>10} {'torch us':>10} {'ratio':>6} {'GFLOP/s':>9} {'GB/s':>7}"
)


def _float32(library: NativeLibrary, weight: torch.Tensor) -> tuple[Product, Product]:
    return library.linear_f32(weight), lambda x: torch.nn.functional.linear(x, weight)


def _bfloat16(library: NativeLibrary, weight: torch.Tensor) -> tuple[Product, Product]:
    half = weight.bfloat16()
    return library.linear_bf16(half), lambda x: torch.nn.functional.linear(x.bfloat16(), half).float()


def _int8(library: NativeLibrary, weight: torch.Tensor) -> tuple[Product, Product]:
    values, scales = quantize_rows(weight)
    with warnings.catch_warnings():
        # Its quantized tensors are on their way out; nothing else leads to its kernel.
        warnings.simplefilter("ignore", UserWarning)
        zeros = torch.zeros(len(scales), dtype=torch.int64)
        packed = torch.ops.quantized.linear_prepack(
            torch._make_per_channel_quantized_tensor(values, scales.double(), zeros, 0), None
        )
    return linear_int8(library, values, scales), lambda x: torch.ops.quantized.linear_dynamic(x, packed)


def _int8_weights(library: NativeLibrary, weight: torch.Tensor) -> tuple[Product, Product]:
    values, scales = quantize_rows(weight)
    # Torch's product with such weights reads beyond them where sizes are not those of a model.
    whole = values * scales[:, None]
    return linear_int8(library, values, scales, activations="float"), lambda x: torch.nn.functional.linear(x, whole)


def _q8_0(library: NativeLibrary, weight: torch.Tensor) -> tuple[Product, Product]:
    groups = _in_groups(weight)
    scales = (groups.abs().amax(-1, keepdim=True) / 127).half()
    values = (groups / scales.float()).nan_to_num().round().clamp(-127, 127).to(torch.int8)
    rows = torch.cat([scales.view(torch.uint8), values.view(torch.uint8)], -1).flatten(1)
    return _grouped(linear_gguf(library, [("Q8_0", rows)]), weight, values * scales.float())


def _int4(library: NativeLibrary, weight: torch.Tensor) -> tuple[Product, Product]:
    groups = _in_groups(weight)
    mins, most = groups.amin(-1, keepdim=True), groups.amax(-1, keepdim=True)
    scales = (most - mins) / 15
    values = ((groups - mins) / scales).nan_to_num().round().clamp(0, 15).to(torch.uint8)
    nibbles = (values[..., : GROUP // 2] | values[..., GROUP // 2 :] << 4).flatten(1)
    layer = linear_int4(library, nibbles, scales.squeeze(-1), mins.squeeze(-1), GROUP)
    return _grouped(layer, weight, values * scales + mins)


def _in_groups(weight: torch.Tensor) -> torch.Tensor:
    """[O, I] with zeros up to whole groups as [O, groups, GROUP]."""
    return torch.nn.functional.pad(weight, (0, -weight.shape[1] % GROUP)).unflatten(1, (-1, GROUP))


def _grouped(layer: NativeLinear, weight: torch.Tensor, rounded: torch.Tensor) -> tuple[Product, Product]:
    """``layer`` beside torch's product with the same weights in float32, ``rounded`` [O, groups, GROUP]."""
    inputs = weight.shape[1]
    whole = rounded.flatten(1)[:, :inputs].contiguous()
    if layer.inputs == inputs:
        return layer, lambda x: torch.nn.functional.linear(x, whole)
    missing = layer.inputs - inputs
    return (lambda x: layer(torch.nn.functional.pad(x, (0, missing))), lambda x: torch.nn.functional.linear(x, whole))


KINDS: tuple[Kind, ...] = (
    Kind("f32", 4, _float32),
    Kind("bf16", 2, _bfloat16),
    Kind("int8", 1, _int8),
    Kind("int8w", 1, _int8_weights),
    Kind("q8_0", 34 / 32, _q8_0),
    Kind("int4", 20 / 32, _int4),
)


def measure(
    library: NativeLibrary,
    kinds: Sequence[Kind] = KINDS,
    *,
    shapes: Sequence[tuple[int, int]] = SHAPES,
    rows: Sequence[int] = ROWS,
    repeats: int = 15,
    rotated_bytes: int = 160 << 20,
) -> Iterator[Measurement]:
    """Every kind, shape and number of rows in turn; weights of ``rotated_bytes`` are used one after the other."""
    for kind, (outputs, inputs) in itertools.product(kinds, shapes):
        size = kind.bytes_per_weight * outputs * inputs
        copies = max(1, min(repeats, int(rotated_bytes // size)))
        pairs = [kind.prepare(library, torch.randn(outputs, inputs)) for _ in range(copies)]
        for count in rows:
            if 2.0 * outputs * inputs * count > MOST_OPERATIONS:
                continue
            ours, theirs = _alternate(pairs, torch.randn(count, inputs), repeats)
            yield Measurement(kind.name, outputs, inputs, count, ours, theirs, size)


def _alternate(pairs: Sequence[tuple[Product, Product]], x: torch.Tensor, repeats: int) -> tuple[float, float]:
    seconds: tuple[list[float], list[float]] = ([], [])
    for repeat in range(repeats + 1):
        for product, taken in zip(pairs[repeat % len(pairs)], seconds, strict=True):
            began = time.perf_counter()
            product(x)
            taken.append(time.perf_counter() - began)
    # The first ones make room for the results.
    return statistics.median(seconds[0][1:]), statistics.median(seconds[1][1:])


def main(arguments: Sequence[str] | None = None) -> int:
    """Print a table. Raises ``KernelBuildError`` where kernels cannot be compiled."""
    parser = argparse.ArgumentParser(prog="python -m hardpoint_cpu.native.bench", description=__doc__)
    parser.add_argument("--level", default="auto", help="level of the kernels")
    parser.add_argument("--threads", type=int, default=len(Host().physical_cores()))
    parser.add_argument("--kinds", nargs="*", default=[kind.name for kind in KINDS])
    parser.add_argument("--rows", nargs="*", type=int, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--rotated-mib", type=int, default=160)
    given = parser.parse_args(arguments)
    host = Host()
    level = named_level(given.level, platform.machine(), host.cpu_flags())
    torch.set_num_threads(given.threads)
    library = NativeLibrary(find_build(level).compile(), threads=given.threads)
    print(f"{host.model_name()}, {given.threads} threads, {library.isa}, torch {torch.__version__}")
    print(HEADER)
    kinds = [kind for kind in KINDS if kind.name in given.kinds]
    rotated = given.rotated_mib << 20
    for found in measure(library, kinds, rows=given.rows, repeats=given.repeats, rotated_bytes=rotated):
        print(found.line(), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

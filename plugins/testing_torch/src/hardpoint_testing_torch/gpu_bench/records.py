"""What one run of the benchmark found. Plain records, kept as JSON beside the page that is made of them."""

from __future__ import annotations

import msgspec

__all__ = ["Generation", "KernelRow", "Machine", "Result", "Roof", "Scale", "Skipped"]


class Roof(msgspec.Struct, frozen=True, kw_only=True):
    """What the device was seen to do at best: a large copy, counted in and out, and a large matrix product."""

    bytes_per_s: float
    flops_per_s: float


class Machine(msgspec.Struct, frozen=True, kw_only=True):
    """Where it ran."""

    device: str
    architecture: str
    torch: str
    dtype: str
    roof: Roof


class KernelRow(msgspec.Struct, frozen=True, kw_only=True):
    """One kernel in one case.

    Attributes:
        group: ``attention``, or the seam that the kernel serves.
        error: largest deviation from the float64 oracle, relative to outputs of order one, on a small problem.
        tolerance: what the conformance kit allows.
        seconds: per call of the large problem; ``plain_seconds`` of the plain computation of the same.
        bytes, flops: that the large problem cannot do without.
    """

    group: str
    name: str
    case: str
    error: float
    tolerance: float
    seconds: float
    plain_seconds: float
    bytes: float
    flops: float

    @property
    def is_right(self) -> bool:
        return self.error <= self.tolerance

    def roof_fraction(self, roof: Roof) -> float:
        """Least time that the roof allows for the problem, as a share of the time it took."""
        return max(self.bytes / roof.bytes_per_s, self.flops / roof.flops_per_s) / self.seconds

    def is_memory_bound(self, roof: Roof) -> bool:
        return self.bytes / roof.bytes_per_s >= self.flops / roof.flops_per_s


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """Whole requests through the engine. ``agrees``: greedy tokens equal those of the plain attention, row for row, at
    least as far as the first half of each answer."""

    setting: str
    num_requests: int
    tokens_per_s: float
    agrees: bool


class Skipped(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    reason: str


class Result(msgspec.Struct, frozen=True, kw_only=True):
    machine: Machine
    kernels: list[KernelRow]
    generation: list[Generation]
    skipped: list[Skipped]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """How large the problems are. ``TINY`` runs in seconds on a processor, to try the benchmark itself.

    Attributes:
        decode_rows, context: sequences that decode together, and tokens each has behind it.
        prefill: tokens of a prompt; ``prefill_rows`` of them come together.
        tokens, width: of the problems for kernels other than attention.
        matrix, copy_bytes: of the products and copies that find the roof.
        budget_s: time for one measurement.
        batches: numbers of requests generated together; ``answer`` tokens each.
    """

    decode_rows: int
    context: int
    prefill_rows: int
    prefill: int
    tokens: int
    width: int
    matrix: int
    copy_bytes: int
    budget_s: float
    batches: tuple[int, ...]
    answer: int

    @classmethod
    def full(cls) -> Scale:
        return cls(
            decode_rows=64,
            context=2048,
            prefill_rows=4,
            prefill=2048,
            tokens=8192,
            width=4096,
            matrix=8192,
            copy_bytes=1 << 30,
            budget_s=0.3,
            batches=(1, 32, 128),
            answer=128,
        )

    @classmethod
    def tiny(cls) -> Scale:
        return cls(
            decode_rows=2,
            context=24,
            prefill_rows=1,
            prefill=12,
            tokens=8,
            width=64,
            matrix=64,
            copy_bytes=1 << 16,
            budget_s=0.002,
            batches=(1, 2),
            answer=6,
        )

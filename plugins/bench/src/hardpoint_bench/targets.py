"""What the figures of each precision class have to reach, and whether they do."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["TARGETS", "Target", "Verdict", "best_ratio", "verdicts"]

_MIB = 2**20


@dataclass(frozen=True, slots=True)
class Target:
    """``figure`` of ``workload`` in class ``precision`` compared with ``bound``.

    ``against``: ``peers`` (how many times better than the best one, at least), the name of one of them (the same with
    that one), ``limit`` (fraction of the machine's limit, at least), ``nothing`` (the figure itself, at most) or
    ``weights`` (bytes as a multiple of those of the weights, at most).
    """

    precision: str
    workload: str
    figure: str
    against: str
    bound: float

    @property
    def at_most(self) -> bool:
        return self.against in ("nothing", "weights")

    @property
    def text(self) -> str:
        """In a reader's words."""
        if self.against == "nothing":
            return f"{self.figure} ≤ {self.bound:g}"
        if self.against == "weights":
            return f"{self.figure} ≤ {self.bound:g} × weights"
        if self.against == "limit":
            return f"{self.figure} ≥ {self.bound:.0%} of the limit"
        rival = "the best peer" if self.against == "peers" else self.against
        return f"{self.figure} ≥ {self.bound:g} × {rival}"


def _of_class(precision: str, decode: float, batch: float, prefill: float) -> Iterator[Target]:
    yield Target(precision, "latency", "decode_tokens_per_s", "peers", decode)
    yield Target(precision, "throughput", "output_tokens_per_s", "peers", batch)
    yield Target(precision, "prefill", "prompt_tokens_per_s", "peers", prefill)
    if precision == "fp32":
        yield Target(precision, "prefill", "prompt_tokens_per_s", "limit", 0.9)
        # At most 0.8 times its seconds; ratios here say how many times better we are.
        yield Target(precision, "prefix", "wall_s", "vllm", 1.25)
    else:
        yield Target(precision, "prefix", "wall_s", "nothing", 2.5)
    yield Target(precision, "startup", "start_s", "nothing", 2.5)
    yield Target(precision, "startup", "peak_memory_mib", "weights", 2.5)


TARGETS = (
    *_of_class("fp32", decode=1.2, batch=1.2, prefill=1.0),
    *_of_class("int8", decode=1.4, batch=1.6, prefill=1.3),
    *_of_class("4bit", decode=1.6, batch=1.6, prefill=1.4),
)


@dataclass(frozen=True, slots=True)
class Verdict:
    """``reached`` is in the units of the target, None where nothing was measured; then ``why`` says so.

    ``rival``: the peer that the target was held against.
    """

    target: Target
    reached: float | None
    rival: str | None = None
    why: str | None = None

    @property
    def is_met(self) -> bool | None:
        if self.reached is None:
            return None
        bound = self.target.bound
        return self.reached <= bound if self.target.at_most else self.reached >= bound


def best_ratio(report: Mapping[str, Any], figure: str) -> tuple[str, float] | None:
    """The peer that came out best in ``figure`` and our ratio to it, the median over the repeats."""
    found = {peer: ratios[figure]["median"] for peer, ratios in report["ratios"].items() if figure in ratios}
    return min(found.items(), key=lambda pair: pair[1]) if found else None


def verdicts(result: Mapping[str, Any]) -> list[Verdict]:
    """Every target of the classes that ``result`` (of ``hardpoint bench suite``) has, in the order of the table."""
    return [
        _verdict(target, result["classes"][target.precision])
        for target in TARGETS
        if target.precision in result["classes"]
    ]


def _verdict(target: Target, measured: Mapping[str, Any]) -> Verdict:
    report = measured["workloads"].get(target.workload)
    if report is None:
        why = measured["faults"].get("hardpoint") or "this workload was not run"
        return Verdict(target, None, why=why)
    median = report["figures"][target.figure]["median"]
    if target.against == "nothing":
        return Verdict(target, median)
    if target.against == "weights":
        stored = measured["weight_bytes"]
        return Verdict(target, median * _MIB / stored, None) if stored else Verdict(target, None, why="unknown sizes")
    if target.against == "limit":
        fraction = report["fractions"].get(target.figure)
        return Verdict(target, fraction, why=None if fraction else "no limit is known for this model")
    if target.against == "peers":
        best = best_ratio(report, target.figure)
        return Verdict(target, None, why="no peer took part") if best is None else Verdict(target, best[1], best[0])
    ratio = report["ratios"].get(target.against, {}).get(target.figure)
    if ratio is None:
        return Verdict(target, None, target.against, f"{target.against} took no part")
    return Verdict(target, ratio["median"], target.against)

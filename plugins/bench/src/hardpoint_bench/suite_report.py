"""A suite's result as a table for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hardpoint_bench.model_report import aligned, number

__all__ = ["COLUMNS", "cell", "number", "scaling_table", "suite_table", "verdict_word"]

COLUMNS: Sequence[tuple[str, str, str]] = (
    ("latency", "ttft_s", "a TTFT s"),
    ("latency", "decode_tokens_per_s", "a decode tok/s"),
    ("throughput", "output_tokens_per_s", "b tok/s"),
    ("prefill", "prompt_tokens_per_s", "c tok/s"),
    ("prefix", "wall_s", "d s"),
    ("startup", "start_s", "e s"),
    ("startup", "peak_memory_mib", "e MiB"),
)
"""Workload, figure and heading of what is compared."""
_RATES = ("output_tokens_per_s", "prompt_tokens_per_s")


def suite_table(result: Mapping[str, Any]) -> str:
    """A block per class with a line per side, then the targets."""
    machine, roofline = result["machine"], result["roofline"]
    lines = [
        f"{result['model']} on {machine['cpu']}, {machine['threads']} threads",
        f"read {roofline['memory_read'] / 1e9:.1f} GB/s, fp32 {roofline['fp32'] / 1e9:.0f} GFLOP/s, "
        f"int8 {roofline['int8'] / 1e9:.0f} GOP/s; medians of {result['settings']['repeats']}",
    ]
    for name, measured in result["classes"].items():
        lines += ["", *aligned([[name, *(heading for _, _, heading in COLUMNS)], *_sides(measured["workloads"])])]
        lines += [f"{who}: {why}" for section in ("absent", "faults") for who, why in measured[section].items()]
    rows = [
        [row["class"], row["workload"], row["target"], number(row["reached"]), row["rival"] or "", verdict_word(row)]
        for row in result["targets"]
    ]
    return "\n".join([*lines, "", *aligned([["class", "workload", "target", "reached", "peer", ""], *rows])])


def scaling_table(found: Mapping[str, Any]) -> str:
    """A line per size, then one per group of a profile."""
    lines = [found["precision"]]
    for name, size in (("batch", "num_requests"), ("context", "prompt_length")):
        rows = [[name, "step ms", "output tok/s", "prompt tok/s"]]
        for row in found[name]:
            figures = (row["step_s"]["median"] * 1e3, *(row[rate]["median"] for rate in _RATES))
            rows.append([str(row[size]), *map(number, figures)])
        lines += ["", *aligned(rows)]
    rows = [["threads", "single tok/s", "batch tok/s"]]
    for row in found["threads"]:
        rates = (row["single"]["decode_tokens_per_s"]["median"], row["batch"]["output_tokens_per_s"]["median"])
        rows.append([str(row["threads"]), *map(number, rates)])
    lines += ["", *aligned(rows)]
    profiles = found["profiles"]
    groups = dict.fromkeys(group for profile in profiles.values() for group in profile["groups"])
    shares = [[name, *(f"{one['groups'].get(name, 0):.1%}" for one in profiles.values())] for name in groups]
    return "\n".join([*lines, "", *aligned([["share of time", *profiles], *shares])])


def _sides(workloads: Mapping[str, Any]) -> Iterator[list[str]]:
    peers = dict.fromkeys(peer for report in workloads.values() for peer in report["peers"])
    for side in ("hardpoint", *peers):
        yield [side, *(cell(workloads, side, workload, figure) for workload, figure, _ in COLUMNS)]


def cell(workloads: Mapping[str, Any], side: str, workload: str, figure: str) -> str:
    """Median with its range, a dash where there is none."""
    report = workloads.get(workload, {"peers": {}, "figures": {}})
    figures = report["figures"] if side == "hardpoint" else report["peers"].get(side, {}).get("figures", {})
    found = figures.get(figure)
    if found is None:
        return "–"
    return f"{number(found['median'])} [{number(found['low'])}–{number(found['high'])}]"


def verdict_word(row: Mapping[str, Any]) -> str:
    if row["met"] is None:
        return f"not measured: {row['why']}"
    return "met" if row["met"] else "missed"

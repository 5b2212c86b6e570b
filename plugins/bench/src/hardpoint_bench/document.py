"""The page of the documentation that tells what came of the suite and the scaling study, written from their result."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from hardpoint_bench.classes import CLASSES
from hardpoint_bench.suite_report import COLUMNS, cell, number, verdict_word
from hardpoint_bench.targets import TARGETS, best_ratio

__all__ = ["chart_names", "page"]

_NOTE = "<!-- Written by `hardpoint bench document` from {source}; measure again with `make bench`. -->"
_INTRO = """\
Five workloads in three classes of precision on {model}, against other engines on the same machine in the same hours.
Ids are random, the end of a sequence is ignored, sampling is greedy, every repeat has ids of its own. Sides take
turns, each in a process and an interpreter of its own, with the same number of threads.
[Benchmarks](operate/benchmarks.md) says how to run this.

| | workload | figure |
|---|---|---|
| a | one prompt of 128 tokens, 128 outputs | seconds to the first token, then tokens per second |
| b | 32 prompts of 128 tokens together, 128 outputs each | output tokens per second |
| c | one prompt of 1,024 tokens, 1 output | prompt tokens per second |
| d | 16 prompts that share 768 tokens and have 32 of their own, 16 outputs each, nothing cached before | seconds |
| e | from the start of a process to the first token of a prompt of 128 tokens | seconds, peak memory in MiB |

Below float32, engines differ in what they round: the precision of weights and of activations stands beside every
engine's figures.
"""
_ROOFLINE = """\
What the machine reaches at its best was measured in the same run, by stock operators with all threads: {peaks}.
The limit of a workload follows from that: its prefill and each of its decode steps take at least the time of their
arithmetic at the measured peak, or of reading what has to be read at the measured rate, whichever is longer.

- Arithmetic: 2 operations per weight of a matrix and token, the output matrix for sampled positions only; attention
  4 per query, key and channel over the positions that a query sees. Linear layers at the peak of the class (float32,
  or 8 bits in both other classes), attention at that of float32.
- Reading: all weights of the layers and the output matrix once per prefill and once per step, as wide as the class
  stores them (4 bytes, 1 byte, or as in the file), and keys and values of all earlier positions in float32.

A fraction says how much of that was reached. Nothing reaches all of it: what else has to be done counts for nothing.
"""
_RATIOS = """\
Ratios say how many times better Hardpoint is, for seconds as well as for rates; each is the median over runs side by
side. [What stands in the way](performance-limits.md) of those that are missed.
"""
_SAMPLED = """\
Shares of the time of the engine's thread, from stacks sampled every half millisecond. Layers count with the operators
that they call.
"""
_PEAKS = (("memory_read", "reading {:.1f} GB/s"), ("fp32", "float32 {:,.0f} GFLOP/s"), ("int8", "8 bits {:,.0f} GOP/s"))
_SWEEPS = (
    ("batch", "num_requests", "requests", "Requests of {batch_prompt_len} tokens together, {output_len} outputs each."),
    ("context", "prompt_length", "prompt", "One prompt of so many tokens, {output_len} outputs behind it."),
)
_EMPTY = "No result was recorded yet: `make bench` measures and writes this page anew.\n"

Result = Mapping[str, Any]


def page(result: Result, source: str) -> str:
    """Markdown. ``source``: where the result lies, for readers. Sections without figures are left out."""
    parts = ["# Performance\n", _NOTE.format(source=source) + "\n"]
    parts.append(_INTRO.format(model=f"`{result['model']}`" if "model" in result else "one model"))
    if "machine" in result:
        parts.append("## Machine\n\n" + "\n".join(_machine(result)) + "\n")
    else:
        parts.append(_EMPTY)
    classes = result.get("classes", {})
    for name, measured in classes.items():
        parts.append(f"## {CLASSES[name].title}\n\n" + "\n".join(_class(name, measured)) + "\n")
    parts.append("## Targets\n\n" + "\n".join(_targets(result)) + "\n")
    if "roofline" in result:
        parts.append("## Limits of the machine\n\n" + "\n".join(_roofline(result)) + "\n")
    if "scaling" in result:
        parts.append("## Scaling\n\n" + "\n".join(_scaling(result["scaling"])) + "\n")
        parts.append("## Where the time goes\n\n" + "\n".join(_profiles(result["scaling"])) + "\n")
    return "\n".join(parts)


def chart_names(result: Result) -> list[str]:
    """Files of pictures that :func:`page` shows, below ``performance/``."""
    names = [f"peers-{name}.svg" for name, measured in result.get("classes", {}).items() if measured["workloads"]]
    return names + [f"scaling-{name}.svg" for name in ("batch", "context", "threads") if "scaling" in result]


def _table(rows: Sequence[Sequence[str]]) -> Iterator[str]:
    head, *rest = rows
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rest:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"


def _machine(result: Result) -> Iterator[str]:
    machine = result["machine"]
    rows = [
        ["", ""],
        ["processor", machine["cpu"]],
        ["instructions", " ".join(machine["flags"]) or "–"],
        ["cores, threads", f"{machine['cores']}, {machine['threads']}"],
        ["memory", f"{machine['memory_gib']} GiB"],
        ["system", machine["system"]],
        ["versions", f"Python {machine['python']}, torch {machine['torch']}"],
    ]
    yield from _table(rows)
    if settings := result.get("settings"):
        yield ""
        yield f"Figures are medians of {settings['repeats']} repeats [smallest–largest], after one that is not counted."
        if settings.get("shrink", 1) != 1:
            yield f"**Sizes of the workloads were divided by {settings['shrink']}: this was a trial run.**"
    for name, advice in result.get("missing_peers", {}).items():
        yield f"\n{name} was not installed. To have it measured: `{advice}`."


def _class(name: str, measured: Result) -> Iterator[str]:
    workloads = measured["workloads"]
    if workloads:
        first = next(iter(workloads.values()))
        precisions = {"hardpoint": first["settings"]["precision"]}
        for report in workloads.values():
            precisions |= {peer: _named(facts) for peer, facts in report["peers"].items()}
        rows = [["engine", "precision", *(heading for _, _, heading in COLUMNS)]]
        for side, precision in precisions.items():
            figures = [cell(workloads, side, workload, figure) for workload, figure, _ in COLUMNS]
            rows.append([f"**{side}**" if side == "hardpoint" else side, precision, *figures])
        rows.append(
            ["times better than the best peer", "", *(_ratio(workloads, one, figure) for one, figure, _ in COLUMNS)]
        )
        rows.append(["fraction of the limit", "", *(_fraction(workloads, one, figure) for one, figure, _ in COLUMNS)])
        yield from _table(rows)
        yield from _notes(first["settings"])
        yield f"\n![Engines in the class {name}](performance/peers-{name}.svg)\n"
        yield from _phases(workloads)
    for who, why in measured["faults"].items():
        yield f"- {who}: failed ({why})."
    for who, why in measured["absent"].items():
        yield f"- {who}: took no part ({why})."


def _notes(settings: Result) -> Iterator[str]:
    """What Hardpoint said of the kernels it ran."""
    if notes := settings.get("notes"):
        yield ""
        yield from (f"- hardpoint: {note}" for note in notes)


def _phases(workloads: Result) -> Iterator[str]:
    """Of our start, where it was measured."""
    phases = workloads.get("startup", {}).get("phases", {})
    if phases:
        yield "Hardpoint's start, seconds by phase ([what they are](operate/benchmarks.md#starts)):\n"
        yield from _table([list(phases), [number(one["median"]) for one in phases.values()]])
        yield ""


def _named(facts: Result) -> str:
    return f"{facts['precision']} (version {facts['version']})"


def _ratio(workloads: Result, workload: str, figure: str) -> str:
    report = workloads.get(workload)
    best = best_ratio(report, figure) if report else None
    return "–" if best is None else f"{best[1]:.2f} ({best[0]})"


def _fraction(workloads: Result, workload: str, figure: str) -> str:
    found = workloads.get(workload, {}).get("fractions", {}).get(figure)
    return "–" if found is None else f"{found:.0%}"


def _targets(result: Result) -> Iterator[str]:
    yield _RATIOS
    rows = [["class", "workload", "target", "reached", "held against", ""]]
    measured = {(row["class"], row["workload"], row["target"]): row for row in result.get("targets", ())}
    for target in TARGETS:
        key = (target.precision, target.workload, target.text)
        row = measured.get(key)
        reached = number(None if row is None else row["reached"])
        word = "not measured" if row is None else verdict_word(row)
        rows.append([*key, reached, (row or {}).get("rival") or "–", f"**{word}**" if word == "missed" else word])
    yield from _table(rows)


def _roofline(result: Result) -> Iterator[str]:
    peaks = ", ".join(text.format(result["roofline"][name] / 1e9) for name, text in _PEAKS)
    yield _ROOFLINE.format(peaks=peaks)
    rows = [["class", "workload", "figure", "reached", "limit", "fraction"]]
    for name, measured in result["classes"].items():
        for workload, report in measured["workloads"].items():
            figures = [figure for one, figure, _ in COLUMNS if one == workload and figure in report["fractions"]]
            for figure in figures:
                numbers = (report["figures"][figure]["median"], report["limits"][figure])
                fraction = f"{report['fractions'][figure]:.0%}"
                rows.append([name, workload, figure, *map(number, numbers), fraction])
    yield from _table(rows)


def _scaling(found: Result) -> Iterator[str]:
    yield f"Hardpoint alone, {found['precision']}; medians of {found['repeats']}.\n"
    for name, size, heading, text in _SWEEPS:
        yield f"{text.format(**found)}\n"
        rows = [
            [heading, "step ms", "decode tok/s of one sequence", "output tok/s", "prompt tok/s until the first token"]
        ]
        for row in found[name]:
            batch = row.get("num_requests", 1)
            prompt = row.get("prompt_length", found["batch_prompt_len"])
            numbers = [
                row["step_s"]["median"] * 1e3, row["decode_tokens_per_s"]["median"],
                row["output_tokens_per_s"]["median"], batch * prompt / row["ttft_s"]["median"],
            ]  # fmt: skip
            rows.append([f"{row[size]:,}", *map(number, numbers)])
        yield from _table(rows)
        yield f"\n![Speed by {name}](performance/scaling-{name}.svg)\n"
    yield "With fewer threads; one request, and several together.\n"
    rows = [["threads", "one: decode tok/s", f"{found['threads'][0]['batch']['num_requests']} together: output tok/s"]]
    for row in found["threads"]:
        rates = (row["single"]["decode_tokens_per_s"]["median"], row["batch"]["output_tokens_per_s"]["median"])
        rows.append([str(row["threads"]), *map(number, rates)])
    yield from _table(rows)
    yield "\n![Speed by threads](performance/scaling-threads.svg)"


def _profiles(found: Result) -> Iterator[str]:
    yield _SAMPLED
    profiles = found["profiles"]
    groups = dict.fromkeys(group for profile in profiles.values() for group in profile["groups"])
    rows = [["", *profiles]]
    for group in groups:
        shares = [profile["groups"].get(group, 0.0) for profile in profiles.values()]
        if any(shares):
            rows.append([group, *(f"{share:.1%}" for share in shares)])
    rows.append(["**outside kernels and layers**", *(f"{1 - profile['kernels']:.1%}" for profile in profiles.values())])
    yield from _table(rows)

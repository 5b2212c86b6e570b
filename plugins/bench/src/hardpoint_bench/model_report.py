"""What a workload on a model gave: one object for machines, a table for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hardpoint_bench.contest import Contest, Entrant
from hardpoint_bench.machine import describe_machine
from hardpoint_bench.measure import condensed

__all__ = ["aligned", "number", "ratios", "report_of", "table"]

_IN_SETTINGS = ("dtype", "quantization", "precision", "notes", "ranks")
_PER_SECOND = "_per_s"
_NO_CONTEST = ("cached_tokens",)
_PHASES = ("interpreter", "imports", "torch_import", "plugins", "weights", "warm_up", "first_token")


def report_of(contest: Contest, model: str, settings: Mapping[str, Any], *, starts: bool) -> dict[str, Any]:
    """Plain data. ``phases`` (of a start) and figures are medians with their range over the repeats."""
    ours, *peers = contest.entrants
    return {
        "workload": contest.workload.name,
        "model": model,
        "settings": {**settings, **{name: ours.facts[name] for name in _IN_SETTINGS}},
        "machine": {**describe_machine(), "threads": ours.facts["threads"]},
        **_side(ours, starts=starts),
        "peers": {
            peer.program.name: {
                "python": peer.program.python,
                **{name: fact for name, fact in peer.facts.items() if name not in ("vocab_size", "max_model_len")},
                "model": peer.job["model"],
                **_side(peer, starts=starts),
            }
            for peer in peers
        },
        "ratios": {peer.program.name: ratios(ours.each(starts=starts), peer.each(starts=starts)) for peer in peers},
    }


def _side(entrant: Entrant, *, starts: bool) -> dict[str, Any]:
    figures = {name: asdict(figure) for name, figure in entrant.figures(starts=starts).items()}
    phases = {name: asdict(figure) for name, figure in entrant.phases().items()} if starts else {}
    return {"figures": figures, "phases": phases}


def ratios(ours: Sequence[Mapping[str, float]], theirs: Sequence[Mapping[str, float]]) -> dict[str, dict[str, float]]:
    """How many times better we are, run by run: rates ours by theirs, seconds and memory theirs by ours."""
    pairs = [
        {
            name: (ours_[name] / theirs_[name] if name.endswith(_PER_SECOND) else theirs_[name] / ours_[name])
            for name in ours_
            if name in theirs_ and name not in _NO_CONTEST and ours_[name] and theirs_[name]
        }
        for ours_, theirs_ in zip(ours, theirs, strict=True)
    ]
    return {name: asdict(figure) for name, figure in condensed(pairs).items()}


def table(report: Mapping[str, Any]) -> str:
    """A line per figure, a column per side, a ratio per peer."""
    settings, machine = report["settings"], report["machine"]
    shape = f"{settings['batch']} x ({settings['prompt_len']} -> {settings['output_len']})"
    shared = f", {settings['shared_prefix']} shared" if settings["shared_prefix"] else ""
    lines = [
        f"{report['model']}, {report['workload']}: {shape} tokens{shared}",
        f"{machine['cpu']}, {machine['cores']} cores, {machine['threads']} threads, torch {machine['torch']}",
        f"median [min-max] of {settings['repeats']}" + ("; ratios above 1: we are ahead" if report["peers"] else ""),
        "",
    ]
    sides = {"hardpoint": report, **report["peers"]}
    lines[2:2] = [f"{name}: {side['precision']}" for name, side in {"hardpoint": settings, **report["peers"]}.items()]
    lines[3:3] = [f"hardpoint: {note}" for note in settings["notes"]]
    rows = [["", *sides, *(f"x {name}" for name in report["peers"])]] if report["peers"] else []
    for section in ("figures", "phases"):
        if any(side[section] for side in sides.values()):
            rows += [[""]] if section == "phases" else []
            rows += _rows(section, sides, report["ratios"])
    return "\n".join([*lines, *aligned(rows)])


def _rows(section: str, sides: Mapping[str, Any], by_peer: Mapping[str, Any]) -> list[list[str]]:
    """Phases are compared with nobody's: each side has its own."""
    names = list(dict.fromkeys(name for side in sides.values() for name in side[section]))
    if section == "phases":
        names.sort(key=_PHASES.index)
    compared = by_peer.values() if section == "figures" else ()
    return [
        [
            name if section == "figures" else f"{name} (s)",
            *(_shown(side[section].get(name)) for side in sides.values()),
            *(_shown(found.get(name)) for found in compared),
        ]
        for name in names
    ]


def _shown(figure: Mapping[str, float] | None) -> str:
    return "-" if figure is None else f"{number(figure['median'])} [{number(figure['low'])}-{number(figure['high'])}]"


def number(value: float | None) -> str:
    """Three digits that count, never an exponent for what people measure."""
    if value is None:
        return "–"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """Lines with the cells of ``rows`` in columns."""
    rows = list(rows)
    widths = [max((len(row[at]) for row in rows if at < len(row)), default=0) for at in range(max(map(len, rows)))]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)).rstrip() for row in rows]

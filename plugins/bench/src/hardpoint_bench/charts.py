"""Pictures of the page on performance, as SVG files that differ only where figures do."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardpoint.errors import ConfigError
from hardpoint_bench.suite_report import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = ["draw_charts"]

_OURS, _THEIRS = "#c0392b", "#7f8c8d"
_FEWER_IS_BETTER = "lower is better"


def draw_charts(result: Mapping[str, Any], folder: Path) -> None:
    """One picture per class with figures, three of the scaling study. Raises ``ConfigError`` where they cannot be."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"charts need matplotlib ({error}); install it, or hardpoint-bench anew") from None
    # Ids and texts that are the same each time.
    with matplotlib.rc_context({"svg.hashsalt": "hardpoint", "svg.fonttype": "none"}):
        for name, measured in result.get("classes", {}).items():
            if measured["workloads"]:
                _save(_peers(measured["workloads"]), folder / f"peers-{name}.svg")
        if (found := result.get("scaling")) is not None:
            _save(_sweep(found["batch"], "num_requests", "requests together"), folder / "scaling-batch.svg")
            _save(_sweep(found["context"], "prompt_length", "tokens of the prompt"), folder / "scaling-context.svg")
            _save(_threads(found["threads"]), folder / "scaling-threads.svg")


def _figure(width: float, height: float) -> Figure:
    from matplotlib.figure import Figure

    return Figure(figsize=(width, height), layout="constrained")


def _save(figure: Figure, path: Path) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, format="svg", metadata={"Date": None, "Creator": None})
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error.strerror}") from None


def _peers(workloads: Mapping[str, Any]) -> Figure:
    """A panel per figure, a bar per side with a line from its smallest to its largest value."""
    columns = [column for column in COLUMNS if column[0] in workloads]
    figure = _figure(2.4 * len(columns), 2.6)
    for place, (workload, name, heading) in zip(
        figure.subplots(1, len(columns), squeeze=False)[0], columns, strict=True
    ):
        report = workloads[workload]
        sides = {"hardpoint": report, **report["peers"]}
        found = {side: one["figures"][name] for side, one in sides.items() if name in one["figures"]}
        medians = [one["median"] for one in found.values()]
        reach = [
            [one["median"] - one["low"] for one in found.values()],
            [one["high"] - one["median"] for one in found.values()],
        ]
        colors = [_OURS if side == "hardpoint" else _THEIRS for side in found]
        place.bar(range(len(found)), medians, color=colors, yerr=reach, capsize=2)
        place.set_xticks(range(len(found)), list(found), rotation=60, ha="right", fontsize=7)
        place.tick_params(axis="y", labelsize=7)
        place.set_title(heading if name.endswith("_per_s") else f"{heading} ({_FEWER_IS_BETTER})", fontsize=8)
    return figure


def _sweep(rows: list[Mapping[str, Any]], size: str, label: str) -> Figure:
    """Rates on the left, the time of a step on the right."""
    figure = _figure(8, 3)
    rates, steps = figure.subplots(1, 2)
    sizes = [row[size] for row in rows]
    _line(rates, sizes, [row["output_tokens_per_s"]["median"] for row in rows], "output")
    if size == "prompt_length":
        reading = [row[size] / row["ttft_s"]["median"] for row in rows]
        _line(rates, sizes, reading, "prompt, until the first token")
    _line(steps, sizes, [row["step_s"]["median"] * 1e3 for row in rows], "step")
    rates.set_ylabel("tokens per second")
    steps.set_ylabel("milliseconds of a step")
    for place in (rates, steps):
        place.set_xscale("log", base=2)
        place.set_xlabel(label)
        place.set_ylim(bottom=0)
    rates.legend(fontsize=7)
    return figure


def _threads(rows: list[Mapping[str, Any]]) -> Figure:
    figure = _figure(4, 3)
    place = figure.subplots()
    counts = [row["threads"] for row in rows]
    _line(place, counts, [row["single"]["decode_tokens_per_s"]["median"] for row in rows], "one request, decode")
    _line(place, counts, [row["batch"]["output_tokens_per_s"]["median"] for row in rows], "several, output")
    place.set_xlabel("threads")
    place.set_ylabel("tokens per second")
    place.set_xticks(counts)
    place.set_ylim(bottom=0)
    place.legend(fontsize=7)
    return figure


def _line(place: Axes, across: list[int], up: list[float], label: str) -> None:
    place.plot(across, up, marker="o", markersize=3, linewidth=1.2, label=label)
    place.grid(visible=True, alpha=0.3)

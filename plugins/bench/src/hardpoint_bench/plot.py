"""Draws replays: requests waiting, requests running and blocks in use over simulated time."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from pathlib import Path

from hardpoint.errors import ConfigError
from hardpoint_bench.outcome import Outcome
from hardpoint_bench.tallies import Timeline

__all__ = ["check_plot", "draw"]

_STYLES = ("-", "--", ":", "-.")
"""Lines that coincide can be told apart."""
_INTERVALS = 300
"""Most intervals of a line: more are narrower than the line, and only make the file large."""
_FORMATS = (".png", ".svg")
_TITLES = {"waiting": "requests waiting", "running": "requests running", "blocks_in_use": "KV blocks in use"}


def check_plot(path: str) -> None:
    """Raises ``ConfigError`` for a file that :func:`draw` could not write, before a long run is in vain."""
    target = Path(path)
    if target.suffix.lower() not in _FORMATS:
        raise ConfigError(f"--plot {path!r} must end with {' or '.join(_FORMATS)}")
    if not target.parent.is_dir():
        raise ConfigError(f"--plot {path!r}: the folder {str(target.parent)!r} does not exist")
    if target.is_dir():
        raise ConfigError(f"--plot {path!r} is a folder; name a file")
    try:
        import matplotlib as matplotlib
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}); install it, or hardpoint-bench anew") from None


def draw(path: str, outcomes: Mapping[str, Outcome]) -> None:
    """One row per series, one line per outcome: its mean over each interval, and its peaks in a lighter tone."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 8), layout="constrained")
    axes = figure.subplots(len(_TITLES), 1, sharex=True)
    for place, (name, title) in zip(axes, _TITLES.items(), strict=True):
        for (label, outcome), dashes in zip(outcomes.items(), cycle(_STYLES)):
            line: Timeline = outcome.timeline
            edges, means, peaks = line.edges(_INTERVALS), line.means(name, _INTERVALS), line.peaks(name, _INTERVALS)
            (drawn,) = place.step(edges, [*means, means[-1]], dashes, where="post", linewidth=1.2, label=label)
            place.stairs(peaks, edges, fill=True, alpha=0.15, color=drawn.get_color())
        place.set_ylabel(title)
        place.set_ylim(bottom=0)
        place.grid(visible=True, alpha=0.3)
    axes[0].legend(loc="upper right")
    axes[-1].set_xlabel("simulated time (s)")
    try:
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"--plot {path!r} cannot be written: {error.strerror}") from None

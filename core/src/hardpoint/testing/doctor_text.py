"""The doctor's report as text for people."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from hardpoint.plugins.suggest import plain
from hardpoint.testing.doctor import DoctorReport, PluginReport

Paint = Callable[[str, str], str]
_COLORS = {"active": "32", "created": "32", "loaded": "32", "available": "36", "allowed": "36", "discovered": "2"}
_COLORS |= {"refused": "33", "warning": "33", "failed": "31", "problem": "31", "title": "1"}
_PLAIN_REASONS = ("installed", "installed; imported only when asked for")


def painter(color: bool) -> Paint:
    """Gives a text the color of its role: a state, ``warning``, ``problem`` or ``title``."""
    return lambda text, role: f"\x1b[{_COLORS[role]}m{text}\x1b[0m" if color else text


def render(report: DoctorReport, *, color: bool = False, verbose: bool = True, kind: str | None = None) -> str:
    """A line per plugin under its kind (or of one ``kind``), then warnings and problems.

    ``verbose`` adds paths, ranges, manifests and capabilities; plugins at fault get them anyway.
    """
    return "\n".join(_lines(report, painter(color), verbose, kind))


def _lines(report: DoctorReport, paint: Paint, verbose: bool, only: str | None) -> Iterator[str]:
    yield f"hardpoint {report.core_version}, {report.num_distributions} distributions scanned"
    yield from (f"environment: {name}={plain(value)}" for name, value in report.environment.items())
    for kind in report.kinds:
        # Kits concern authors only. The fault of one is among the warnings or problems anyway.
        if only != kind.kind if only else not kind.plugins or (kind.kind == "conformance" and not verbose):
            continue
        yield f"{paint(kind.kind, 'title')}  ({kind.cardinality}, in {'+'.join(kind.roles)})" + (
            "" if kind.plugins else ": none installed"
        )
        for row in kind.plugins:
            branch, stem = ("└─", "   ") if row is kind.plugins[-1] else ("├─", "│  ")
            source = plain(f"{row.plugin.name}  {row.plugin.distribution} {row.plugin.version}")
            reason = "" if row.reason in _PLAIN_REASONS and not verbose else f": {plain(row.reason)}"
            answer = f"  [{row.probe.status}: {plain(row.probe.reason)}]" if row.probe else ""
            state = row.probe.status if row.probe and row.state == "available" else row.state
            yield f"{branch} {source}  {paint(state, row.state)}{reason}{answer}"
            yield from (f"{stem} {paint('fault', 'problem')}: {plain(fault)}" for fault in row.faults)
            if verbose or row.faults:
                yield from (f"{stem} {plain(detail)}" for detail in _details(row))
    for title, texts in (("warning", report.warnings), ("problem", report.problems)):
        yield from (f"{paint(title, title)}: {plain(text)}" for text in texts)


def _details(row: PluginReport) -> Iterator[str]:
    plugin = row.plugin
    yield f"{plugin.entry_point}, API v{plugin.api_version}, {plugin.path}"
    yield f"requires {', '.join(plugin.requires) or 'no particular core version'}"
    if not row.has_manifest:
        yield "no manifest: its options are checked only where it loads"
    if row.required_tasks:
        yield f"serves the tasks {', '.join(row.required_tasks)}"
    if row.capabilities:
        yield f"declares {', '.join(f'{name}={value}' for name, value in sorted(row.capabilities.items()))}"
    if row.options:
        yield f"options set: {', '.join(row.options)}"

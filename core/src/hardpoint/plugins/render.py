"""The doctor's report as text for people."""

from __future__ import annotations

from collections.abc import Iterator

from hardpoint.plugins.doctor import DoctorReport, PluginReport

__all__ = ["render"]

_COLORS = {"active": "32", "available": "36", "refused": "33", "problem": "31", "warning": "33", "title": "1"}


def render(report: DoctorReport, *, color: bool = False, verbose: bool = True) -> str:
    """A tree per kind that has plugins, then warnings and problems. ``verbose`` adds paths, ranges and manifests."""
    return "\n".join(_lines(report, color, verbose))


def _lines(report: DoctorReport, color: bool, verbose: bool) -> Iterator[str]:
    def paint(text: str, role: str) -> str:
        return f"\x1b[{_COLORS[role]}m{text}\x1b[0m" if color else text

    yield f"hardpoint {report.core_version}, {report.num_distributions} distributions scanned"
    for kind in report.kinds:
        if not kind.plugins:
            continue
        yield f"{paint(kind.kind, 'title')}  ({kind.cardinality}, in {'+'.join(kind.roles)})"
        for row in kind.plugins:
            branch, stem = ("└─", "   ") if row is kind.plugins[-1] else ("├─", "│  ")
            source = f"{row.plugin.distribution} {row.plugin.version}"
            yield f"{branch} {row.plugin.name}  {source}  {paint(row.state, row.state)}: {row.reason}"
            if verbose:
                yield from (f"{stem} {detail}" for detail in _details(row))
    for title, texts in (("warning", report.warnings), ("problem", report.problems)):
        yield from (f"{paint(title, title)}: {text}" for text in texts)
    if verbose and not report.problems:
        yield "no problems found (only platforms were imported and asked)"


def _details(row: PluginReport) -> Iterator[str]:
    plugin = row.plugin
    yield f"{plugin.entry_point}, API v{plugin.api_version}, {plugin.path}"
    yield f"requires {', '.join(plugin.requires) or 'no particular core version'}"
    if not row.has_manifest:
        yield "no manifest: its options are checked only where it loads"
    if row.options:
        yield f"options set: {', '.join(row.options)}"
    if row.probe is not None:
        yield f"probe: {row.probe.status}, {row.probe.reason}"

"""Keeps what came of comparisons in ``models.json``, from which ``hardpoint models`` knows it without importing."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from hardpoint.testing.model_facts import Comparison, ModelFacts, facts_text, read_facts
from hardpoint_testing_torch.parity_report import ModeResult, ParityReport, Verdict

__all__ = ["cell_of", "record", "with_report"]


def cell_of(result: ModeResult) -> str:
    """The verdict with the power of ten that the error stays below, such as ``ok 1e-5``."""
    return str(result.verdict) if result.magnitude is None else f"{result.verdict} 1e{result.magnitude}"


def with_report(facts: ModelFacts, report: ParityReport) -> ModelFacts:
    """``facts`` with ``report`` in place of what was known of the same configuration."""
    made = Comparison(report.name, {result.mode: cell_of(result) for result in report.results})
    others = [one for one in facts.comparisons if one.configuration != report.name]
    not_run = {why: list(modes) for why, modes in facts.not_run.items()}
    for result in report.results:
        if result.verdict is Verdict.NOT_RUN:
            told = not_run.setdefault(result.note, [])
            told += [result.mode] if result.mode not in told else []
    comparisons = (*others, made)
    absent = {mode for one in comparisons for mode, cell in one.modes.items() if cell == Verdict.NOT_RUN}
    kept = {why: tuple(mode for mode in modes if mode in absent) for why, modes in not_run.items()}
    reasons = {why: modes for why, modes in kept.items() if modes}
    return msgspec.structs.replace(facts, comparisons=comparisons, not_run=reasons)


def record(path: Path, report: ParityReport) -> None:
    """Add ``report`` to the file, or begin it. Raises ``PluginError`` for one that cannot be understood."""
    known: Mapping[str, ModelFacts] = read_facts(path).architectures if path.exists() else {}
    mine = with_report(known.get(report.architecture, ModelFacts()), report)
    path.write_text(facts_text({**known, report.architecture: mine}), encoding="utf-8")

"""The table of ``docs/models.md``: every architecture is on it, and a run now comes to the same verdicts."""

from __future__ import annotations

import ast
import math

import pytest

from generate_models_table import (
    PAGE,
    REAL_WEIGHTS,
    Cell,
    differences,
    model_architectures,
    page,
    read_page,
    rows_of,
    run_cases,
)
from hardpoint_testing_torch import MODES, ModeResult, ParityReport, Verdict
from model_cases import CASES
from workspace import ROOT


def test_each_mode_on_the_page_is_within_its_limit() -> None:
    rows = read_page()
    over = [(key, mode) for key, cells in rows.items() for mode, cell in cells.items() if cell.verdict is Verdict.OVER]
    assert over == []


def test_tests_with_real_weights_exist() -> None:
    for one in REAL_WEIGHTS:
        path, _, name = one.test.partition("::")
        tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
        assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


@pytest.mark.slow
def test_every_architecture_has_its_rows() -> None:
    """In the slow tier, so that an architecture may land a commit before its rows, which take minutes to compute."""
    assert list(read_page()) == [(case.architecture, case.name) for case in CASES]
    assert sorted({case.architecture for case in CASES}) == model_architectures()
    text = PAGE.read_text(encoding="utf-8")
    assert [one.model for one in REAL_WEIGHTS if one.test not in text or one.claim not in text] == []


ON_TWO_WORKERS = ("LlamaForCausalLM", "DeepseekV3ForCausalLM")
"""Starting workers takes longer than all the rest, so the others are divided only when the page is written."""
MODES_OF_FIRST = ("prefill", "decode", "prefix", "preempt")
"""Batches and chunks come with preemption; the page is written from all modes."""
FIRST_OF_EACH = {case.architecture: case for case in reversed(CASES)}


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("architecture", FIRST_OF_EACH)
def test_a_run_now_comes_to_the_same(architecture: str) -> None:
    """The modes of each architecture that find most; of its other configurations the one that computes all of it."""
    first = FIRST_OF_EACH[architecture]
    reports = run_cases([first], MODES_OF_FIRST)
    if architecture in ON_TWO_WORKERS:
        reports += run_cases([first], ["tp2"])
    others = [case for case in CASES if case.architecture == architecture and case is not first]
    reports += run_cases(others, ["preempt"])
    assert [str(report) for report in reports if report.faults] == []
    advice = "run: python tests/support/generate_models_table.py --write"
    assert [line for line in differences(reports) if line.startswith(f"{architecture} ")] == [], advice


def test_the_page_has_no_row_without_a_case() -> None:
    assert read_page().keys() - {(case.architecture, case.name) for case in CASES} == set()


def report(**errors: float | None) -> ParityReport:
    results = [ModeResult(mode, errors.get(mode), note="" if mode in errors else "for no reason") for mode in MODES]
    return ParityReport("GhostForCausalLM", "plain", tuple(results))


def test_a_page_reads_as_it_was_written(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    made = report(prefill=3e-6, chunk=2.0, decode=0.0, batch=math.inf, bfloat16=0.02)
    path = ROOT.__class__(str(tmp_path)) / "page.md"
    path.write_text(page([made]), encoding="utf-8")
    monkeypatch.setattr("models_page.PAGE", path)
    assert read_page() == rows_of([made])
    assert differences([made]) == []
    assert "- prefix, preempt, TP2 of GhostForCausalLM: for no reason" in path.read_text(encoding="utf-8")
    assert differences([report(prefill=3e-5, chunk=2.0, decode=0.0, batch=math.inf, bfloat16=0.02)]) == []
    changed = report(prefill=3e-4, chunk=2.0, decode=1.0, batch=math.inf, bfloat16=0.02, tp2=1e-6)
    assert [line.split(":")[0] for line in differences([changed])] == [
        "GhostForCausalLM plain, decode",
        "GhostForCausalLM plain, prefill",
        "GhostForCausalLM plain, tp2",
    ]
    assert differences([]) == ["GhostForCausalLM plain: on the page, but no such case"]


@pytest.mark.parametrize("text", ["", "OK 1e-5", "ok 1e", "over", "ok 3e-5 ", "- 1e-5"])
def test_a_cell_that_nobody_wrote_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is not understood"):
        Cell.parse(text)

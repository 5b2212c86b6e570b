"""Architectures that the model plugin ``transformers`` runs in the engine: what its page says, and a run now."""

from __future__ import annotations

import pytest

from fallback_survey import PAGE, survey, survey_text, with_survey
from generate_models_table import run_cases
from hardpoint_testing_torch import ParityCase, Verdict
from model_cases_fallback import FALLBACK_CASES
from models_page import read_page

MODES = ("prefill", "decode", "prefix", "preempt")
"""Batches and chunks come with preemption; the page was written from all modes."""
ON_TWO_WORKERS = ("CohereForCausalLM", "Glm4ForCausalLM", "OlmoeForCausalLM")
"""One whose heads are divided, one that gathers what the plan divides, and one whose experts are divided each."""


def test_the_page_has_a_row_for_each_case() -> None:
    assert list(read_page(PAGE)) == [(case.architecture, case.name) for case in FALLBACK_CASES]


def test_each_mode_on_the_page_is_within_its_limit() -> None:
    cells = [cell for row in read_page(PAGE).values() for cell in row.values()]
    assert {cell.verdict for cell in cells} <= {Verdict.OK, Verdict.NOT_RUN}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_page_says_what_becomes_of_every_causal_architecture() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert with_survey(page, survey_text(survey())) == page


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("case", FALLBACK_CASES, ids=lambda case: f"{case.architecture}, {case.name}")
def test_a_run_now_comes_to_the_same(case: ParityCase) -> None:
    is_divided = case.architecture in ON_TWO_WORKERS and case.name == "plain"
    (report,) = run_cases([case], (*MODES, "tp2") if is_divided else MODES)
    assert list(report.faults) == []
    written = read_page(PAGE)[case.architecture, case.name]
    assert [result.mode for result in report.results if result.verdict is not written[result.mode].verdict] == []

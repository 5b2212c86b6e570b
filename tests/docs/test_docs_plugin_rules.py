"""The table of plugin rules: every rule has a test, and every number that a test cites is in the table."""

from __future__ import annotations

import re

import pytest

import plugin_rules
from plugin_rules import LESSONS, RULES, citations, statements, uncited
from workspace import ROOT

NUMBERS = {"R12": 55, "P12": 12, "I12": 7, "L12": 26}
"""How many requirements, pitfalls, invariants and lessons there are."""


def test_every_number_has_a_row() -> None:
    expected = [f"{letter}.{number}" for letter, count in NUMBERS.items() for number in range(1, count + 1)]
    assert list(statements()) == expected
    assert len(LESSONS) == NUMBERS["L12"]
    assert len({*statements().values()}) == len(statements()), "two rows say the same"


def test_every_rule_is_cited() -> None:
    assert uncited() == []


def test_every_citation_is_of_a_rule() -> None:
    """Wherever in a test or a kit it stands: in comments and classes as well."""
    assert set(citations()) - set(statements()) == set()
    anywhere = {rule for path in plugin_rules.files() for rule in plugin_rules.cited(path.read_text(encoding="utf-8"))}
    assert anywhere - set(statements()) == set()


@pytest.mark.parametrize("rule", statements())
def test_what_is_shown_exists(rule: str) -> None:
    """Found again in another way than the table was made."""
    for test in citations()[rule]:
        path, _, name = test.partition("::")
        source = (ROOT / path).read_text(encoding="utf-8")
        assert re.search(rf"\b{re.escape(rule)}\b", source)
        assert not name or re.search(rf"^ *(async )?def {name}\(", source, re.MULTILINE)


def test_rows_of_amended_rules_say_so() -> None:
    """Exactly the rules that the deviations name are marked as amended."""
    text = (ROOT / "docs/deviations.md").read_text(encoding="utf-8")
    named = {rule for cell in re.findall(r"^\| (.*?) \|", text, re.MULTILINE) for rule in _rules_in(cell)}
    amended = {rule for rule, row in RULES.items() if "amended" in row}
    assert amended - named == set(), "an amended rule is missing among the deviations"
    assert {rule for rule in named if rule in RULES} - amended == set(), "a deviation is not marked in the table"


def _rules_in(cell: str) -> list[str]:
    return re.findall(r"[RPI]12\.\d+", cell)


SAMPLE = "R12.15 and R12.1, not R12 or XR12.3, R10.1 as little; P12.2."


def test_only_whole_numbers_of_this_specification_count() -> None:
    assert plugin_rules.cited(SAMPLE) == [f"P{12}.2", f"R{12}.1", f"R{12}.15"]

"""The tables of rules: every rule has a test, and every number that a test cites is in its table."""

from __future__ import annotations

import re

import pytest

import attention_rules
import plugin_rules
import runner_rules
import scheduling_rules
from plugin_rules import LESSONS, RULES
from rule_book import RuleBook, cited, files
from workspace import ROOT

BOOKS = {
    "plugins": plugin_rules.BOOK,
    "scheduling": scheduling_rules.BOOK,
    "runner": runner_rules.BOOK,
    "attention": attention_rules.BOOK,
}
PLUGIN_NUMBERS = {"R12": 55, "P12": 12, "I12": 7, "L12": 26}
"""How many requirements, pitfalls, invariants and lessons there are."""
SCHEDULING_NUMBERS = {
    "R1": [range(1, 15), range(20, 37), range(40, 50), range(60, 68)],
    "P1": [range(1, 7)],
    "I1": [range(1, 9)],
    "R3": [
        *(range(1, 6), range(10, 23), range(30, 34), range(40, 53), range(60, 69), range(70, 82), range(85, 88)),
        *(range(90, 94), range(95, 98)),
    ],
    "P3": [range(1, 13)],
    "I3": [range(1, 9)],
    "R11": [range(1, 25)],
    "P11": [range(1, 7), range(14, 15)],
    "I11": [range(1, 6)],
}
RUNNER_NUMBERS = {
    "R4": [*(range(1, 13), range(20, 23), range(30, 39), range(40, 47), range(50, 56), range(60, 69), range(70, 74))],
    "P4": [range(1, 14)],
    "I4": [range(1, 8)],
}
ATTENTION_NUMBERS = {
    "R5": [
        *(range(1, 6), range(10, 17), range(20, 25), range(30, 39), range(40, 49), range(50, 57), range(60, 62)),
        *(range(70, 73), range(80, 84), range(90, 92)),
    ],
    "P5": [range(1, 11)],
    "I5": [range(1, 6)],
}

each_book = pytest.mark.parametrize("book", BOOKS.values(), ids=BOOKS)


def test_every_number_has_a_row() -> None:
    expected = [f"{letter}.{number}" for letter, count in PLUGIN_NUMBERS.items() for number in range(1, count + 1)]
    assert list(plugin_rules.BOOK.rules) == expected
    assert len(LESSONS) == PLUGIN_NUMBERS["L12"]
    for book, numbers in (
        (scheduling_rules.BOOK, SCHEDULING_NUMBERS),
        (runner_rules.BOOK, RUNNER_NUMBERS),
        (attention_rules.BOOK, ATTENTION_NUMBERS),
    ):
        spans = numbers.items()
        expected = [f"{letter}.{number}" for letter, ranges in spans for span in ranges for number in span]
        assert list(book.rules) == expected


@each_book
def test_every_rule_is_said_once_and_cited(book: RuleBook) -> None:
    assert len({*book.rules.values()}) == len(book.rules), "two rows say the same"
    assert book.uncited() == []


@each_book
def test_every_citation_is_of_a_rule(book: RuleBook) -> None:
    """Wherever in a test or a kit it stands: in comments and classes as well."""
    anywhere = {rule for path in files() for rule in book.cited(path.read_text(encoding="utf-8"))}
    assert anywhere - set(book.rules) == set()


@each_book
def test_what_is_shown_exists(book: RuleBook) -> None:
    """Found again in another way than the table was made."""
    for rule, tests in book.citations().items():
        for test in tests:
            path, _, name = test.partition("::")
            source = (ROOT / path).read_text(encoding="utf-8")
            assert re.search(rf"\b{re.escape(rule)}\b", source)
            assert not name or re.search(rf"^ *(async def|def|class) {name}\(", source, re.MULTILINE)


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
    assert plugin_rules.BOOK.cited(SAMPLE) == [f"P{12}.2", f"R{12}.1", f"R{12}.15"]
    assert f"R{10}.1" in cited(SAMPLE)

"""Links within the repository lead somewhere, headings included, and no page is an island."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from doc_blocks import pages, plain_text
from workspace import ROOT

_LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#{1,6} (.+)$", re.MULTILINE)
_CODE = re.compile(r"`[^`\n]*`")


def anchors(page: Path) -> set[str]:
    """Headings as anchors: lower case, spaces as hyphens, other signs dropped."""
    headings = _HEADING.findall(plain_text(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    found = _LINK.findall(_CODE.sub("", plain_text(page)))
    return [link for link in found if "://" not in link and not link.startswith("mailto:")]


def target_of(page: Path, link: str) -> tuple[Path, str]:
    path, _, anchor = link.partition("#")
    return (page.parent / path).resolve() if path else page, anchor


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page: Path) -> None:
    for link in links(page):
        target, anchor = target_of(page, link)
        assert target.exists(), f"{link}: there is no {target}"
        assert target.is_relative_to(ROOT), f"{link} leaves the repository"
        if anchor:
            assert anchor in anchors(target), f"{link}: no such heading; there are {sorted(anchors(target))}"


def test_every_page_of_the_documentation_can_be_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    waiting = [ROOT / "README.md"]
    while waiting:
        page = waiting.pop()
        if page not in seen:
            seen.add(page)
            targets = [target_of(page, link)[0] for link in links(page)]
            waiting += [target for target in targets if target.suffix == ".md" and target.exists()]
    assert sorted(page for page in pages() if page.is_relative_to(ROOT / "docs") and page not in seen) == []


@pytest.mark.parametrize("page", pages(), ids=lambda page: page.relative_to(ROOT).as_posix())
def test_a_page_has_one_title_and_closed_fences(page: Path) -> None:
    text = plain_text(page)
    assert len(re.findall(r"^# ", text, re.MULTILINE)) == 1
    assert "```" not in text

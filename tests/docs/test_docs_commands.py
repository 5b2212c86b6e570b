"""Each page is followed as a reader would: its files written, its commands run, in order, in one empty folder.

Blocks are marked by their info strings, see ``doc_blocks``. Tutorials have a test of their own, which knows what must
come of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from doc_blocks import Block, blocks_of, pages
from doc_reader import TUTORIALS, Reader, page_id, runs_something, story
from workspace import ROOT

WALKED = [page for page in pages() if runs_something(page, slow=True) and page.stem not in TUTORIALS]


@pytest.fixture
def reader(tmp_path: Path) -> Iterator[Reader]:
    someone = Reader(tmp_path)
    yield someone
    someone.stop()


@pytest.mark.parametrize("page", [page for page in pages() if runs_something(page, slow=False)], ids=page_id)
def test_quick_commands_work(page: Path, reader: Reader) -> None:
    for block in story(page, slow=False):
        reader.follow(block)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", WALKED, ids=page_id)
def test_the_whole_page_works(page: Path, reader: Reader) -> None:
    for block in story(page, slow=True):
        reader.follow(block)


@pytest.mark.parametrize("page", pages(), ids=page_id)
def test_python_blocks_are_python(page: Path) -> None:
    for block in blocks_of(page):
        if block.language == "python":
            compile(block.text, block.where, "exec", dont_inherit=True)


def test_pages_are_found() -> None:
    assert {"README.md", "docs/quickstart.md", "docs/extend/ship-an-endpoint.md"} <= {page_id(page) for page in pages()}
    assert any(runs_something(page, slow=False) for page in pages())
    assert any("server" in block.words for page in pages() for block in blocks_of(page))


def command(text: str) -> Block:
    return Block(ROOT / "README.md", 1, "bash", frozenset({"test"}), None, text)


def test_a_reader_has_an_environment_of_their_own(reader: Reader) -> None:
    """Whatever is installed there reaches nobody else."""
    told = reader.follow(command("command -v hardpoint pip python; python -c 'import sys; print(sys.prefix)'"))
    home = reader.python.parent
    assert told.splitlines() == [*(str(home / name) for name in ("hardpoint", "pip", "python")), str(home.parent)]


def test_a_step_that_fails_is_named_with_what_it_printed(reader: Reader) -> None:
    with pytest.raises(AssertionError, match=r"README.md:1 ended with 3\n(.|\n)*on the way"):
        reader.follow(command("echo on the way\nexit 3\n"))


def test_an_unknown_mark_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("doc_blocks.ROOT", tmp_path)
    page = tmp_path / "page.md"
    page.write_text("```bash tset\necho\n```\n")
    with pytest.raises(ValueError, match=r"page.md:2: the info string 'bash tset' is not understood"):
        blocks_of(page)

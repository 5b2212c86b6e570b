"""Fenced code blocks of the documentation, and what their info strings ask of the tests.

After the language an info string may hold words that readers never see rendered:

``file=PATH``   the block is the content of a file, relative to the reader's working folder
``test``        the block is run (bash or python); ``test slow`` only in the slow tier
``server``      the block starts a server that later blocks of the page talk to; slow tier only
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workspace import ROOT

__all__ = ["Block", "blocks_of", "pages", "plain_text"]

_FENCE = re.compile(r"^```(?P<info>[^\n`]*)\n(?P<text>.*?)^```[ ]*$", re.MULTILINE | re.DOTALL)
_WORDS = frozenset({"test", "slow", "server"})


@dataclass(frozen=True, slots=True)
class Block:
    """One fenced block. ``line`` is the 1-based line of its first line of text."""

    page: Path
    line: int
    language: str
    words: frozenset[str]
    file: str | None
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT).as_posix()}:{self.line}"

    @property
    def is_step(self) -> bool:
        """Whether a reader who follows the page does something with it."""
        return self.file is not None or bool(self.words)

    @property
    def is_slow(self) -> bool:
        return bool(self.words & {"slow", "server"})


def pages() -> list[Path]:
    """Every page written for readers."""
    found = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "changelog.d/README.md"]
    return found + sorted([*ROOT.glob("docs/**/*.md"), *ROOT.glob("examples_plugins/*/README.md")])


@cache
def blocks_of(page: Path) -> tuple[Block, ...]:
    """The page's blocks in order. Raises ``ValueError`` for an info string that cannot be understood."""
    text = page.read_text(encoding="utf-8")
    return tuple(_block(page, text, match) for match in _FENCE.finditer(text))


def _block(page: Path, text: str, match: re.Match[str]) -> Block:
    language, *rest = match["info"].split() or [""]
    files = [word.removeprefix("file=") for word in rest if word.startswith("file=")]
    words = frozenset(word for word in rest if not word.startswith("file="))
    line = text.count("\n", 0, match.start("text")) + 1
    block = Block(page, line, language, words, files[0] if files else None, match["text"])
    if words - _WORDS or len(files) > 1 or ("slow" in words and "test" not in words):
        raise ValueError(f"{block.where}: the info string {match['info']!r} is not understood")
    if words and language not in ("bash", "python"):
        raise ValueError(f"{block.where}: only bash and python can be run, not {language!r}")
    return block


def plain_text(page: Path) -> str:
    """The page without its fenced blocks, which may hold anything."""
    return _FENCE.sub("", page.read_text(encoding="utf-8"))

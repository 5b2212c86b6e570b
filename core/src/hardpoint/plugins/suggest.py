"""What messages need: the nearest known name, and text that no terminal obeys."""

from __future__ import annotations

from collections.abc import Iterable


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the nearest known word, or an empty string."""
    import difflib  # only ever needed on the way to an error

    near = difflib.get_close_matches(word, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


def plain(text: str) -> str:
    """``text`` on one line, without anything that a terminal obeys."""
    return "".join(letter if letter.isprintable() else " " for letter in text)

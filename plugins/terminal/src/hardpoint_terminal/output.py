"""Standard output of the commands: what cannot be written ends them with one line that says why."""

from __future__ import annotations

import contextlib
import os
import sys

from hardpoint.errors import ConfigError

__all__ = ["StandardOutput"]


class StandardOutput:
    """A stream of text that is out when :meth:`write` returns."""

    def __init__(self) -> None:
        """Raises ``ConfigError`` where standard output is closed, before any work is done for it."""
        if sys.stdout is None:
            raise ConfigError("standard output is closed; redirect it to a file, or to /dev/null")

    def line(self, text: str = "") -> None:
        """As :meth:`write`, with the end of a line."""
        self.write(f"{text}\n")

    def write(self, text: str) -> None:
        """Raises ``ConfigError`` where the disk is full, say, or for text that the encoding has no bytes for;
        ``BrokenPipeError`` where the reader has gone."""
        try:
            sys.stdout.write(text)
            sys.stdout.flush()
        except UnicodeEncodeError as error:
            raise ConfigError(
                f"standard output is written in {error.encoding}, which has no {error.object[error.start]!r}; set "
                "PYTHONIOENCODING=utf-8"
            ) from None
        except BrokenPipeError:
            raise
        except OSError as error:
            _drop_the_rest()
            raise ConfigError(f"standard output cannot be written: {error.strerror}; redirect it elsewhere") from None


def _drop_the_rest() -> None:
    """What is left in the buffer would fail again when the interpreter ends."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)

"""Questions that only a process of its own may answer: plugins that import frameworks, or that crash."""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Callable

from hardpoint.process import describe_exit, spawn

__all__ = ["answer_on", "ask_child"]


def ask_child(entry: str, payload: Callable[[int], bytes], *, name: str, timeout_s: float) -> tuple[bytes, str]:
    """What the child wrote, and how it ended, as the rest of a sentence that begins with it.

    ``entry`` gets ``payload(descriptor)``, of the descriptor that it is to answer on. It ends when it has written
    nothing for ``timeout_s`` seconds.
    """
    reading, writing = os.pipe()
    try:
        child = spawn(entry, payload(writing), name=name, pass_fds=(writing,))
    except BaseException:
        os.close(reading)
        raise
    finally:
        os.close(writing)
    try:
        data, is_late = _read_all(reading, timeout_s)
        code = None if is_late else child.wait(timeout_s)
    finally:
        os.close(reading)
        child.close()
    crash = f"the process that asked it ended with {describe_exit(code or 0)}"
    return data, f"it gave no answer for {timeout_s:g} s" if code is None else crash


def answer_on(descriptor: int) -> Callable[[bytes], None]:
    """For the child: what writes answers. Whatever plugins print goes to standard error instead."""
    os.set_inheritable(descriptor, False)
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())

    def write(data: bytes) -> None:
        while data:
            data = data[os.write(descriptor, data) :]

    return write


def _read_all(descriptor: int, timeout_s: float) -> tuple[bytes, bool]:
    """Everything until the other end closes, and whether nothing came for ``timeout_s`` seconds before that."""
    data = b""
    deadline = time.monotonic() + timeout_s
    with selectors.DefaultSelector() as selector:
        selector.register(descriptor, selectors.EVENT_READ)
        while True:
            if not selector.select(max(0.0, deadline - time.monotonic())):
                return data, True
            part = os.read(descriptor, 1 << 16)
            if not part:
                return data, False
            data += part
            deadline = time.monotonic() + timeout_s

"""Entries that the process tests start in children."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import msgspec

from hardpoint.process import spawn


def echo(payload: bytes) -> int:
    """Write what the child sees to the file named in the payload, and end with code 7."""
    path, text = msgspec.msgpack.decode(payload, type=tuple[str, str])
    facts = {
        "text": text,
        "argv": sys.argv,
        "optimize": sys.flags.optimize,
        "warnings": sys.warnoptions,
        "path": sys.path,
        "marker": os.environ.get("MARKER", ""),
        "sigint_ignored": signal.getsignal(signal.SIGINT) is signal.SIG_IGN,
        "descriptors": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
        "modules": sorted(sys.modules),
    }
    with open(path, "wb") as file:
        file.write(msgspec.json.encode(facts))
    return 7


def sleep(payload: bytes) -> None:
    time.sleep(60)


def sleep_stubbornly(payload: bytes) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    (descriptor,) = msgspec.msgpack.decode(payload, type=tuple[int])
    os.write(descriptor, b"ready")
    time.sleep(60)


def fail(payload: bytes) -> None:
    raise RuntimeError("as told")


def shout(payload: bytes) -> None:
    """Write one log line."""
    from hardpoint.logging import get_logger

    get_logger("hardpoint_x.part").warning("here I am")


def read_descriptor(payload: bytes) -> int:
    """The number of bytes that come from an inherited descriptor."""
    (descriptor,) = msgspec.msgpack.decode(payload, type=tuple[int])
    return len(os.read(descriptor, 100))


def parent_of_three(payload: bytes) -> None:
    """Start three children, one of which busy-loops and one from another thread; tell their ids, then sleep."""
    import threading

    children = [spawn("process_entries:sleep", b"", name="idle"), spawn("process_entries:spin", b"", name="busy")]
    thread = threading.Thread(target=lambda: children.append(spawn("process_entries:sleep", b"", name="threaded")))
    thread.start()
    thread.join()
    path = msgspec.msgpack.decode(payload, type=str)
    with open(f"{path}.part", "wb") as file:
        file.write(msgspec.json.encode([child.pid for child in children]))
    os.rename(f"{path}.part", path)
    time.sleep(60)


def spin(payload: bytes) -> None:
    while True:
        pass


def with_grandchild(payload: bytes) -> None:
    """Leave a grandchild behind that keeps everything inheritable open."""
    subprocess.Popen([sys.executable, "-c", "import time; time.sleep(5)"], close_fds=False)
    os._exit(4)

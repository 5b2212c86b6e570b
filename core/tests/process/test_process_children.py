"""Child processes: what they receive, how they end, and that nobody is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.errors import ConfigError
from hardpoint.process import ChildProcess, describe_exit, spawn

Start = Callable[..., ChildProcess]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """``start(entry, payload, **options)`` with the entries of this folder importable; nothing outlives the test."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    started: list[ChildProcess] = []

    def create(entry: str, payload: object = b"", **options: Any) -> ChildProcess:
        data = payload if isinstance(payload, bytes) else msgspec.msgpack.encode(payload)
        started.append(spawn(f"process_entries:{entry}", data, name=options.pop("name", entry), **options))
        return started[-1]

    yield create
    for child in started:
        child.close()


def echo(start: Start, path: Path, text: str = "", **options: Any) -> dict[str, Any]:
    child = start("echo", (str(path), text), **options)
    assert child.wait(20) == 7
    facts: dict[str, Any] = msgspec.json.decode(path.read_bytes())
    return facts


def gone(pid: int) -> bool:
    """Not there, or dead and waiting to be collected by whoever adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return True


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.02)


def test_payload_environment_and_search_path_arrive(start: Start, tmp_path: Path) -> None:
    facts = echo(start, tmp_path / "out", "héllo", env={"MARKER": "set"}, name="worker-3")
    assert facts["text"] == "héllo"
    assert facts["marker"] == "set"
    assert facts["path"] == sys.path
    assert facts["sigint_ignored"] is True
    assert facts["argv"][1] == "worker-3"


def test_the_payload_is_never_on_the_command_line(start: Start, tmp_path: Path) -> None:
    """Neither there nor in the environment: both are readable for others."""
    child = start("sleep", b"secret-payload")
    place = Path(f"/proc/{child.pid}")
    wait_until(lambda: b"hardpoint.process" in (place / "cmdline").read_bytes())
    assert b"secret" not in (place / "cmdline").read_bytes() + (place / "environ").read_bytes()


def test_a_large_payload_arrives_whole_and_a_child_that_never_reads_it_blocks_nobody(
    start: Start, tmp_path: Path
) -> None:
    assert len(echo(start, tmp_path / "out", "x" * 3_000_000)["text"]) == 3_000_000
    assert start("fail", b"x" * 3_000_000).wait(20) == 1


@pytest.mark.parametrize("flags", [[], ["-O"], ["-OO", "-W", "ignore::UserWarning"]])
def test_interpreter_flags_are_inherited(flags: list[str], tmp_path: Path) -> None:
    source = (
        "import sys, msgspec; sys.path.insert(0, sys.argv[1])\n"
        "from hardpoint.process import spawn\n"
        "spawn('process_entries:echo', msgspec.msgpack.encode((sys.argv[2], '')), name='child').wait(20)\n"
    )
    out = tmp_path / "out"
    subprocess.run([sys.executable, *flags, "-c", source, str(Path(__file__).parent), str(out)], check=True, timeout=30)
    facts = msgspec.json.decode(out.read_bytes())
    assert facts["optimize"] == "".join(flags).count("O")
    assert facts["warnings"] == [flag for flag in flags if "::" in flag]


def test_a_working_directory_with_a_foreign_module_is_not_searched(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "msgspec.py").write_text("raise SystemExit(99)")
    monkeypatch.chdir(tmp_path)
    assert echo(start, tmp_path / "out")["text"] == ""


def test_a_child_starts_light_and_holds_no_foreign_descriptors(start: Start, tmp_path: Path) -> None:
    with open(tmp_path / "other", "w") as file:
        os.set_inheritable(file.fileno(), True)
        facts = echo(start, tmp_path / "out")
    # Standard streams, the parent's life line, the folder being listed.
    assert len(facts["descriptors"]) == 5
    assert not {"torch", "transformers", "zmq", "fastapi"} & set(facts["modules"])


def test_descriptors_can_be_handed_over(start: Start) -> None:
    reading, writing = os.pipe()
    os.write(writing, b"12345")
    child = start("read_descriptor", (reading,), pass_fds=(reading,))
    assert child.wait(20) == 5
    os.close(reading)
    os.close(writing)


def test_exit_codes_and_callbacks(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    child = start("fail")
    seen: list[int] = []
    told = threading.Event()

    def note(returncode: int) -> None:
        seen.append(returncode)
        told.set()

    child.on_exit(lambda code: note(code // 0))
    child.on_exit(note)
    assert child.wait(20) == 1
    assert told.wait(5)
    assert (child.poll(), child.is_alive, seen) == (1, False, [1])
    child.on_exit(note)
    assert seen == [1, 1]
    child.terminate()
    child.kill()
    assert "RuntimeError: as told" in capfd.readouterr().err


def test_a_running_child_says_so(start: Start) -> None:
    child = start("sleep", name="sleeper")
    assert (child.poll(), child.is_alive) == (None, True)
    assert child.wait(0.05) is None
    assert repr(child) == f"<ChildProcess sleeper pid {child.pid}: running>"
    child.kill()
    assert child.wait(10) == -signal.SIGKILL
    assert repr(child).endswith("signal SIGKILL>")


def test_close_ends_a_running_child_and_can_be_repeated(start: Start) -> None:
    child = start("sleep")
    child.close()
    child.close()
    assert child.poll() == -signal.SIGKILL


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_children_end_with_their_parent(start: Start, tmp_path: Path, how: signal.Signals) -> None:
    """kill -9 of the parent: idle, busy and thread-spawned children are gone within seconds."""
    out = tmp_path / "pids"
    parent = start("parent_of_three", str(out))
    wait_until(out.exists, 20)
    pids = msgspec.json.decode(out.read_bytes(), type=list[int])
    assert len(pids) == 3
    assert not any(map(gone, pids))
    os.kill(parent.pid, how)
    wait_until(lambda: all(map(gone, pids)), 5.0)


def test_a_thread_that_ends_does_not_take_its_children_along(start: Start) -> None:
    """The kernel's parent-death signal follows threads; a child must not."""
    children: list[ChildProcess] = []
    thread = threading.Thread(target=lambda: children.append(start("sleep")))
    thread.start()
    thread.join()
    assert children[0].wait(0.7) is None


def test_a_death_is_noticed_although_a_grandchild_lives_on(start: Start) -> None:
    child = start("with_grandchild")
    assert child.wait(4.0) == 4


def test_children_ignore_the_terminals_interrupt(start: Start) -> None:
    """The parent coordinates: Ctrl-C reaches the whole group, but only the parent acts on it."""
    reading, writing = os.pipe()
    child = start("sleep_stubbornly", (writing,), pass_fds=(writing,))
    assert os.read(reading, 5) == b"ready"
    os.kill(child.pid, signal.SIGINT)
    assert child.wait(0.3) is None
    os.close(reading)
    os.close(writing)


def test_log_lines_name_the_process(start: Start, capfd: pytest.CaptureFixture[str]) -> None:
    child = start("shout", name="engine-0")
    assert child.wait(20) == 0
    assert f"WARNING engine-0[{child.pid}] hardpoint.x.part: here I am" in capfd.readouterr().err


@pytest.mark.parametrize("entry", ["", "module", ":function", "module:"])
def test_a_malformed_entry_is_refused(entry: str) -> None:
    with pytest.raises(ConfigError, match="module:function"):
        spawn(entry, b"", name="x")


@pytest.mark.parametrize(
    ("code", "text"), [(0, "exit code 0"), (3, "exit code 3"), (-9, "signal SIGKILL"), (-63, "signal 63")]
)
def test_exits_read_well(code: int, text: str) -> None:
    assert describe_exit(code) == text

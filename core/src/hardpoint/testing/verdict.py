"""Runs one plugin's conformance class in a process of its own and says in words what came of it."""

from __future__ import annotations

import contextlib
import inspect
import os
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

import msgspec

from hardpoint.errors import PluginLoadError
from hardpoint.plugins.records import DiscoveredPlugin, RefusedPlugin
from hardpoint.plugins.suggest import plain
from hardpoint.testing.kits import suite_for
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint.testing.suite_runner import run_suite

__all__ = ["BrokenRule", "Verdict", "examine", "render"]

_TAIL_LINES, _MAX_LINE = 12, 4096
_READ_S = 1.0
_COLORS = {"PASSED": "32", "FAILED": "31"}


class BrokenRule(msgspec.Struct, frozen=True):
    """A test that failed: its name, what it asks for, and the end of pytest's explanation."""

    name: str
    rule: str
    explanation: str


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """``kept`` are names of tests; ``not_claimed`` maps those of optional behavior to why they were skipped.

    ``figures`` are measurements, which break no rule. ``fault`` says why no verdict on the rules was reached at all,
    ``note`` what was not examined.
    """

    kind: str
    name: str
    distribution: str
    version: str
    suite: str = ""
    kept: tuple[str, ...] = ()
    broken: tuple[BrokenRule, ...] = ()
    not_claimed: dict[str, str] = {}
    figures: tuple[str, ...] = ()
    fault: str = ""
    note: str = ""
    seconds: float = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether not a single rule was examined, and no fault says why."""
        return not (self.kept or self.broken or self.not_claimed or self.fault)

    @property
    def passed(self) -> bool:
        return not (self.broken or self.fault)


def examine(plugin: DiscoveredPlugin, *, only: str = "", timeout_s: float = 600.0) -> Verdict:
    """The verdict on one installed plugin. A plugin that crashes or hangs takes only its own processes along."""
    started = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "verdict"
        job = [msgspec.json.encode(plugin).decode(), only, str(answer), *sys.path]
        status, tail = _run([sys.executable, "-P", "-m", "hardpoint.testing.verdict", *job], timeout_s)
        if status is None:
            return _faulty(plugin, f"it did not finish within {timeout_s:g} s; raise --timeout if that is its nature")
        if not answer.is_file():
            return _faulty(plugin, f"its process ended with status {status} in the middle of it\n{tail}")
        try:
            verdict = msgspec.json.decode(answer.read_bytes(), type=Verdict)
        except (msgspec.DecodeError, RecursionError, UnicodeDecodeError) as error:
            return _faulty(plugin, f"its process left an answer that is no verdict ({error}); does it write files?")
    return msgspec.structs.replace(verdict, seconds=round(time.monotonic() - started, 2))


def _run(command: Sequence[str], timeout_s: float) -> tuple[int | None, str]:
    """The exit status, None after ``timeout_s``, and the end of what went to stderr. Children end with the process."""
    sink: deque[bytes] = deque(maxlen=_TAIL_LINES)
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, start_new_session=True
    )
    # The thread closes the pipe: a child in a session of its own may hold it for as long as it likes, unwaited for.
    stream, process.stderr = process.stderr, None
    reader = threading.Thread(target=_keep_tail, args=(stream, sink), daemon=True)
    reader.start()
    try:
        status = process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        status = None
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    reader.join(_READ_S)
    return status, "\n".join(line.decode(errors="replace").rstrip() for line in tuple(sink))


def _keep_tail(stream: IO[bytes], sink: deque[bytes]) -> None:
    with stream:
        while line := stream.readline(_MAX_LINE):
            sink.append(line)


def _faulty(plugin: DiscoveredPlugin, fault: str) -> Verdict:
    source, version = plugin.distribution, plugin.version
    return Verdict(kind=plugin.kind, name=plugin.name, distribution=source, version=version, fault=fault)


def _examine_here(plugin: DiscoveredPlugin, only: str) -> Verdict:
    try:
        suite, note = _suite(plugin)
    except PluginLoadError as error:
        return _faulty(plugin, str(error))
    try:
        outcome = run_suite(suite, only=only)
    except ValueError as error:
        return msgspec.structs.replace(_faulty(plugin, "" if only else str(error)), note=str(error) if only else "")
    broken = [BrokenRule(name, _rule(suite, name), _tail(text)) for name, text in sorted(outcome.failed.items())]
    return msgspec.structs.replace(
        _faulty(plugin, ""),
        suite=suite.__mro__[1].__name__,
        kept=tuple(sorted(outcome.passed - set(outcome.failed))),
        broken=tuple(broken),
        not_claimed={name: reason.removeprefix("Skipped: ") for name, reason in sorted(outcome.skipped.items())},
        figures=tuple(outcome.figures),
        note=note,
    )


def _suite(plugin: DiscoveredPlugin) -> tuple[type[PluginSuite], str]:
    """The class to run, and what it leaves unexamined."""
    suite = suite_for(plugin)
    if suite is not None and not inspect.isabstract(suite):
        return suite, ""
    general: type[PluginSuite] = type("TestGeneral", (PluginSuite,), {"kind": plugin.kind, "plugin": plugin.name})
    if suite is None:
        return general, f"there is no kit for the kind {plugin.kind}: only the rules for all plugins were examined"
    needed = ", ".join(sorted(suite.__abstractmethods__))
    kit = suite.__mro__[1].__name__
    return general, (
        f"only the rules for all plugins were examined: {kit} needs {needed} from the author. Derive a class from it "
        f"and offer it as the entry point hardpoint.conformance.v1:{plugin.kind}.{plugin.name}"
    )


def _rule(suite: type[PluginSuite], name: str) -> str:
    """The first sentence of the test's docstring, or its name in words."""
    text = inspect.getdoc(getattr(suite, name, None)) or name.removeprefix("test_").replace("_", " ")
    return " ".join(text.partition("\n\n")[0].split())


def _tail(text: str) -> str:
    """The end of pytest's explanation, without its marks. An assertion without words is quoted."""
    marked = [line[1:] for line in text.splitlines() if line.startswith("E ")]
    quoted = [line[1:] for line in text.splitlines() if line.startswith(">")]
    if quoted and [line.strip() for line in marked] == ["AssertionError"]:
        return f"AssertionError: {quoted[-1].strip()}"
    return textwrap.dedent("\n".join((marked or text.splitlines())[-_TAIL_LINES:]))


def render(
    verdicts: Sequence[Verdict], refused: Sequence[RefusedPlugin], *, color: bool = False, verbose: bool = False
) -> str:
    """The verdicts as text for people, with a summary as the last line."""
    lines: list[str] = []
    for entry in refused:
        name, reason = plain(f"{entry.kind}:{entry.name}"), plain(entry.reason)
        lines.append(f"{name}  {_paint('FAILED', color)}  the core refuses it: {reason}")
    for verdict in verdicts:
        lines += _lines(verdict, color, verbose)
    good = sum(verdict.passed for verdict in verdicts)
    total = len(verdicts) + len(refused)
    lines.append(f"verdict: {good} of {total} plugins keep the rules of their kinds")
    return "\n".join(lines)


def _lines(verdict: Verdict, color: bool, verbose: bool) -> Iterator[str]:
    word = _paint("PASSED" if verdict.passed else "FAILED", color)
    counts = f"{len(verdict.kept)} rules kept"
    counts += f", {len(verdict.broken)} broken" if verdict.broken else ""
    counts += f", {len(verdict.not_claimed)} optional not claimed" if verdict.not_claimed else ""
    source = f"{verdict.distribution} {verdict.version}"
    where = f"{verdict.suite or 'no suite'}, {source}, {verdict.seconds:.1f} s"
    yield f"{plain(f'{verdict.kind}:{verdict.name}')}  {word}  {counts}  ({plain(where)})"
    yield from map(plain, _details(verdict, verbose))


def _details(verdict: Verdict, verbose: bool) -> Iterator[str]:
    for text in (verdict.fault, verdict.note, *verdict.figures):
        yield from (f"    {line}" for line in text.splitlines())
    for broken in verdict.broken:
        yield f"  x {broken.name}: {broken.rule}"
        yield from (f"      {line}" for line in broken.explanation.splitlines())
    if verbose:
        yield from (f"  + {name}" for name in verdict.kept)
        yield from (f"  - {name}: {reason}" for name, reason in verdict.not_claimed.items())
    elif verdict.not_claimed:
        yield f"    not claimed: {'; '.join(sorted(set(verdict.not_claimed.values())))}"


def _paint(word: str, color: bool) -> str:
    return f"\x1b[{_COLORS[word]}m{word}\x1b[0m" if color else word


def _main(plugin: str, only: str, answer: str, *search_path: str) -> None:
    sys.path[:] = search_path
    found: Any = _examine_here(msgspec.json.decode(plugin, type=DiscoveredPlugin), only)
    Path(answer).write_bytes(msgspec.json.encode(found))


if __name__ == "__main__":
    _main(*sys.argv[1:])

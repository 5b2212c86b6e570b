"""What a running server's processes say of their plugins, compared with one another and with this installation.

Behind ``hardpoint plugins doctor --server``, and imported by nothing else.
"""

from __future__ import annotations

import argparse
import http.client
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from queue import Empty, SimpleQueue
from urllib.parse import SplitResult, urlsplit

import msgspec

from hardpoint.errors import ConfigError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.records import Discovery
from hardpoint.plugins.report import LoadReport, PluginState, PluginStatus
from hardpoint.plugins.suggest import plain
from hardpoint.server.keys import read_keys
from hardpoint.testing.doctor_text import Paint, painter

__all__ = ["LiveReport", "admin_key", "examine_server", "print_server", "render_live"]

_PATH = "/admin/plugins"
_TIMEOUT_S = 30.0
_MAX_BYTES = 64 << 20
_UNREACHED = "check that the server runs and that this is the address it printed at its start"
_NO_ANSWER = "check that this is a Hardpoint server of the same version"
_KEY_VARIABLE, _FILE_VARIABLE = "HARDPOINT_ADMIN_KEY", "HARDPOINT_ADMIN_KEY_FILE"
_GIVE = f"give an admin key of the server with --admin-key-file FILE or {_KEY_VARIABLE}"
_ADVICE: Mapping[int | str, str] = {
    401: f"it does not know this key; {_GIVE}",
    403: f"an API key is not enough; {_GIVE}",
    404: "it has no admin routes; start it with --endpoints openai,ops,admin and an --admin-key-file",
    "host_refused": "it does not serve under this name; use its own address, or set server.allowed_hosts",
}
_SELECTION_FLAGS = (
    "probe",
    "model",
    "device",
    "setting",
    "config",
    "plugins",
    "endpoints",
    "pin",
    "use",
    "strict_plugins",
)
_QUIET = (PluginState.DISCOVERED, PluginState.ALLOWED)


class LiveReport(msgspec.Struct, frozen=True):
    """``differences`` deserve a look, ``problems`` must be mended. Without an answer only the latter say something.

    ``unreachable`` are engines that the server could not ask, as ``model`` and ``reason``.
    """

    processes: tuple[LoadReport, ...]
    unreachable: tuple[dict[str, str], ...] = ()
    server: str = ""
    differences: tuple[str, ...] = ()
    problems: tuple[str, ...] = ()

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


def print_server(arguments: argparse.Namespace, *, color: bool) -> tuple[str, ...]:
    """Ask the server named by the command's arguments and print what it tells; the problems found.

    Raises ``ConfigError`` when no admin key was given, and for flags that concern the local selection.
    """
    given = [flag for flag in _SELECTION_FLAGS if getattr(arguments, flag) not in (None, [], False)]
    idle = [f"--{flag.replace('_', '-')}" for flag in given]
    if idle:
        raise ConfigError(f"--server shows what runs, whatever would be selected here; leave out {', '.join(idle)}")
    report = examine_server(arguments.server, admin_key(arguments.admin_key_file), discover())
    lines = render_live(report, painter(color), arguments.verbose, arguments.kind)
    print(report.to_json() if arguments.json else "\n".join(lines))
    return report.problems


def admin_key(path: str | None) -> str:
    """The first key of the file, else of the environment. Raises ``ConfigError`` when there is none."""
    given = [] if path else [key for key in os.environ.get(_KEY_VARIABLE, "").split(",") if key]
    keys = read_keys(given, path or os.environ.get(_FILE_VARIABLE), "--admin-key-file", "an admin key")
    if not keys:
        raise ConfigError(_GIVE)
    return keys[0]


def examine_server(url: str, key: str, here: Discovery) -> LiveReport:
    """Ask the server at ``url``; ``here`` is what is installed in this environment. Raises nothing of its own."""
    try:
        answer = _fetch(url, key)
    except ConfigError as error:
        return LiveReport((), server=url, problems=(str(error),))
    failed = [(report, status) for report in answer.processes for status in report.of(PluginState.FAILED)]
    problems = [f"{_label(status)} failed in {report.process}: {status.reason}" for report, status in failed]
    problems += [f"engine {gone.get('model')!r} cannot be asked: {gone.get('reason')}" for gone in answer.unreachable]
    differences = tuple(_differences(answer.processes, here))
    return LiveReport(answer.processes, answer.unreachable, url, differences, tuple(problems))


def _fetch(url: str, key: str) -> LiveReport:
    try:
        parts = urlsplit(url)
    except ValueError:
        parts = urlsplit("")
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise ConfigError(f"--server {url!r} is not of the form http://HOST:PORT")
    status, body = _within_deadline(url, parts, key)
    if status != 200:
        refused = "host_refused" if b"host_refused" in body else status
        raise ConfigError(f"{url} answered {status}: {_ADVICE.get(refused, 'its log says why')}")
    try:
        answer = msgspec.json.decode(body, type=LiveReport)
    except (msgspec.DecodeError, RecursionError) as error:
        raise ConfigError(f"{url} did not answer with the status of plugins ({error}); {_NO_ANSWER}") from None
    if not answer.processes:
        raise ConfigError(f"{url} answered without the report of a single process; {_NO_ANSWER}")
    return answer


def _within_deadline(url: str, parts: SplitResult, key: str) -> tuple[int, bytes]:
    """Status and body. Raises ``ConfigError`` when both have not come whole after ``_TIMEOUT_S``, however they drip."""
    replies: SimpleQueue[tuple[int, bytes] | ConfigError] = SimpleQueue()

    def ask() -> None:
        try:
            replies.put(_ask(url, parts, key))
        except ConfigError as error:
            replies.put(error)

    # A limit of a socket holds for each read alone, so a thread is left behind that ends with the command.
    threading.Thread(target=ask, daemon=True).start()
    try:
        reply = replies.get(timeout=_TIMEOUT_S)
    except Empty:
        raise ConfigError(f"{url} did not answer wholly within {_TIMEOUT_S:g} s; {_UNREACHED}") from None
    if isinstance(reply, ConfigError):
        raise reply
    return reply


def _ask(url: str, parts: SplitResult, key: str) -> tuple[int, bytes]:
    # Neither redirects nor proxies are followed: the key goes to the named server only.
    connect = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    try:
        connection = connect(parts.hostname or "", parts.port, timeout=_TIMEOUT_S)
        try:
            connection.request("GET", parts.path.rstrip("/") + _PATH, headers={"Authorization": f"Bearer {key}"})
            answer = connection.getresponse()
            body = answer.read(_MAX_BYTES)
        finally:
            connection.close()
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise ConfigError(f"{url} cannot be reached ({type(error).__name__}: {error}); {_UNREACHED}") from None
    return answer.status, body


def _differences(processes: Iterable[LoadReport], here: Discovery) -> Iterator[str]:
    versions: dict[str, dict[str, list[str]]] = {}
    for report in processes:
        versions.setdefault("the core", {}).setdefault(report.core_version, []).append(report.process)
        for status in report.plugins:
            versions.setdefault(_label(status), {}).setdefault(status.version, []).append(report.process)
    for label, found in versions.items():
        found.pop("", None)  # a refused plugin's
        if len(found) > 1:
            yield f"{label}: " + ", ".join(f"{version} in {' and '.join(where)}" for version, where in found.items())
    local = {f"{p.kind}:{p.name} ({p.distribution})": p.version for p in here.plugins}
    refused = {f"{r.kind}:{r.name} ({r.distribution})" for r in here.refused}
    for label in sorted({*versions, *local} - {"the core"} - refused):
        there, known = "/".join(versions.get(label, ())), label in versions
        if not known or label not in local or (there and there != local[label]):
            mine = f"{local[label]} is installed here" if label in local else "not installed here"
            yield f"{label}: {there or ('known' if known else 'unknown')} in the server, {mine}"


def _label(status: PluginStatus) -> str:
    return f"{status.kind}:{status.name} ({status.distribution})"


def render_live(report: LiveReport, paint: Paint, verbose: bool, kind: str | None = None) -> Iterator[str]:
    """A table per process, of one kind if given. Plugins not loaded there are only counted unless ``verbose``."""
    for process in report.processes:
        yield paint(plain(f"{process.process}, core {process.core_version}"), "title")
        plugins = [status for status in process.plugins if kind in (None, status.kind)]
        shown = [status for status in plugins if verbose or status.state not in _QUIET]
        rows = [tuple(map(plain, _cells(status))) for status in shown]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        for row, status in zip(rows, shown, strict=True):
            cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
            if any(text.startswith(f"{_label(status)}:") for text in report.differences):
                cells[1] = paint(cells[1], "warning")
            cells[2] = paint(cells[2], row[2])
            yield "  ".join(["", *cells, plain(status.reason)]).rstrip()
        if len(shown) < len(plugins):
            yield f"  {len(plugins) - len(shown)} more not loaded here (-v shows them)"
    yield from (f"{paint('difference', 'warning')}: {plain(text)}" for text in report.differences)
    yield from (f"{paint('problem', 'problem')}: {plain(text)}" for text in report.problems)
    if not report.problems:
        yield f"no problems found in {len(report.processes)} processes of {report.server}"


def _cells(status: PluginStatus) -> tuple[str, str, str, str]:
    time = "" if status.load_seconds is None else f"{1000 * status.load_seconds:.1f} ms"
    return f"{status.kind}:{status.name}", f"{status.distribution} {status.version}".strip(), str(status.state), time

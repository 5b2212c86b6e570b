"""What only importing tells of plugins: probes, early hooks, whether a manifest is in step. Done in a child process.

The launcher stays free of frameworks that way, and a plugin that crashes takes nobody with it.
"""

from __future__ import annotations

import os
import selectors
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from hardpoint.errors import PluginError
from hardpoint.interfaces.plugin import PluginDeclaration, ProbeResult, ProbeStatus
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.plugins.manifest import Manifest, load_manifest
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan
from hardpoint.plugins.platform_selection import checked
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.process import describe_exit, spawn
from hardpoint.roles import ProcessRole
from hardpoint.testing.doctor import ProbeReport
from hardpoint.testing.manifest_writer import manifest_text

__all__ = ["PROBED_KINDS", "probe_in_child"]

PROBED_KINDS = ("hooks", "attention_backend", "custom_op")
_ENTRY = "hardpoint.testing.probing:main"
_BOOT_HOOK = "process_booting"
Key = tuple[str, str]


class _Job(msgspec.Struct, frozen=True):
    plan: bytes
    targets: tuple[Key, ...]
    answers_fd: int


class _Answer(msgspec.Struct, frozen=True):
    kind: str
    name: str
    report: ProbeReport


def probe_in_child(plan: PluginPlan, *, timeout_s: float = 120.0) -> dict[Key, ProbeReport]:
    """The answers of the plan's plugins of :data:`PROBED_KINDS`, by kind and name.

    A child asks one after the other. One that ends it, or keeps it for ``timeout_s`` seconds, counts as broken, and
    another child asks the rest.
    """
    waiting = [(planned.kind, planned.name) for kind in PROBED_KINDS for planned in plan.of(kind)]
    found: dict[Key, ProbeReport] = {}
    while waiting:
        answers, end = _ask(plan, tuple(waiting), timeout_s)
        found.update(answers)
        waiting = [key for key in waiting if key not in found]
        if waiting:
            found[waiting.pop(0)] = _report(ProbeResult(ProbeStatus.BROKEN, end))
    return found


def _ask(plan: PluginPlan, targets: tuple[Key, ...], timeout_s: float) -> tuple[dict[Key, ProbeReport], str]:
    """What one child answered, and how it ended."""
    reading, writing = os.pipe()
    try:
        job = _Job(plan.to_bytes(), targets, writing)
        child = spawn(_ENTRY, msgspec.msgpack.encode(job), name="plugin-probe", pass_fds=(writing,))
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
    # The last line is cut short where the child ended while it wrote.
    rows = [msgspec.json.decode(line, type=_Answer) for line in data.split(b"\n")[:-1]]
    crash = f"the process that asked it ended with {describe_exit(code or 0)}"
    end = f"it gave no answer for {timeout_s:g} s" if code is None else crash
    return {(row.kind, row.name): row.report for row in rows}, end


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


def main(payload: bytes) -> int:
    """Entry of the child: one line per target as soon as it is known."""
    job = msgspec.msgpack.decode(payload, type=_Job)
    os.set_inheritable(job.answers_fd, False)
    # Whatever plugins print must not stand in the doctor's own output.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    runtime = PluginRuntime(PluginPlan.from_bytes(job.plan), {ProcessRole.WORKER})
    for kind, name in job.targets:
        answer = _Answer(kind, name, _examine(runtime, kind, name))
        os.write(job.answers_fd, msgspec.json.encode(answer) + b"\n")
    return 0


def _examine(runtime: PluginRuntime, kind: str, name: str) -> ProbeReport:
    try:
        planned, factory, declaration = runtime.load_factory(kind, name)
        if kind == "hooks":
            result = ProbeResult(ProbeStatus.AVAILABLE, _describe_hooks(factory))
        else:
            result = _probe(runtime, planned, declaration)
        return _report(result, *_stale(planned, declaration))
    except (Exception, SystemExit) as error:
        text = str(error) if isinstance(error, PluginError) else f"{type(error).__name__}: {error}"
        return _report(ProbeResult(ProbeStatus.BROKEN, text))


def _report(result: ProbeResult, *faults: str) -> ProbeReport:
    broken = (f"it is broken: {result.reason}",) if result.status is ProbeStatus.BROKEN else ()
    return ProbeReport(result.status, result.reason, dict(result.details), (*broken, *faults))


def _describe_hooks(factory: Any) -> str:
    """Whether a class in the factory's module has the hook of early boot. No instance is made to find out."""
    module = vars(sys.modules[factory.__module__])
    hooks = (getattr(value, _BOOT_HOOK, None) for value in module.values() if isinstance(value, type))
    early = any(hasattr(hook, "hardpoint_impl") for hook in hooks)
    return f"imports; runs early, by {_BOOT_HOOK}, in every process" if early else "imports"


def _probe(runtime: PluginRuntime, planned: PlannedPlugin, declaration: PluginDeclaration) -> ProbeResult:
    if declaration.probe is not None:
        return checked(declaration.probe())
    if planned.kind != "custom_op":
        # Only platforms must have one; a worker tries any other plugin that is named.
        return ProbeResult(ProbeStatus.AVAILABLE, "imports; it declares no probe")
    context = runtime.context(planned.kind, planned.name, WorkerContext)
    operators = runtime.create(planned.kind, planned.name, context).operators
    answers = [(operator.name, checked(operator.probe())) for operator in operators if operator.probe is not None]
    for status in (ProbeStatus.BROKEN, ProbeStatus.ABSENT):
        faulty = [f"{name}: {answer.reason}" for name, answer in answers if answer.status is status]
        if faulty:
            return ProbeResult(status, "; ".join(faulty))
    return ProbeResult(ProbeStatus.AVAILABLE, f"{len(operators)} operators")


def _stale(planned: PlannedPlugin, declaration: PluginDeclaration) -> Iterator[str]:
    present = load_manifest(planned)
    if present is None:
        return
    text = manifest_text({(planned.kind, planned.name): declaration})
    declared = msgspec.json.decode(text, type=Manifest).plugins[planned.kind][planned.name]
    if declared != present:
        advice = f"write it again with `hardpoint plugins manifest {planned.distribution}`"
        yield f"its manifest is out of date, the code declares something else; {advice}"

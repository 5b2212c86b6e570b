"""What only importing tells of plugins: probes, early hooks, whether a manifest is in step. Done in a child process.

The launcher stays free of frameworks that way, and a plugin that crashes takes nobody with it.
"""

from __future__ import annotations

import sys
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
from hardpoint.roles import ProcessRole
from hardpoint.testing.child_answers import answer_on, ask_child
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
    plain = plan.to_bytes()
    data, end = ask_child(
        _ENTRY,
        lambda descriptor: msgspec.msgpack.encode(_Job(plain, targets, descriptor)),
        name="plugin-probe",
        timeout_s=timeout_s,
    )
    # The last line is cut short where the child ended while it wrote.
    rows = [msgspec.json.decode(line, type=_Answer) for line in data.split(b"\n")[:-1]]
    return {(row.kind, row.name): row.report for row in rows}, end


def main(payload: bytes) -> int:
    """Entry of the child: one line per target as soon as it is known."""
    job = msgspec.msgpack.decode(payload, type=_Job)
    write = answer_on(job.answers_fd)
    runtime = PluginRuntime(PluginPlan.from_bytes(job.plan), {ProcessRole.WORKER})
    for kind, name in job.targets:
        answer = _Answer(kind, name, _examine(runtime, kind, name))
        write(msgspec.json.encode(answer) + b"\n")
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

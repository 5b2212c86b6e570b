"""Which attention backend a model would get on a device, which need not be there, and why not another one.

Behind ``hardpoint plugins doctor --model``. Everything up to the worker's settings is what a start does. The worker
itself, whose framework has no place in this process, is asked in a child. No weight is read.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import msgspec

from hardpoint.config.arguments import add_arguments, load_config
from hardpoint.config.models import AppConfig
from hardpoint.errors import ConfigError, HardpointError
from hardpoint.interfaces.platform import DeviceDescription, LogicalDevice
from hardpoint.interfaces.worker import Worker, WorkerConfig, WorkerContext
from hardpoint.launch import Launch, plugin_selection, prepare
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.hooks import HookRunner
from hardpoint.plugins.plan import PluginPlan, SelectedBy
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.suggest import plain
from hardpoint.roles import ProcessRole
from hardpoint.testing.child_answers import answer_on, ask_child
from hardpoint.testing.doctor_device import DescribedDevice, described_on, parse_device
from hardpoint.testing.doctor_text import Paint, painter

__all__ = ["AttentionDecision", "CandidateAnswer", "ExplainsAttention", "LayersNeed", "decide", "print_decision"]

_ENTRY = "hardpoint.testing.doctor_attention:main"
_TIMEOUT_S = 300.0
_GIB = 1 << 30


class LayersNeed(msgspec.Struct, frozen=True):
    """Layers that ask for the same, which ``need`` says for people. Without ``layers``: nobody knows them."""

    layers: tuple[str, ...]
    need: str


class CandidateAnswer(msgspec.Struct, frozen=True):
    """``outcome`` is ``chosen``, ``refuses`` or ``would accept``; ``reason`` is a refusal's."""

    name: str
    outcome: str
    reason: str = ""


class WorkerAnswer(msgspec.Struct, frozen=True):
    """What a worker tells, see :class:`ExplainsAttention`."""

    layers: tuple[LayersNeed, ...]
    candidates: tuple[CandidateAnswer, ...]
    chosen: str | None
    block_size: int
    kernel_block_size: int | None = None
    notes: tuple[str, ...] = ()


class AttentionDecision(msgspec.Struct, frozen=True, kw_only=True):
    """``answer`` is absent where ``problems`` kept it from being found."""

    model: str
    architecture: str
    platform: str
    worker: str
    device: DeviceDescription | None
    settings: dict[str, Any]
    answer: WorkerAnswer | None = None
    problems: tuple[str, ...] = ()

    def to_json(self) -> str:
        return msgspec.json.encode(self).decode()


@runtime_checkable
class ExplainsAttention(Protocol):
    """A worker that can be asked, before anything else, which attention backend it would choose."""

    def explain_attention(self, device: DeviceDescription) -> Any:
        """An object with the attributes of :class:`WorkerAnswer`, for ``device`` and the context's platform.

        Binds no device and reads no weights. Raises the errors of ``hardpoint.errors``.
        """


class _Job(msgspec.Struct, frozen=True):
    plan: bytes
    config: WorkerConfig
    device: DeviceDescription | None
    answers_fd: int


class _Reply(msgspec.Struct, frozen=True):
    device: DeviceDescription | None = None
    answer: WorkerAnswer | None = None
    problem: str = ""


def print_decision(arguments: argparse.Namespace, *, color: bool) -> tuple[str, ...]:
    """Decide for the command's arguments and print; the problems found.

    Raises ``ConfigError`` and whatever else a start is refused with.
    """
    device = None if arguments.device is None else parse_device(arguments.device)
    decision = decide(_settings(arguments), device)
    if arguments.json:
        print(decision.to_json())
    else:
        print("\n".join(_lines(decision, painter(color), arguments.verbose)))
    return decision.problems


def decide(settings: Sequence[str], device: DescribedDevice | None = None) -> AttentionDecision:
    """For ``settings``, a command line like that of ``hardpoint serve``; on ``device``, or on this host's.

    Raises what a start raises before it has processes.
    """
    parser = argparse.ArgumentParser(prog="hardpoint plugins doctor --setting", allow_abbrev=False)
    add_arguments(parser, with_server=False)
    config = load_config(parser.parse_args(list(settings)), os.environ)
    launch = _launch(config, device)
    config_of_worker = launch.spec.worker_config
    reply = _ask(launch, None if device is None else device.description)
    names = ("dtype", "kv_cache_dtype", "block_size", "attention_backend", "batch_invariant", "quantization")
    answer = reply.answer
    problems = [reply.problem] if reply.problem else []
    if answer is not None and answer.chosen is None:
        problems.append(f"no attention backend can serve {launch.spec.model.artifact.name!r} there")
    return AttentionDecision(
        model=launch.spec.model_name,
        architecture=launch.spec.model.architecture,
        platform=launch.runtime.plan.selected("platform").name,
        worker=launch.runtime.plan.selected("worker").name,
        device=reply.device,
        settings={name: getattr(config_of_worker, name) for name in names},
        answer=answer,
        problems=tuple(problems),
    )


def _settings(arguments: argparse.Namespace) -> list[str]:
    """The command's own flags as those of a start."""
    given: list[str] = [arguments.model]
    for setting in arguments.setting:
        name, equals, value = setting.partition("=")
        if not name.strip("-"):
            raise ConfigError(
                f"--setting {setting!r} names no setting; write NAME or NAME=VALUE, as after `hardpoint serve --`"
            )
        given += [f"--{name.replace('_', '-')}", *([value] if equals else [])]
    for use in arguments.use:
        kind, _, name = use.partition("=")
        given += [f"--{kind.replace('_', '-')}", name]
    for flag in ("config", "plugins"):
        value = getattr(arguments, flag)
        given += [] if value is None else [f"--{flag}", value]
    for pin in arguments.pin:
        given += ["--pin", pin]
    return [*given, "--strict-plugins"] if arguments.strict_plugins else given


def _launch(config: AppConfig, device: DescribedDevice | None) -> Launch:
    """As a start does, except that nobody asks whether the device is there."""
    (name,) = config.engines
    environ, roles = dict(os.environ), frozenset({ProcessRole.API, ProcessRole.LAUNCHER})
    if device is None:
        return prepare(config, name, environ=environ, roles=roles, show_progress=False)
    engine = config.engines[name]
    if engine.execution.platform not in (None, device.platform):
        raise ConfigError(
            f"--device is of platform {device.platform!r}, but the settings name {engine.execution.platform!r}; leave "
            "one of them out"
        )
    installed = discover()
    plan = build_plan(installed, plugin_selection(config, engine, environ, serves=True))
    plan.find("platform", device.platform)
    runtime = PluginRuntime(plan, roles, installed=installed)
    HookRunner.from_runtime(runtime)
    runtime.plan = plan.choose("platform", device.platform, SelectedBy.NAMED, "named by --device")
    platform = runtime.make("platform", device.platform)
    runtime.platform, _ = described_on(platform, device.description, _world_size(config))
    return prepare(config, name, environ=environ, roles=roles, show_progress=False, runtime=runtime)


def _world_size(config: AppConfig) -> int:
    ((_, engine),) = config.engines.items()
    return engine.execution.tensor_parallel_size * engine.execution.pipeline_parallel_size


def _ask(launch: Launch, device: DeviceDescription | None) -> _Reply:
    config = launch.spec.worker_config
    data, end = ask_child(
        _ENTRY,
        lambda descriptor: msgspec.msgpack.encode(_Job(launch.spec.plan, config, device, descriptor)),
        name="attention-decision",
        timeout_s=_TIMEOUT_S,
    )
    try:
        return msgspec.json.decode(data, type=_Reply)
    except msgspec.DecodeError:
        return _Reply(problem=f"the worker could not be asked: {end}")


def main(payload: bytes) -> int:
    """Entry of the child: one reply."""
    job = msgspec.msgpack.decode(payload, type=_Job)
    write = answer_on(job.answers_fd)
    try:
        reply = _reply(job)
    except HardpointError as error:
        reply = _Reply(problem=str(error))
    write(msgspec.json.encode(reply))
    return 0


def _reply(job: _Job) -> _Reply:
    logging.getLogger("hardpoint").setLevel(logging.WARNING)
    runtime = PluginRuntime(PluginPlan.from_bytes(job.plan), {ProcessRole.WORKER}, rank=0)
    HookRunner.from_runtime(runtime)
    platform = runtime.make_selected("platform")
    if job.device is None:
        device = platform.describe(LogicalDevice(job.config.parallel.device))
    else:
        platform, device = described_on(platform, job.device, job.config.parallel.world_size)
    runtime.platform = platform
    worker: Worker = runtime.make_selected("worker", WorkerContext, config=job.config)
    asked: object = worker
    if not isinstance(asked, ExplainsAttention):
        name = runtime.plan.selected("worker").label
        return _Reply(device, problem=f"{name} explains no choice: it has no explain_attention")
    return _Reply(device, msgspec.convert(asked.explain_attention(device), WorkerAnswer, from_attributes=True))


def _lines(decision: AttentionDecision, paint: Paint, verbose: bool) -> Iterator[str]:
    shown = ", ".join(f"{name} {value}" for name, value in decision.settings.items() if value not in (None, False))
    yield f"{paint('model', 'title')}   {plain(decision.model)}  {decision.architecture}: {shown}"
    if decision.device is not None:
        yield f"{paint('device', 'title')}  {_device(decision)}"
    if decision.answer is not None:
        yield from _answer(decision.answer, paint, verbose)
    yield from (f"{paint('problem', 'problem')}: {plain(text)}" for text in decision.problems)


def _device(decision: AttentionDecision) -> str:
    device = decision.device
    if device is None:
        return ""
    parts = [f"platform {decision.platform}", f"worker {decision.worker}"]
    if device.capability is not None:
        parts.append(f"capability {device.capability[0]}.{device.capability[1]}")
    if device.memory_bytes:
        parts.append(f"{round(device.memory_bytes / _GIB, 1):g} GiB")
    return f"{plain(device.name)}  {', '.join(parts)}"


def _answer(answer: WorkerAnswer, paint: Paint, verbose: bool) -> Iterator[str]:
    yield paint("layers", "title")
    for row in answer.layers:
        number = str(len(row.layers)) if row.layers else "?"
        yield f"  {number:>3}  {row.need}"
        if verbose:
            yield from (f"       {plain(name)}" for name in row.layers)
    yield paint("candidates, the best first", "title")
    width = max((len(row.name) for row in answer.candidates), default=0)
    for candidate in answer.candidates:
        role = {"chosen": "active", "refuses": "refused"}.get(candidate.outcome, "available")
        reason = f": {plain(candidate.reason)}" if candidate.reason else ""
        yield f"  {candidate.name:<{width}}  {paint(candidate.outcome, role)}{reason}"
    if answer.chosen is not None:
        size, kernel = answer.block_size, answer.kernel_block_size
        pages = "" if kernel == size else f", which kernels read as {kernel}"
        yield f"{paint('decision', 'title')}  {answer.chosen}, KV cache blocks of {size} tokens{pages}"
    yield from (f"{paint('note', 'warning')}: {plain(note)}" for note in answer.notes)

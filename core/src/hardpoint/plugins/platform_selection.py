"""Chooses the platform. Probes initialize no device and import no framework; broken never becomes a fallback."""

from __future__ import annotations

from typing import NamedTuple

from hardpoint.errors import HardpointError, PluginConflictError, PluginLoadError, PluginNotFoundError
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus
from hardpoint.plugins.kinds import no_candidate
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.records import Discovery
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import ALLOW_VARIABLE
from hardpoint.roles import ProcessRole

FALLBACK_CAPABILITY = "fallback"
_SETTING = "--platform"


class PlatformProbe(NamedTuple):
    """``fallback`` platforms are used only when no other one is available."""

    name: str
    result: ProbeResult
    fallback: bool


def select_platform(
    plan: PluginPlan, requested: str | None = None, *, installed: Discovery | None = None
) -> tuple[str, list[PlatformProbe]]:
    """The platform to use, and the answers that led to it: ``requested``, or else the only available one, fallbacks
    last.

    A platform named in the plan counts as requested. Raises ``PluginNotFoundError`` when none is usable,
    ``PluginLoadError`` for broken hardware (unless another platform was named) and for a requested platform that is not
    available, ``PluginConflictError`` when the operator must name one.
    """
    if requested is None:
        requested = next((planned.name for planned in plan.of("platform") if planned.active), None)
    if requested is not None:
        plan.find("platform", requested)
    runtime = PluginRuntime(plan, {ProcessRole.LAUNCHER}, installed=installed)
    names = runtime.candidates("platform") if requested is None else (requested,)
    probes = [probe_platform(runtime, name) for name in names]
    return judge(probes, requested, runtime.names("platform")), probes


def probe_platform(runtime: PluginRuntime, name: str) -> PlatformProbe:
    """Ask a platform. One that cannot be imported, has no probe or raises in it counts as broken."""
    fallback = False
    try:
        declaration = runtime.load_factory("platform", name).declaration
        fallback = declaration.capabilities.get(FALLBACK_CAPABILITY) is True
        if declaration.probe is None:
            raise PluginLoadError("it declares no probe; pass probe= to @plugin")
        result = checked(declaration.probe())
    except HardpointError as error:
        result = ProbeResult(ProbeStatus.BROKEN, str(error))
    except (Exception, SystemExit) as error:
        result = ProbeResult(ProbeStatus.BROKEN, f"its probe raised {type(error).__name__}: {error}")
    return PlatformProbe(name, result, fallback)


def checked(answer: object) -> ProbeResult:
    """A probe's answer, if it is one; raises ``TypeError`` otherwise: nothing else may pass for a status."""
    if not isinstance(answer, ProbeResult) or not isinstance(answer.status, ProbeStatus):
        raise TypeError(f"it answered {answer!r:.200}, not a ProbeResult with a ProbeStatus")
    return ProbeResult(answer.status, str(answer.reason), dict(answer.details))


def judge(probes: list[PlatformProbe], requested: str | None = None, unlisted: tuple[str, ...] = ()) -> str:
    """The name to use, given the answers; ``unlisted`` platforms were not asked, since no list admits them.

    Raises as :func:`select_platform` does.
    """
    for probe in probes:
        if probe.name == requested and probe.result.status is not ProbeStatus.AVAILABLE:
            fault = f"platform {requested!r} was asked for but is {probe.result.status}: {probe.result.reason}"
            raise PluginLoadError(fault)
    if requested is not None:
        return requested
    if not probes and unlisted:
        advice = f"list one of them there or name it with {_SETTING}"
        raise PluginNotFoundError(f"{ALLOW_VARIABLE} admits no platform (installed: {', '.join(unlisted)}); {advice}")
    if not probes:
        raise PluginNotFoundError(no_candidate("platform"))
    findings = "; ".join(f"{probe.name}: {probe.result.status}, {probe.result.reason}" for probe in probes)
    broken = [probe.name for probe in probes if probe.result.status is ProbeStatus.BROKEN]
    if broken:
        advice = f"repair it or name another platform with {_SETTING}"
        raise PluginLoadError(f"platform {', '.join(broken)} is broken ({findings}); {advice}")
    available = [probe for probe in probes if probe.result.status is ProbeStatus.AVAILABLE]
    if not available:
        raise PluginNotFoundError(f"no installed platform is available here ({findings})")
    names = [probe.name for probe in available if not probe.fallback] or [probe.name for probe in available]
    if len(names) > 1:
        raise PluginConflictError(f"several platforms are available: {', '.join(names)}; name one with {_SETTING}")
    return names[0]

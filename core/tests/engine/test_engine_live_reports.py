"""R12.16: what the processes of a running engine say of their plugins, now and not only at the start."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.build import build_engine
from hardpoint.errors import EngineDeadError
from hardpoint.interfaces import Prompt, SamplingParams
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.report import LoadReport, PluginState, PluginStatus
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole

FAKES = Path(__file__).parents[1] / "_fake_dist"
HOOKS = """
from hardpoint.interfaces.hooks import hookimpl
class Fragile:
    @hookimpl
    def request_added(self, request):
        raise ValueError("the disk is full")
def create(ctx, options):
    return Fragile()
"""


def state_of(reports: Sequence[LoadReport], kind: str, name: str) -> PluginStatus:
    (found,) = [s for report in reports for s in report.plugins if (s.kind, s.name) == (kind, name)]
    return found


@pytest.fixture
def plan_with_fragile_hooks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fake_plan: Any) -> bytes:
    """The fakes and a merely installed hooks plugin that fails at the first request."""
    folder = tmp_path / "fragile-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: fragile\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[hardpoint.hooks.v1]\nfragile = fragile_hooks:create\n")
    (tmp_path / "fragile_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    kinds = {planned.kind: planned.name for planned in fake_plan.plugins if planned.active}
    kinds.pop("stat_logger", None)
    choices = {kind: name for kind, name in kinds.items() if kind != "endpoint"}
    return build_plan(discover([str(FAKES), str(tmp_path)]), PluginSelection(choices=choices)).to_bytes()


async def test_a_plugin_quarantined_later_is_told_as_failed_with_its_reason(
    make_spec: Callable[..., Any], make_runtime: Callable[..., Any], plan_with_fragile_hooks: bytes
) -> None:
    """The report of the start would show it as created for ever."""
    spec = make_spec(plan=plan_with_fragile_hooks)
    llm = await AsyncLLM.start(spec, make_runtime(ProcessRole.API))
    try:
        (before,) = await llm.load_reports()
        assert before.roles == ("engine", "worker")
        assert before.pid == llm.client.child.pid
        assert state_of([before], "hooks", "fragile").state is PluginState.CREATED
        params = SamplingParams(temperature=0.0, max_tokens=2)
        async for _ in llm.generate(Prompt(token_ids=[40, 41]), params):
            pass
        now = state_of(await llm.load_reports(), "hooks", "fragile")
        assert now.state is PluginState.FAILED
        assert "ValueError: the disk is full" in now.reason
        assert now.load_seconds is not None
    finally:
        await llm.shutdown(drain=False)
    with pytest.raises(EngineDeadError):
        await llm.load_reports()


def test_the_engine_adds_its_workers_reports_to_its_own(
    make_spec: Callable[..., Any], make_runtime: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    runtime = make_runtime()
    core = build_engine(make_spec(), runtime)
    worker = msgspec.structs.replace(runtime.report(), process="process 7 (worker, rank 0)", rank=0)
    monkeypatch.setattr(core.executor, "load_reports", lambda: [worker])
    engine, told = core.utility("load_reports")
    assert (engine.process, told) == (runtime.process, worker)
    runtime.quarantine("stat_logger", "fake", ValueError("later"))
    assert state_of(core.utility("load_reports")[:1], "stat_logger", "fake").state is PluginState.FAILED
    core.shutdown()

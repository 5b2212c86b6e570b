"""Which executor an engine gets: by plugin name, by short name, by class or by a class's path (R4.3 to R4.6)."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.config import AppConfig, EngineConfig
from hardpoint.config.settle import settle
from hardpoint.engine.build import build_engine
from hardpoint.engine.core import EngineCore
from hardpoint.engine.llm import LLM
from hardpoint.engine.process_client import ProcessClient
from hardpoint.errors import ConfigError, PluginLoadError, PluginNotFoundError
from hardpoint.interfaces import Executor, ParallelSlice, SamplingParams
from hardpoint.ipc import create_runtime_dir
from hardpoint.launch import Launch, prepare
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeExecutor

PARTS: Mapping[str, Any] = {
    "platform": "fake",
    "scheduler": "fake",
    "kv_layout": "fake",
    "loader": "fake",
    "chat_renderer": "fake",
}
PINS = tuple(f"{name}=hardpoint-fakes" for name in ("hash:sha256", "kv_cache_spec:full_attention"))
MODULE = "hardpoint_executor_classes"


@pytest.fixture(autouse=True)
def made(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the executors that were created, in order; their module can be imported by whoever runs an engine."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import hardpoint_executor_classes as classes  # type: ignore[import-not-found]

    classes.MADE.clear()
    yield classes.MADE
    sys.modules.pop(MODULE)


def launch(executor: Any, **settings: Any) -> Launch:
    sections = EngineConfig.sections("fake", executor=executor, **PARTS, **settings)
    config = AppConfig.model_validate({"engines": {"fake": sections}, "plugin_policy": {"pins": PINS}})
    return prepare(config, "fake", environ={}, roles=frozenset({*ProcessRole} - {ProcessRole.LAUNCHER}))


def start(executor: Any, **settings: Any) -> EngineCore:
    started = launch(executor, **settings)
    return build_engine(started.spec, started.runtime)


def classes() -> Any:
    return sys.modules[MODULE]


def test_a_name_is_looked_up_among_the_plugins() -> None:
    """R4.6: whoever registers an executor has its name, in one registry for all."""
    core = start("fake")
    assert type(core.executor) is FakeExecutor
    core.shutdown()


@pytest.mark.parametrize(
    ("path", "name"),
    [
        (f"{MODULE}:Direct", "Direct"),
        (f"{MODULE}.Direct", "Direct"),
        (f"{MODULE}:Outer.Inner", "Inner"),
        ("hardpoint_executor_classes:Staged", "Staged"),
    ],
)
def test_a_path_is_imported(path: str, name: str, made: list[str]) -> None:
    """R4.5: with a dot or a colon before the class."""
    core = start(path)
    assert type(core.executor).__name__ == name
    assert made == [name]
    core.shutdown()


def test_a_class_is_taken_as_it_is() -> None:
    """R4.5: the engine has an instance of this very class, and generates with it."""
    with LLM("fake", launch=lambda model, settings, roles: launch(**settings), executor=classes().Direct) as llm:
        assert type(llm.core.executor) is classes().Direct
        (output,) = llm.generate([[5, 6, 7]], SamplingParams(max_tokens=3, ignore_eos=True))
    assert len(output.outputs[0].token_ids) == 3


@pytest.mark.slow
async def test_a_class_reaches_an_engine_process_by_its_path() -> None:
    """R4.5: nothing but a name travels; the process imports the class for itself."""
    started = launch(classes().Direct)
    client = await ProcessClient.launch(msgspec.structs.replace(started.spec, runtime_dir=create_runtime_dir()))
    reports = await client.utility("load_reports")
    assert f"{MODULE}:Direct" in str(reports)
    assert await client.shutdown() == 0


@pytest.mark.parametrize("given", [FakeExecutor.__mro__[-1], str, dict])
def test_another_class_is_a_type_error(given: type, made: list[str]) -> None:
    """R4.5: before anything is started."""
    with pytest.raises(TypeError, match="is no subclass of hardpoint.interfaces.Executor"):
        launch(given)
    assert made == []


@pytest.mark.parametrize("path", [f"{MODULE}:NoExecutor", f"{MODULE}.function", "os.path:join", "json:JSONDecoder"])
def test_a_path_to_something_else_is_refused(path: str, made: list[str]) -> None:
    """R4.5: it must be a subclass of Executor, and nothing of it is called to find out."""
    with pytest.raises(ConfigError, match=f"executor {path} is no subclass of hardpoint.interfaces.Executor"):
        start(path)
    assert made == []


@pytest.mark.parametrize(
    ("path", "cause"),
    [
        ("no_such_package.module:Executor", "ModuleNotFoundError"),
        (f"{MODULE}:Missing", "AttributeError"),
        (f"{MODULE}.Missing", "AttributeError"),
        (":", "ValueError"),
    ],
)
def test_a_path_that_leads_nowhere_says_why(path: str, cause: str) -> None:
    with pytest.raises(PluginLoadError, match=cause):
        start(path)


@pytest.mark.parametrize("given", [3, 1.5, ["fake"], {"name": "fake"}, b"fake\xff", True])
def test_anything_else_is_refused(given: Any) -> None:
    """R4.5: neither a class nor a name."""
    sections = EngineConfig.sections("fake", executor=given, **PARTS)
    with pytest.raises(ConfigError, match="executor"):
        settle({"engines": {"fake": sections}, "plugin_policy": {"pins": PINS}})


@pytest.mark.parametrize("name", ["ray", "no_such"])
def test_a_name_nobody_has_says_what_to_install(name: str) -> None:
    """R4.5: no plugin here starts actors; whoever brings one registers it like any other."""
    with pytest.raises(PluginNotFoundError) as caught:
        launch(name)
    assert f"no executor plugin '{name}'" in str(caught.value)
    assert f"install a distribution that provides the entry point hardpoint.executor.v1:{name}" in str(caught.value)


@pytest.mark.parametrize(("short", "name"), [("mp", "multiproc"), ("uni", "uniproc")])
def test_short_names_stand_for_plugins(short: str, name: str) -> None:
    """R4.5: whatever else is installed under such a name."""
    sections = EngineConfig.sections("fake", executor=short)
    assert EngineConfig.model_validate(sections).execution.executor == name


@pytest.mark.parametrize("executor", ["fake", f"{MODULE}:Direct"])
def test_what_an_executor_denies_is_refused_before_there_is_one(executor: str, made: list[str]) -> None:
    """R4.3: flags are read from the plugin's declaration or from the class, and default to no."""
    with pytest.raises(
        ConfigError, match=rf"executor:{executor} \(.*\) runs no pipeline; set --pipeline-parallel-size 1"
    ):
        start(executor, pipeline_parallel_size=2)
    assert made == []


def test_what_a_class_claims_is_granted(made: list[str]) -> None:
    """R4.3."""
    core = start(f"{MODULE}:Staged", pipeline_parallel_size=2)
    assert made == ["Staged"]
    core.shutdown()


def test_sizes_of_the_grid_reach_the_workers() -> None:
    """Ranks are counted once, from the sizes of the grid; platform and workers see the same number."""
    started = launch(f"{MODULE}:Staged", tensor_parallel_size=4, pipeline_parallel_size=2)
    assert started.spec.worker_config.parallel == ParallelSlice(
        world_size=8, tensor_parallel_size=4, pipeline_parallel_size=2
    )
    assert launch("fake").spec.worker_config.parallel == ParallelSlice()


def test_flags_are_no_by_default() -> None:
    """R4.3: on the class, where they can be read without an instance."""
    assert not Executor.supports_pipeline_parallel
    assert not Executor.uses_actor_framework


def test_a_path_is_reported_like_a_plugin() -> None:
    """It is in the plan, in every report and in every message, by the path."""
    started = launch(f"{MODULE}:Direct")
    assert started.runtime.plan.selected("executor").label == f"executor:{MODULE}:Direct (by name)"
    build_engine(started.spec, started.runtime).shutdown()
    (row,) = [row for row in started.runtime.report().plugins if row.name == f"{MODULE}:Direct"]
    assert row.kind == "executor"


def test_an_installed_plugin_with_a_dot_in_its_name_is_no_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """R4.6: the registry is asked first."""
    folder = tmp_path / "acme_parts-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\nName: acme-parts\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(f"[hardpoint.executor.v1]\nacme.fast = {MODULE}:function\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    started = launch("acme.fast")
    assert started.runtime.plan.selected("executor").distribution == "acme-parts"
    build_engine(started.spec, started.runtime).shutdown()

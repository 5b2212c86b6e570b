"""What every platform inherits (spec 12 section 3)."""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import sys
import threading
from collections.abc import Mapping, Sequence
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from hardpoint.interfaces import DeviceDescription, EngineSettings, LogicalDevice, Platform, PlatformKind, ThreadPlan


class Paper(Platform):
    """The least a platform must say (R12.27, by plugin names instead of class names)."""

    name: ClassVar[str] = "paper"
    device_type: ClassVar[str] = "paper"

    def __init__(self, sheets: int = 2) -> None:
        self.sheets = sheets

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        return DeviceDescription(device_type="paper", name=f"sheet {device}")

    def check_and_update(self, settings: EngineSettings) -> None:
        settings.worker = settings.worker or "pencil"

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        return ThreadPlan(compute_threads=1)

    def attention_candidates(self) -> Sequence[str]:
        return ()

    def memory_budget(self, device: LogicalDevice) -> int:
        return 100

    def memory_used(self, device: LogicalDevice) -> int:
        return 10

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> Any:
        return None


class Folded(Paper):
    """Has graphs."""

    made: ClassVar[list[object]] = []

    @classmethod
    def create_graph_pool(cls) -> Any:
        cls.made.append(object())
        return cls.made[-1]


class FoldedTwice(Folded):
    """Shares its parent's pool."""


class Framework(ModuleType):
    """A framework with a namespace for the device type ``paper``."""

    def __init__(self) -> None:
        super().__init__("torch")
        self.paper = SimpleNamespace(mem_get_info=lambda: (60, 100), __deepcopy__="not callable", __reduce__="neither")


@pytest.fixture
def framework(monkeypatch: pytest.MonkeyPatch) -> Framework:
    loaded = Framework()
    monkeypatch.setitem(sys.modules, "torch", loaded)
    return loaded


def test_the_defaults() -> None:
    """R12.20."""
    assert (Platform.kind, Platform.name, Platform.device_type) == (PlatformKind.OUT_OF_TREE, "", "cpu")
    assert (Platform.dispatch_key, Platform.cluster_resource_key, Platform.visibility_variable) == ("CPU", "", "")
    assert (Platform.simple_compile_backend, Platform.collective_backend) == ("inductor", "")
    assert (Platform.communicator, Platform._graph_pool) == ("", None)
    for empty in (Platform.mask_suppressing_variables, Platform.supported_quantization, Platform.extra_environment):
        assert tuple(empty) == ()


@pytest.mark.parametrize(
    ("kind", "answers"),
    [
        (PlatformKind.CPU, (False, False, False)),
        (PlatformKind.CUDA, (True, False, False)),
        (PlatformKind.ROCM, (False, True, False)),
        (PlatformKind.OUT_OF_TREE, (False, False, True)),
    ],
)
def test_predicates_follow_the_kind(kind: PlatformKind, answers: tuple[bool, ...]) -> None:
    """R12.21."""
    platform = type("Of", (Paper,), {"kind": kind})()
    assert (platform.is_cuda, platform.is_rocm, platform.is_out_of_tree) == answers


class TestGraphPool:
    @pytest.fixture(autouse=True)
    def fresh(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(Folded, "made", [])
        monkeypatch.setattr(Folded, "_graph_pool", None, raising=False)

    def test_it_is_made_once_per_process_on_first_request(self) -> None:
        """R12.22: at class level, whatever the instance; R12.20: unset before."""
        assert Folded.made == []
        pools = {id(Folded.graph_pool()), id(Folded().graph_pool()), id(FoldedTwice(3).graph_pool())}
        assert len(pools) == len(Folded.made) == 1

    def test_concurrent_first_requests_make_one(self) -> None:
        threads = [threading.Thread(target=Folded.graph_pool) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(Folded.made) == 1

    def test_a_forked_child_makes_its_own(self) -> None:
        """R12.22: once per process."""
        Folded.graph_pool()
        queue: Any = multiprocessing.get_context("fork").SimpleQueue()
        child = multiprocessing.get_context("fork").Process(
            target=lambda: (Folded.graph_pool(), queue.put(len(Folded.made)))
        )
        child.start()
        assert queue.get() == 2
        child.join()
        assert len(Folded.made) == 1

    def test_a_platform_without_graphs_says_so(self) -> None:
        with pytest.raises(TypeError, match="platform 'paper' captures no graphs.*create_graph_pool"):
            Paper().graph_pool()

    def test_it_is_no_part_of_an_instance(self) -> None:
        """I12.7: a pool cannot be copied, so none may hang on an instance."""
        platform = Folded()
        platform.graph_pool()
        assert vars(pickle.loads(pickle.dumps(platform))) == {"sheets": 2}  # noqa: S301 (own bytes)


class TestForwarding:
    def test_missing_names_come_from_the_frameworks_namespace(self, framework: Framework) -> None:
        """R12.23."""
        assert getattr(Paper(), "mem_get_info")() == (60, 100)  # noqa: B009 (no static name)

    def test_own_names_come_first(self, framework: Framework) -> None:
        framework.paper.sheets = 99
        framework.paper.memory_used = lambda device: 99
        assert (Paper().sheets, Paper().memory_used(LogicalDevice(0))) == (2, 10)

    @pytest.mark.parametrize("name", ["__deepcopy__", "__getstate_x__", "__reduce_me__", "__fspath__"])
    def test_dunder_names_never_do(self, framework: Framework, name: str) -> None:
        """R12.23, P12.9."""
        setattr(framework.paper, name, "not callable")
        with pytest.raises(AttributeError, match=name):
            getattr(Paper(), name)

    def test_a_name_in_neither_place_names_both(self, framework: Framework) -> None:
        """R12.24."""
        with pytest.raises(
            AttributeError, match=r"platform 'paper' has no attribute 'ink', and neither has torch.paper"
        ):
            getattr(Paper(), "ink")  # noqa: B009
        del framework.paper
        with pytest.raises(AttributeError, match=r"'mem_get_info', and neither has torch.paper"):
            getattr(Paper(), "mem_get_info")  # noqa: B009

    def test_without_the_framework_the_message_says_so(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """R12.24: and asking loads nothing."""
        monkeypatch.delitem(sys.modules, "torch", raising=False)
        with pytest.raises(AttributeError, match="'mem_get_info', and torch, which might have it, is not loaded"):
            getattr(Paper(), "mem_get_info")  # noqa: B009
        assert "torch" not in sys.modules


def test_platforms_classes_and_records_can_be_copied(framework: Framework) -> None:
    """I12.7, P12.9: also while the framework answers for names that copying looks up."""
    for copied in (lambda value: pickle.loads(pickle.dumps(value)), copy.copy, copy.deepcopy):  # noqa: S301 (own bytes)
        assert copied(Paper) is Paper
        again = copied(Paper(7))
        assert (type(again), again.sheets, again.name) == (Paper, 7, "paper")
        for record in (
            EngineSettings(worker="pencil", model={"layers": 2}),
            ThreadPlan(compute_threads=3, cores=(1, 2)),
            DeviceDescription(device_type="paper", name="sheet", features=frozenset({"ruled"})),
        ):
            assert copied(record) == record
    settings = EngineSettings(block_size=16)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(settings), type=EngineSettings) == settings

"""Conformance of the plugin kind ``platform``: derive from :class:`PlatformSuite` and name your plugin."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable, Sequence
from functools import reduce
from types import MappingProxyType, ModuleType, SimpleNamespace
from typing import Any, ClassVar

import msgspec
import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    DeviceDescription,
    EngineSettings,
    LogicalDevice,
    Platform,
    PlatformKind,
    PluginContext,
    PluginDeclaration,
    ProbeResult,
    ProbeStatus,
    ThreadPlan,
)
from hardpoint.plugins.plan import PlannedPlugin
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["PlatformSuite"]

DEVICE = LogicalDevice(0)
DEVICE_NODES = ("/dev/nvidia", "/dev/kfd", "/dev/dri", "/dev/accel", "/dev/davinci", "/dev/habanalabs")
DUNDERS = ("__name_of_the_kit__", "__deepcopy__", "__copy__", "__setstate__", "__getnewargs__")
DTYPES = ("float32", "bfloat16", "float16")
TEXTS = (
    "device_type",
    "dispatch_key",
    "cluster_resource_key",
    "visibility_variable",
    "simple_compile_backend",
    "collective_backend",
    "communicator",
)
LISTS = ("mask_suppressing_variables", "supported_quantization", "extra_environment")
CHOICES: tuple[tuple[str, Any], ...] = (
    ("worker", "a-worker"),
    ("executor", "an-executor"),
    *(("dtype", dtype) for dtype in DTYPES),
    *(("kv_cache_dtype", dtype) for dtype in DTYPES),
    ("block_size", 48),
    ("attention_backend", "a-backend"),
    ("max_num_seqs", 3),
    ("max_num_batched_tokens", 96),
    ("kv_cache_bytes", 1 << 20),
)
IMPOSSIBLE = (("world_size", 0), ("block_size", 0), ("max_num_seqs", -1), ("kv_cache_bytes", 0))
_IN_A_PROCESS = """
import importlib, json, os, sys
from operator import attrgetter
from hardpoint.interfaces import EngineSettings, LogicalDevice, declaration_of
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.roles import ProcessRole
module, _, attribute = sys.argv[1].partition(":")
options, nodes, bind = json.loads(sys.argv[2]), tuple(json.loads(sys.argv[3])), sys.argv[4] == "bind"

def kept_open():
    folder = "/proc/self/fd"
    links = [os.readlink(f"{folder}/{n}") for n in os.listdir(folder) if os.path.exists(f"{folder}/{n}")]
    return [link for link in links if link.startswith(nodes)]

factory = attrgetter(attribute)(importlib.import_module(module))
declaration, before, found = declaration_of(factory), dict(os.environ), {}
answers = [declaration.probe() for _ in range(2)]
changed = dict(os.environ) != before
found["after the probe"] = {"framework": "torch" in sys.modules, "open": kept_open(), "environment": changed}
platform = factory(PluginContext("under-test", 1, frozenset({ProcessRole.WORKER}), 0), declaration.options(**options))
platform.check_and_update(EngineSettings())
plan = platform.thread_plan(1, dict(os.environ))
platform.attention_candidates(); platform.capabilities()
found["after the settings"] = {"framework": "torch" in sys.modules, "open": kept_open(), "environment": False}
if bind:
    device = LogicalDevice(0)
    bound = [str(getattr(platform.init_worker(device, plan), "type", platform.device_type)) for _ in range(2)]
    platform.synchronize(device)
    found = {"types": bound, "budget": platform.memory_budget(device), "used": platform.memory_used(device)}
    found["wanted"] = platform.device_type
print(json.dumps(found))
"""


class PlatformSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.Platform`.

    Everything but :meth:`test_a_worker_can_be_bound` runs on machines without the device; ``device_present`` adds that
    one. ``device_nodes`` are the beginnings of the device files that only a bound process may keep open.
    """

    kind: ClassVar[str] = "platform"
    torch_free: ClassVar[bool] = True
    device_present: ClassVar[bool] = False
    device_nodes: ClassVar[Sequence[str]] = DEVICE_NODES

    def create_platform(self, ctx: PluginContext) -> Platform:
        """The platform under test, as its factory makes it."""
        made: Platform = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def platform(self) -> Platform:
        return self.create_platform(self.context())

    def in_a_process(self, planned: PlannedPlugin, mode: str) -> dict[str, Any]:
        """What a fresh process sees that probes, creates and (``mode`` "bind") binds the installed platform."""
        arguments = (planned.entry_point, _json(self.options), _json(self.device_nodes), mode)
        done = subprocess.run(
            [sys.executable, "-c", _IN_A_PROCESS, *arguments], capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = msgspec.json.decode(done.stdout.splitlines()[-1])
        return found

    def test_the_probe_answers(self, declaration: PluginDeclaration) -> None:
        """R12.25 as amended: available, absent or broken, always with a reason, and the same when asked again."""
        assert declaration.probe is not None, "a platform without a probe is never chosen"
        first, second = declaration.probe(), declaration.probe()
        assert isinstance(first, ProbeResult)
        assert isinstance(first.status, ProbeStatus)
        assert first.reason.strip(), "an answer without a reason helps nobody"
        assert first == second

    def test_nothing_is_initialized_before_the_worker(self, planned: PlannedPlugin) -> None:
        """R12.25, R12.28: probing and settling load no framework, open no device and leave the environment alone."""
        for moment, seen in self.in_a_process(planned, "look").items():
            assert not seen["framework"], f"the framework is loaded {moment}"
            assert seen["open"] == [], f"devices are open {moment}"
            assert not seen["environment"], f"the environment is another one {moment}"

    def test_a_worker_can_be_bound(self, planned: PlannedPlugin) -> None:
        """Binding twice is binding once, and the numbers afterwards make sense."""
        if not self.device_present:
            pytest.skip("no device here; set device_present where there is one")
        seen = self.in_a_process(planned, "bind")
        assert seen["types"] == [seen["wanted"]] * 2
        assert seen["budget"] > 0
        assert seen["used"] >= 0

    def test_its_attributes_say_what_it_is(self, platform: Platform) -> None:
        """R12.20, R12.21."""
        assert isinstance(platform.kind, PlatformKind)
        assert platform.name
        assert platform.device_type
        for name in TEXTS:
            assert isinstance(getattr(platform, name), str), name
        for name in LISTS:
            _check_names(getattr(platform, name), name)
        answers = [platform.is_cuda, platform.is_rocm, platform.is_out_of_tree]
        wanted = [PlatformKind.CUDA, PlatformKind.ROCM, PlatformKind.OUT_OF_TREE]
        assert answers == [platform.kind is kind for kind in wanted]

    def test_it_names_a_worker(self, platform: Platform) -> None:
        """R12.28, P12.10."""
        assert settled(platform).worker, "check_and_update must set settings.worker"

    @pytest.mark.parametrize(("field", "value"), CHOICES)
    def test_what_the_user_chose_stays_or_is_refused(self, platform: Platform, field: str, value: Any) -> None:
        """R12.28: a platform fills what is unset; it never changes a choice silently."""
        try:
            left = getattr(settled(platform, **{field: value}), field)
        except ConfigError as error:
            named, left = str(value) in str(error), value
        else:
            named = True
        assert named, f"the refusal does not name the value {value!r}"
        assert left == value

    def test_some_dtype_is_accepted(self, platform: Platform) -> None:
        assert [dtype for dtype in DTYPES if _accepts(platform, dtype)], f"it runs none of {', '.join(DTYPES)}"

    def test_what_it_only_reads_stays(self, platform: Platform) -> None:
        model = {"num_hidden_layers": 2, "nested": {"factor": 1.5}}
        settings = settled(platform, architecture="SomeModel", model=copy.deepcopy(model))
        assert (settings.architecture, settings.model, settings.world_size) == ("SomeModel", model, 1)

    def test_settling_again_changes_nothing(self, platform: Platform) -> None:
        """Every process may settle what the launcher has settled."""
        settings = settled(platform)
        before = msgspec.json.encode(settings)
        platform.check_and_update(settings)
        assert msgspec.json.encode(settings) == before

    def test_what_it_fills_in_is_possible(self, platform: Platform) -> None:
        settings = settled(platform)
        for field in ("block_size", "preferred_block_size", "max_num_seqs", "max_num_batched_tokens", "kv_cache_bytes"):
            value = getattr(settings, field)
            assert value is None or (type(value) is int and value > 0), f"{field} is {value!r}"
        seqs, tokens = settings.max_num_seqs, settings.max_num_batched_tokens
        assert seqs is None or tokens is None or tokens >= seqs, "not every sequence can advance in a step"

    @pytest.mark.parametrize(("field", "value"), IMPOSSIBLE)
    def test_the_impossible_is_refused(self, platform: Platform, field: str, value: int) -> None:
        with pytest.raises(ConfigError) as caught:
            settled(platform, **{field: value})
        assert str(value) in str(caught.value), "the refusal does not name the value"

    def test_the_thread_plan_is_sane(self, platform: Platform) -> None:
        """Counts of at least one, distinct cores, the same answer each time, and no more threads for more ranks."""
        nothing: Any = MappingProxyType({})
        plans = [platform.thread_plan(world_size, nothing) for world_size in (1, 2, 4, 64)]
        for plan in plans:
            assert isinstance(plan, ThreadPlan)
            assert plan.compute_threads >= 1
            assert plan.api_threads >= 1
            assert len(set(plan.cores)) == len(plan.cores)
            assert all(core >= 0 for core in plan.cores)
        counts = [plan.compute_threads for plan in plans]
        assert counts == sorted(counts, reverse=True), f"more ranks get more threads each: {counts}"
        assert platform.thread_plan(1, nothing) == plans[0]

    def test_attention_candidates_are_names(self, platform: Platform) -> None:
        _check_names(platform.attention_candidates(), "attention_candidates()")

    def test_kernel_candidates_are_names_by_seam(self, platform: Platform) -> None:
        """Which seams there are is the worker's to say."""
        _check_names(tuple(platform.kernel_candidates), "kernel_candidates")
        for seam, names in platform.kernel_candidates.items():
            _check_names(names, f"kernel_candidates[{seam!r}]")

    def test_the_description_is_plain_data(self, platform: Platform) -> None:
        """Capability decisions take a description, so tests must be able to fabricate one."""
        try:
            found = platform.describe(DEVICE)
        except ConfigError:
            pytest.skip("no device here")
        assert type(found) is DeviceDescription
        assert found.device_type == platform.device_type
        assert found.name
        assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=DeviceDescription) == found
        assert platform.describe(DEVICE) == found

    def test_memory_numbers_are_bytes(self, platform: Platform) -> None:
        try:
            memory = platform.describe(DEVICE).memory_bytes
        except ConfigError:
            pytest.skip("no device here")
        budget, used = platform.memory_budget(DEVICE), platform.memory_used(DEVICE)
        assert type(budget) is int
        assert type(used) is int
        assert budget > 0
        assert used >= 0
        assert not memory or budget <= memory, f"the budget of {budget} is more than the device's {memory} bytes"

    def test_device_ids_go_by_its_variable(self, platform: Platform) -> None:
        """R12.31, R12.34, R12.35."""
        variable = platform.visibility_variable
        devices = platform.device_map({variable: "4,5"} if variable else {})
        visible = [devices.logical_to_visible(LogicalDevice(index)) for index in (0, 1)]
        physical = [devices.logical_to_physical(LogicalDevice(index)) for index in (0, 1)]
        assert (physical, visible) == (([4, 5] if variable else [0, 1]), [0, 1])

    def test_it_can_be_copied(self, platform: Platform, framework: SimpleNamespace) -> None:
        """I12.7, P12.9: instance and class, also while the framework would answer for what copying looks up."""
        kind = type(platform)
        start: Any = sys.modules[kind.__module__]
        place = reduce(lambda found, name: getattr(found, name, None), kind.__qualname__.split("."), start)
        assert place is kind, f"{kind.__qualname__} is not where its name says, so other processes cannot find it"
        copiers: tuple[Callable[[Platform], Platform], ...] = (copy.copy, copy.deepcopy)
        for copied in copiers:
            again = copied(platform)
            assert type(again) is kind
            assert vars(again).keys() == vars(platform).keys()
            assert again.attention_candidates() == platform.attention_candidates()

    def test_only_plain_names_are_forwarded(self, platform: Platform, framework: SimpleNamespace) -> None:
        """R12.23: missing names come from the framework's namespace of the device type, dunder names never."""
        assert getattr(platform, "name_of_the_kit")() == "forwarded"  # noqa: B009 (no static name)
        for name in set(DUNDERS) - set(dir(type(platform))):
            with pytest.raises(AttributeError):
                getattr(platform, name)

    def test_a_name_in_neither_place_names_both(self, platform: Platform, framework: SimpleNamespace) -> None:
        """R12.24."""
        with pytest.raises(AttributeError) as caught:
            getattr(platform, "no_such_name_at_all")  # noqa: B009
        for part in ("no_such_name_at_all", platform.name, f"torch.{platform.device_type}"):
            assert part in str(caught.value), f"the error does not name {part}"

    def test_capabilities_can_be_shown(self, platform: Platform) -> None:
        found = platform.capabilities()
        assert all(isinstance(key, str) for key in found)
        msgspec.json.encode(found)

    def test_the_graph_pool_is_one(self, platform: Platform) -> None:
        """R12.22: made by the first who asks, for the whole process; a platform without graphs says so."""
        try:
            pool = platform.graph_pool()
        except TypeError as error:
            told = str(error)
        else:
            told = platform.name
            assert pool is platform.graph_pool()
            assert pool is type(platform).graph_pool()
        assert platform.name in told, "the refusal does not name the platform"

    @pytest.fixture
    def framework(self, platform: Platform, monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
        """Stands in for the framework, whose namespace of the device answers for the names copying asks for."""
        names = {"name_of_the_kit": lambda: "forwarded", **dict.fromkeys(DUNDERS, "not callable")}
        namespace = SimpleNamespace(**names)
        module = ModuleType("torch")
        setattr(module, platform.device_type, namespace)
        monkeypatch.setitem(sys.modules, "torch", module)
        return namespace


def settled(platform: Platform, **given: Any) -> EngineSettings:
    """Settings after the platform has seen them."""
    settings = EngineSettings(**given)
    platform.check_and_update(settings)
    return settings


def _accepts(platform: Platform, dtype: str) -> bool:
    try:
        return settled(platform, dtype=dtype).dtype == dtype
    except ConfigError:
        return False


def _check_names(names: Sequence[str], what: str) -> None:
    assert not isinstance(names, str), f"{what} is one text, not a sequence of names"
    assert all(isinstance(name, str) and name for name in names), what
    assert len(set(names)) == len(names), f"{what} names something twice"


def _json(value: Any) -> str:
    return msgspec.json.encode(value).decode()

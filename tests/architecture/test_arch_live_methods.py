"""L12.14: every method of an interface has an effect: the kit of its kind calls each one.

The kits run over the specimens of their own tests, whose methods take note of being called. Methods that only a child
process of the kit calls are looked for in its source.
"""

from __future__ import annotations

import functools
import importlib.util
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import pytest

import hardpoint.interfaces
from hardpoint.testing.kits import kinds_with_kit, kit_of
from hardpoint.testing.suite_runner import run_suite
from workspace import ROOT

pytestmark = pytest.mark.timeout(300)

CORE, TORCH = "core/tests/testing/test_testing_", "plugins/testing_torch/tests/test_testing_torch_"
UNIPROC = ("hardpoint_executors.uniproc", "hardpoint.testing.faulty_worker")
RENDERER = ("hardpoint_model_io.chat.renderer",)
DECODER = ("hardpoint_models.decoder", "hardpoint_models.pooled_model")
TOKENIZER = ("hardpoint_model_io.tokenizers.hf", "hardpoint_model_io.tokenizers.decoding")


@dataclass(frozen=True, slots=True)
class Specimen:
    """A conformance class, and the interfaces that plugins of its kind implement.

    ``homes`` are modules of the implementation that the class's own module does not import.
    """

    file: str
    suite: str
    interfaces: tuple[str, ...]
    homes: tuple[str, ...] = ()


SPECIMENS: Mapping[str, Specimen] = {
    "attention_backend": Specimen(
        f"{TORCH}attention_suite.py", "PlainSuite", ("AttentionBackend", "AttentionImpl", "AttentionMetadataBuilder")
    ),
    "chat_renderer": Specimen(
        "plugins/model_io/tests/test_model_io_conformance.py", "TestJinja", ("ChatRenderer",), RENDERER
    ),
    "cli_command": Specimen(f"{CORE}cli_command_suite.py", "TestCount", ("CliCommand",)),
    "communicator": Specimen(f"{TORCH}communicator_suite.py", "TestPlain", ("Communicator",)),
    "compiler": Specimen(f"{TORCH}compiler_suite.py", "TestPlain", ("Compiler",)),
    "endpoint": Specimen(f"{CORE}endpoint_suite.py", "TestSayEndpoint", ("Endpoint",)),
    "executor": Specimen(
        "plugins/executors/tests/test_exec_conformance.py", "TestUniproc", ("Executor", "PendingOutput"), UNIPROC
    ),
    "graph_backend": Specimen(f"{TORCH}graph_backend_suite.py", "TestFake", ("GraphBackend", "CapturedGraph")),
    "io_processor": Specimen(f"{CORE}io_processor_suite.py", "TestChoose", ("IOProcessor",)),
    "kernel_override": Specimen(f"{TORCH}kernel_override_suite.py", "TestAddRmsNorm", ("KernelOverride",)),
    "kv_cache_spec": Specimen(f"{CORE}kv_cache_spec_suite.py", "TestPlain", ("KVCacheManager", "KVCacheSpec")),
    "kv_layout": Specimen(f"{CORE}kv_layout_suite.py", "TestOneByOne", ("KVLayout",)),
    "logits_processor": Specimen(f"{TORCH}logits_processor_suite.py", "TestBan", ("LogitsProcessor",)),
    "model": Specimen(f"{TORCH}model_suite.py", "TestLlama", ("Model",), DECODER),
    "model_source": Specimen(f"{CORE}model_source_suite.py", "TestShelfSource", ("ModelSource",)),
    "platform": Specimen(f"{CORE}platform_suite.py", "TestFakePlatform", ("Platform",)),
    "quantization": Specimen(f"{TORCH}quantization_suite.py", "TestRounded", ("QuantizationMethod", "LinearMethod")),
    "scheduler": Specimen(f"{CORE}scheduler_suite.py", "TestFakeScheduler", ("Scheduler",)),
    "scheduling_policy": Specimen(
        f"{CORE}scheduling_policy_suite.py", "TestCounting", ("SchedulingPolicy", "RequestQueue")
    ),
    "stat_logger": Specimen(f"{CORE}stat_logger_suite.py", "TestTotals", ("StatLogger", "MetricsExporter")),
    "tokenizer": Specimen(
        "plugins/model_io/tests/test_model_io_conformance.py",
        "TestHuggingFaceTokenizer",
        ("TokenizerProvider", "Tokenizer", "DecodeStream"),
        TOKENIZER,
    ),
    "weight_loader": Specimen(f"{CORE}weight_loader_suite.py", "TestLineLoader", ("WeightLoader",)),
    "worker": Specimen("plugins/torch_runtime/tests/test_torch_worker_suite.py", "TestTorchWorker", ("Worker",)),
}
WITHOUT_METHODS = {"custom_op", "hash", "hooks"}
"""Descriptions and functions; each hook has an occasion of its own in the kit, which its tests check."""

OFFERED = {
    "EngineClient", "KVBlockPool", "ModelRouter", "PluginAccess", "RequestView",
}  # fmt: skip
"""What plugins are handed and do not write themselves; those who hand it out test it."""

SHAPES = {"HashFunction"}
"""Callables, which have nothing but their call."""

IN_CHILD_PROCESSES = {"Platform.init_worker", "Platform.synchronize"}


def methods_of(interface: str) -> list[str]:
    """Public methods and properties, those with a default as well; properties of a protocol may be plain attributes."""
    base = getattr(hardpoint.interfaces, interface)
    kinds: tuple[type[Any], ...] = (FunctionType, property, classmethod, staticmethod)
    if getattr(base, "_is_protocol", False):
        kinds = (FunctionType,)
    return [name for name, value in vars(base).items() if name[0] != "_" and isinstance(value, kinds)]


def noting(value: Any, note: Callable[[], None]) -> Any:
    """The function, property or class method, which calls ``note`` first."""
    if isinstance(value, classmethod | staticmethod):
        return type(value)(noting(value.__func__, note))
    if isinstance(value, property):
        return property(noting(value.fget, note))
    if not isinstance(value, FunctionType):
        # A field of a struct in the place of a property: its instances read it themselves.
        note()
        return value

    @functools.wraps(value)
    def watched(*arguments: Any, **named: Any) -> Any:
        note()
        return value(*arguments, **named)

    return watched


def family(modules: list[ModuleType], interface: str) -> Iterator[type]:
    """The interface, and every class known now that derives from it or, for a protocol, has all its methods.

    What such a class inherits from others of ``modules`` is watched there.
    """
    base = getattr(hardpoint.interfaces, interface)
    waiting, seen = [base], {base}
    while waiting:
        owner = waiting.pop()
        yield owner
        derived = set(type.__subclasses__(owner)) - seen
        seen |= derived
        waiting += derived
    methods = set(methods_of(interface))
    if getattr(base, "_is_protocol", False):
        local = {value for module in modules for value in vars(module).values() if inspect.isclass(value)}
        whole = [owner for owner in local - seen if all(hasattr(owner, name) for name in methods)]
        yield from {ancestor for owner in whole for ancestor in owner.__mro__ if ancestor in local - seen}


def load(file: str) -> ModuleType:
    name = f"specimen_{Path(file).stem}"
    spec = importlib.util.spec_from_file_location(name, ROOT / file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def test_every_kind_with_a_kit_has_a_specimen() -> None:
    assert set(kinds_with_kit()) == {*SPECIMENS, *WITHOUT_METHODS}


def test_no_interface_is_forgotten() -> None:
    """L12.14: what is abstract is tested by a kit, or handed out by those who test it."""
    public = {name: getattr(hardpoint.interfaces, name) for name in hardpoint.interfaces.__all__}
    abstract = {
        name
        for name, value in public.items()
        if inspect.isclass(value) and (inspect.isabstract(value) or getattr(value, "_is_protocol", False))
    }
    tested = {interface for specimen in SPECIMENS.values() for interface in specimen.interfaces}
    assert abstract - tested == OFFERED | SHAPES


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECIMENS)
def test_the_kit_calls_every_method(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """L12.14."""
    specimen, called = SPECIMENS[kind], set[str]()
    module = load(specimen.file)
    modules = [module, *map(importlib.import_module, specimen.homes)]
    for interface in specimen.interfaces:
        for owner in list(family(modules, interface)):
            for name in methods_of(interface):
                if name in vars(owner) and not getattr(vars(owner)[name], "__isabstractmethod__", False):
                    note = functools.partial(called.add, f"{interface}.{name}")
                    monkeypatch.setattr(owner, name, noting(vars(owner)[name], note))
                    if name == "create_graph_pool":  # whoever asked for the pool before has left it made
                        monkeypatch.setattr(owner, "_graph_pool", None, raising=False)
    outcome = run_suite(getattr(module, specimen.suite))
    assert outcome.passed, outcome.failed  # that all pass is for the kit's own tests to say
    every = {f"{interface}.{name}" for interface in specimen.interfaces for name in methods_of(interface)}
    assert every - called - IN_CHILD_PROCESSES == set()


@pytest.mark.parametrize("method", sorted(IN_CHILD_PROCESSES))
def test_the_kit_calls_it_in_a_child(method: str) -> None:
    """L12.14."""
    kit = kit_of(method.partition(".")[0].lower())
    assert kit is not None
    assert f".{method.partition('.')[2]}(" in inspect.getsource(sys.modules[kit.__module__])

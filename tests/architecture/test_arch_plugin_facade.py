"""Plugins see the core as a stranger's plugin would: through what it exports, never through its insides."""

from __future__ import annotations

import pytest

from import_rules import Import, declared_source, exported_names, imports_of, module_name
from workspace import ROOT, Distribution, plugin_distributions

FACADE = frozenset(
    {"hardpoint", "hardpoint.config", "hardpoint.errors", "hardpoint.ipc", "hardpoint.logging", "hardpoint.process"}
)
FACADE_TREES = ("hardpoint.interfaces", "hardpoint.testing")
RUNTIME = "hardpoint_torch_runtime"


def in_facade(module: str) -> bool:
    if any(part.startswith("_") for part in module.split(".")):
        return False
    return module in FACADE or any(module == tree or module.startswith(tree + ".") for tree in FACADE_TREES)


def runtime_exports(module: str) -> frozenset[str]:
    """What a module of the torch runtime exports; a module without ``__all__`` exports nothing."""
    base = ROOT / "plugins/torch_runtime/src" / module.replace(".", "/")
    for path in (base / "__init__.py", base.with_suffix(".py")):
        if path.is_file():
            return exported_names(declared_source(path)) or frozenset()
    return frozenset()


def is_allowed(imported: Import, own_package: str) -> bool:
    if imported.top_level == "hardpoint":
        if imported.name is not None and imported.name.startswith("_") and imported.name != "__version__":
            return False
        if imported.module == "hardpoint" and imported.name is not None:
            is_module = (ROOT / "core/src/hardpoint" / imported.name).is_dir() or (
                ROOT / "core/src/hardpoint" / f"{imported.name}.py"
            ).is_file()
            return in_facade(f"hardpoint.{imported.name}") if is_module else True
        return in_facade(imported.module)
    if imported.top_level == RUNTIME and own_package != RUNTIME:
        exports = runtime_exports(imported.module)
        return bool(exports) if imported.name is None else imported.name in exports
    return True


def violations(source: str, module: str, own_package: str, is_package: bool = False) -> list[str]:
    return [
        f"{module}:{found.line} imports {found.module}{'.' + found.name if found.name else ''}"
        for found in imports_of(source, module, is_package)
        if not is_allowed(found, own_package)
    ]


@pytest.mark.parametrize("distribution", plugin_distributions(), ids=lambda dist: dist.name)
def test_plugins_import_only_the_facade(distribution: Distribution) -> None:
    found = [
        violation
        for path in distribution.python_files()
        for violation in violations(
            path.read_text(encoding="utf-8"),
            module_name(path, distribution.source.parent),
            distribution.package,
            path.name == "__init__.py",
        )
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    [
        "from hardpoint.engine.core import EngineCore",
        "import hardpoint.plugins.registry",
        "def f():\n    from hardpoint.launch import prepare",
        "from hardpoint.interfaces._private import X",
        "from hardpoint.errors import _hidden",
        "import_module('hardpoint.ipc.codec')",
        "from hardpoint_torch_runtime.no_such_module import anything",
        "from hardpoint_torch_runtime import _hidden",
    ],
)
def test_each_fault_is_caught(source: str) -> None:
    assert violations(source, "hardpoint_models.llama", "hardpoint_models")


@pytest.mark.parametrize(
    "source",
    [
        "import hardpoint",
        "from hardpoint import LLM, SamplingParams, __version__",
        "from hardpoint.interfaces import Worker",
        "from hardpoint.interfaces.attention import AttentionBackend",
        "from hardpoint.errors import HardpointError",
        "from hardpoint import errors",
        "from hardpoint.testing.worker import FakeWorker",
        "from . import layers",
        "import torch",
    ],
)
def test_what_is_allowed_passes(source: str) -> None:
    assert violations(source, "hardpoint_models.llama", "hardpoint_models") == []

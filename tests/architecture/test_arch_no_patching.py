"""No plugin replaces what belongs to others: nothing assigns to attributes of imported modules, classes or functions.

There is no interface that patches by path either; kernels are exchanged at declared seams.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from workspace import ROOT, Distribution, distributions

FOREIGN = ("hardpoint", "torch", "transformers", "triton", "numpy")
EXAMPLES = sorted(path.parent for path in ROOT.glob("examples_plugins/*/pyproject.toml"))


def foreign_names(tree: ast.Module) -> set[str]:
    """Names that imports bind, at the top or deferred, to something of the core, another plugin or a framework."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update((a.asname or a.name.partition(".")[0]) for a in node.names if _is_foreign(a.name))
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and _is_foreign(node.module or ""):
            names.update(alias.asname or alias.name for alias in node.names)
    return names


def _is_foreign(module: str) -> bool:
    return module.partition(".")[0].startswith(FOREIGN)


def patches(source: str) -> list[str]:
    """Assignments to, deletions of and ``setattr`` on attributes of foreign names, with their lines."""
    tree = ast.parse(source)
    names = foreign_names(tree)
    return [
        f"line {target.lineno}: changes {ast.unparse(target)}"
        for target in _targets(tree)
        if (root := _root(target)) is not None and root in names
    ]


def _targets(tree: ast.AST) -> Iterator[ast.expr]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign | ast.Delete):
            for target in node.targets:
                yield from _flat(target)
        elif isinstance(node, ast.AugAssign | ast.AnnAssign | ast.For):
            yield from _flat(node.target)
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr") and node.args:
            yield ast.copy_location(ast.Attribute(node.args[0], "?", ast.Load()), node)


def _flat(target: ast.expr) -> Iterator[ast.expr]:
    if isinstance(target, ast.Tuple | ast.List):
        for element in target.elts:
            yield from _flat(element)
    elif isinstance(target, ast.Attribute | ast.Subscript):
        yield target


def _root(target: ast.expr) -> str | None:
    """The name a chain of attributes begins with. Subscripts count for namespaces only: ``vars(m)``, ``m.__dict__``."""
    node: ast.expr = target
    if isinstance(node, ast.Subscript):
        node = node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "vars" and node.args:
            node = node.args[0]
        elif isinstance(node, ast.Attribute) and node.attr in ("__dict__", "modules"):
            node = node.value
        else:
            return None
    while isinstance(node, ast.Attribute):
        node = node.value
    return node.id if isinstance(node, ast.Name) else None


def patches_below(folder: Path) -> dict[str, list[str]]:
    found = {path: patches(path.read_text(encoding="utf-8")) for path in sorted(folder.rglob("*.py"))}
    return {path.relative_to(ROOT).as_posix(): lines for path, lines in found.items() if lines}


@pytest.mark.parametrize("distribution", distributions(), ids=lambda dist: dist.name)
def test_nothing_patches(distribution: Distribution) -> None:
    """L12.13."""
    assert patches_below(distribution.source) == {}


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_do_not_show_how_to_patch(example: Path) -> None:
    assert patches_below(example / "src") == {}


@pytest.mark.parametrize(
    "source",
    [
        "import torch\ntorch.nn.functional.silu = fast",
        "import torch.nn.functional as F\ndef f():\n    F.silu = fast",
        "from hardpoint.interfaces import Worker\nWorker.execute = mine",
        "from hardpoint_torch_runtime import layers\nlayers.norm.RMSNorm.forward = mine",
        "from hardpoint_models.decoder import DecoderModel as M\nM.forward, x = mine, 1",
        "import torch\nsetattr(torch.Tensor, 'add', mine)",
        "import torch\ndelattr(torch, 'add')",
        "import torch\ndel torch.add",
        "import torch\nvars(torch)['add'] = mine",
        "import torch\ntorch.__dict__['add'] = mine",
        "import torch\ntorch.backends.x: bool = True",
    ],
)
def test_a_patch_is_found(source: str) -> None:
    assert patches(source)


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nx = torch.ones(1)\nx.grad = None",
        "class A:\n    def f(self): self.forward = 1",
        "from hardpoint.interfaces import plugin\nname = plugin\ntable = {}\ntable['plugin'] = plugin",
        "import os\nos.environ['A'] = '1'",
        "import torch\nrows = {}\nrows[torch.float32] = 1",
    ],
)
def test_other_assignments_pass(source: str) -> None:
    assert patches(source) == []


def test_there_is_no_interface_that_patches_by_path() -> None:
    """L12.13: no public name promises it, here or in the torch runtime."""
    surface = (ROOT / "tests/architecture/public_surface.txt").read_text(encoding="utf-8").lower()
    assert "patch" not in surface.replace("dispatch", "")

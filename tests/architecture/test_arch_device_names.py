"""R12.19: only platforms talk to hardware. Core and model code never branch on a device's name or use its namespace."""

from __future__ import annotations

import ast
import re

import pytest

from workspace import ROOT, core, distributions

DEVICES = ("cpu", "cuda", "rocm", "hip", "xpu", "mps", "npu", "hpu", "tpu", "mlu", "musa", "privateuseone")
DEVICE_TEXT = re.compile(rf"({'|'.join(DEVICES)})(:\d+)?", re.IGNORECASE)
NAMESPACES = frozenset(DEVICES) - {"cpu"}
PREDICATES = frozenset(f"is_{name}" for name in DEVICES)
TEXT_TESTS = frozenset({"startswith", "endswith", "get"})

# Platforms, and families whose kernels serve the devices they name in a capability decision.
MAY_NAME_DEVICES = ("platforms/", "plugins/attention", "plugins/quantization", "plugins/testing_torch")

# Each use is about torch's own name for the host's memory, never about a platform.
JUSTIFIED = {
    "plugins/torch_runtime/src/hardpoint_torch_runtime/runner/buffers.py": "host memory needs no copy to the device",
    "plugins/torch_runtime/src/hardpoint_torch_runtime/runner/kv_memory.py": "host pages become resident when touched",
}


def faults(source: str) -> list[str]:
    """What in ``source`` decides by a device's name or reaches for its namespace."""
    return [
        f"line {node.lineno}: {fault}"
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.expr | ast.pattern | ast.stmt) and (fault := _fault(node))
    ]


def _fault(node: ast.AST) -> str | None:
    match node:
        case ast.Compare():
            names = [name for part in (node.left, *node.comparators) for name in _device_names(part)]
            return f"compares with the device name {names[0]!r}" if names else None
        case ast.MatchValue(value=value) if names := _device_names(value):
            return f"matches the device name {names[0]!r}"
        case ast.Call(func=ast.Attribute(attr=method), args=[first, *_]) if method in TEXT_TESTS and (
            names := _device_names(first)
        ):
            return f"asks by the device name {names[0]!r}"
        case ast.Subscript(value=ast.Dict() as table) if any(_device_names(key) for key in table.keys if key):
            return "chooses from a table of device names"
        case ast.Attribute(value=ast.Name(id="torch"), attr=namespace) if namespace in NAMESPACES:
            return f"uses torch.{namespace}"
        case ast.Attribute(attr=predicate) if predicate in PREDICATES:
            return f"asks {predicate}"
        case ast.Import(names=aliases) if found := [a.name for a in aliases if _is_namespace(a.name)]:
            return f"imports {found[0]}"
        case ast.ImportFrom(module=module, names=aliases) if _is_namespace(module or "") or (
            module == "torch" and any(alias.name in NAMESPACES for alias in aliases)
        ):
            return f"imports from {module}"
    return None


def _is_namespace(module: str) -> bool:
    parts = module.split(".")
    return parts[0] == "torch" and len(parts) > 1 and parts[1] in NAMESPACES


def _device_names(node: ast.expr) -> list[str]:
    """Device names among the constants of ``node``, a single one or a literal collection."""
    parts = node.elts if isinstance(node, ast.Tuple | ast.List | ast.Set) else [node]
    texts = [part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str)]
    return [text for text in texts if DEVICE_TEXT.fullmatch(text)]


def test_core_and_model_code_know_no_device_by_name() -> None:
    """R12.19."""
    found = {
        path.relative_to(ROOT).as_posix(): faults(path.read_text(encoding="utf-8"))
        for distribution in distributions()
        if not distribution.relative_folder.startswith(MAY_NAME_DEVICES)
        for path in distribution.python_files()
        if not path.is_relative_to(core().source / "testing")  # the kit for platforms must ask
    }
    assert {path: reasons for path, reasons in found.items() if reasons and path not in JUSTIFIED} == {}
    assert [path for path in JUSTIFIED if not found.get(path)] == [], "no longer needed among the justified"


@pytest.mark.parametrize(
    "source",
    [
        "if device.type == 'cuda': pass",
        "if 'hip' != name: pass",
        "fast = device in ('cuda', 'xpu')",
        "if str(device) == 'cuda:0': pass",
        "match device.type:\n    case 'rocm': pass",
        "if name.startswith('cuda'): pass",
        "kernel = {'cuda': a, 'cpu': b}[device.type]",
        "torch.cuda.synchronize()",
        "import torch.xpu",
        "from torch.cuda import Stream",
        "from torch import cuda",
        "if platform.is_rocm: pass",
        "if tensor.is_cuda: pass",
    ],
)
def test_each_fault_is_caught(source: str) -> None:
    """R12.19."""
    assert faults(source)


@pytest.mark.parametrize(
    "source",
    [
        "device = torch.device('cpu')",
        "CUDA = 'cuda'",
        "platform.synchronize(device)",
        "if platform.name == other.name: pass",
        "if sys.platform == 'linux': pass",
        "torch.cpu",
        "from torch import nn",
        "x = tensor.cpu()",
    ],
)
def test_harmless_neighbors_pass(source: str) -> None:
    assert faults(source) == []

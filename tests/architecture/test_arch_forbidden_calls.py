"""Nothing runs code from data: no pickle and its relatives, no eval or exec, no loader that unpickles."""

from __future__ import annotations

import ast

import pytest

from import_rules import called_name, imports_of
from workspace import ROOT, Distribution, distributions

MODULES = frozenset({"pickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib", "jsonpickle"})
BUILTINS = frozenset({"eval", "exec"})
UNSAFE_YAML = frozenset({"load", "load_all", "unsafe_load", "unsafe_load_all", "full_load", "full_load_all"})


def faults(source: str) -> list[str]:
    found = [f"line {imp.line}: imports {imp.module}" for imp in imports_of(source) if imp.top_level in MODULES]
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and (reason := _fault_of_call(node)):
            found.append(f"line {node.lineno}: {reason}")
    return found


def _fault_of_call(node: ast.Call) -> str | None:
    name = called_name(node)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    if isinstance(node.func, ast.Name) and name in BUILTINS:
        return f"calls {name}"
    owner = node.func.value.id if isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name) else ""
    if owner == "yaml" and name in UNSAFE_YAML:
        return f"calls yaml.{name}; use yaml.safe_load"
    if owner == "torch" and name == "load" and not _is_literal(keywords.get("weights_only"), True):
        return "calls torch.load without weights_only=True"
    if "allow_pickle" in keywords and not _is_literal(keywords["allow_pickle"], False):
        return "allows numpy to unpickle"
    if "trust_remote_code" in keywords and not _is_literal(keywords["trust_remote_code"], False):
        return "trusts remote code"
    return None


def _is_literal(node: ast.expr | None, value: bool) -> bool:
    return isinstance(node, ast.Constant) and node.value is value


@pytest.mark.parametrize("distribution", distributions(), ids=lambda dist: dist.name)
def test_no_source_file_runs_code_from_data(distribution: Distribution) -> None:
    found = {
        path.relative_to(ROOT).as_posix(): faults(path.read_text(encoding="utf-8"))
        for path in distribution.python_files()
    }
    assert {path: reasons for path, reasons in found.items() if reasons} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle",
        "def f():\n    from marshal import loads",
        "import_module('shelve')",
        "eval('1')",
        "exec(text)",
        "yaml.load(stream, Loader=yaml.Loader)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "AutoModel.from_pretrained(name, trust_remote_code=True)",
    ],
)
def test_each_fault_is_caught(source: str) -> None:
    assert faults(source)


@pytest.mark.parametrize(
    "source", ["model.eval()", "re.compile('a')", "yaml.safe_load(s)", "torch.load(p, weights_only=True)", "np.load(p)"]
)
def test_harmless_neighbors_pass(source: str) -> None:
    assert faults(source) == []

"""What others rely on: the names a plugin author may import, and what is behind them. Reviewed, so that changes show.

python tests/support/public_surface.py           show the difference
python tests/support/public_surface.py --write   accept it

``public_surface.txt`` holds the names; ``public_members.txt`` the methods with their parameters, the fields and the
words of enumerations behind them, the groups of entry points, the settings and the exit statuses.
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

from hardpoint import cli
from hardpoint.config import AppConfig, EngineConfig, PluginPolicy, ServerConfig
from hardpoint.plugins.kinds import KINDS
from import_rules import declared_source, exported_names, module_name
from workspace import ROOT, core

REVIEWED = ROOT / "tests/architecture/public_surface.txt"
REVIEWED_MEMBERS = ROOT / "tests/architecture/public_members.txt"
HEADER = "# Public names, reviewed. Change them with: python tests/support/public_surface.py --write\n"
SINGLE_MODULES = ("__init__.py", "config/__init__.py", "errors.py", "ipc/__init__.py", "logging.py", "process.py")


def public_files() -> list[Path]:
    """The façade modules of the core that exist; a module whose name starts with an underscore is private."""
    files = [core().source / name for name in SINGLE_MODULES]
    files += sorted((core().source / "interfaces").rglob("*.py"))
    return [path for path in files if path.is_file() and (path.stem == "__init__" or path.stem[0] != "_")]


def public_names(source: str) -> frozenset[str]:
    """``__all__`` where there is one; else what the module defines without a leading underscore."""
    listed = exported_names(source)
    return _definitions(ast.parse(source)) if listed is None else listed


def _definitions(tree: ast.Module) -> frozenset[str]:
    names: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign):
            names |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            names.add(node.target.id)
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.name for alias in node.names if alias.asname == alias.name}
    return frozenset(name for name in names if name == "__version__" or not name.startswith("_"))


def current_surface() -> list[str]:
    """``module.name`` for each public name, sorted."""
    root = core().source.parent
    return sorted(
        f"{module_name(path, root)}.{name}" for path in public_files() for name in public_names(declared_source(path))
    )


def members_of(source: str, module: str) -> list[str]:
    """What users of the public classes of a module see: fields, words of enumerations, methods with their parameters.

    A parameter with a default ends in ``=``, since only such a one may be added.
    """
    public = public_names(source)
    found = []
    for owner in ast.parse(source).body:
        if isinstance(owner, ast.ClassDef) and owner.name in public:
            found += [f"{module}.{owner.name}.{member}" for node in owner.body for member in _members(node)]
        elif isinstance(owner, ast.FunctionDef) and owner.name in public:
            found.append(f"{module}.{owner.name}{_parameters(owner)}")
    return found


def _members(node: ast.stmt) -> list[str]:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        decorators = {ast.unparse(decorator) for decorator in node.decorator_list}
        names = [node.name + ("" if "property" in decorators else _parameters(node))]
    elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        names = [node.target.id]
    elif isinstance(node, ast.Assign):
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
    else:
        names = []
    return [name for name in names if not name.startswith("_") or name.startswith(("__init__(", "__call__("))]


def _parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    given = function.args
    positional = [argument.arg for argument in (*given.posonlyargs, *given.args)]
    required = len(positional) - len(given.defaults)
    names = [name + ("=" if place >= required else "") for place, name in enumerate(positional)]
    names = names[1:] if names[:1] in (["self"], ["cls"]) else names
    names += [f"*{given.vararg.arg}"] if given.vararg else ["*"] if given.kwonlyargs else []
    pairs = zip(given.kwonlyargs, given.kw_defaults, strict=True)
    names += [argument.arg + ("" if default is None else "=") for argument, default in pairs]
    names += [f"**{given.kwarg.arg}"] if given.kwarg else []
    return f"({', '.join(names)})"


def current_members() -> list[str]:
    """Sorted, one line each."""
    root = core().source.parent
    lines = [line for path in public_files() for line in members_of(declared_source(path), module_name(path, root))]
    lines += [f"group {spec.group}" for spec in KINDS.values()]
    sections = {name: info.annotation for name, info in EngineConfig.model_fields.items()}
    sections |= {"server": ServerConfig, "plugin_policy": PluginPolicy}
    for section, model in sections.items():
        lines += [f"setting {section}.{field}" for field in getattr(model, "model_fields", {})]
    lines += [f"setting {field}" for field in AppConfig.model_fields]
    lines += [f"exit status {status}" for status in (0, cli._FAILURE, cli._USAGE, cli._INTERRUPTED)]
    return sorted(set(lines))


def reviewed_members() -> list[str]:
    return _reviewed(REVIEWED_MEMBERS)


def _reviewed(path: Path) -> list[str]:
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return [line for line in lines if line and not line.startswith("#")]


def difference() -> list[str]:
    """Unified diff from what was reviewed to what is there; empty when they agree."""
    pairs = ((REVIEWED, current_surface()), (REVIEWED_MEMBERS, current_members()))
    return [
        line
        for path, new in pairs
        for line in difflib.unified_diff(_reviewed(path), new, f"reviewed {path.name}", "current", lineterm="", n=0)
    ]


def main() -> None:
    print("\n".join(difference()) or "the public surface is as reviewed")
    if "--write" in sys.argv[1:]:
        REVIEWED.write_text(HEADER + "\n".join(current_surface()) + "\n", encoding="utf-8")
        REVIEWED_MEMBERS.write_text(HEADER + "\n".join(current_members()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

"""The names a plugin author may import. Run as a script to write down a reviewed change of them.

python tests/support/public_surface.py           show the difference
python tests/support/public_surface.py --write   accept it
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path

from import_rules import exported_names, module_name
from workspace import ROOT, core

REVIEWED = ROOT / "tests/architecture/public_surface.txt"
HEADER = "# Public names, reviewed. Change them with: python tests/support/public_surface.py --write\n"
SINGLE_MODULES = ("__init__.py", "errors.py", "ipc/__init__.py", "logging.py", "process.py")


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
        f"{module_name(path, root)}.{name}"
        for path in public_files()
        for name in public_names(path.read_text(encoding="utf-8"))
    )


def reviewed_surface() -> list[str]:
    lines = REVIEWED.read_text(encoding="utf-8").splitlines() if REVIEWED.is_file() else []
    return [line for line in lines if line and not line.startswith("#")]


def difference() -> list[str]:
    """Unified diff from the reviewed to the current surface; empty when they agree."""
    old, new = reviewed_surface(), current_surface()
    return list(difflib.unified_diff(old, new, "reviewed", "current", lineterm="", n=0))


def main() -> None:
    print("\n".join(difference()) or "the public surface is as reviewed")
    if "--write" in sys.argv[1:]:
        REVIEWED.write_text(HEADER + "\n".join(current_surface()) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()

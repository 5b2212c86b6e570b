"""For which devices the installed framework was built, told without importing it: its import takes a second."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

__all__ = ["FrameworkBuild", "version_number"]

_NAME = "torch"


@dataclass(frozen=True, slots=True)
class FrameworkBuild:
    """``cuda`` and ``hip`` are the runtime versions it was built with; None for a build without."""

    version: str
    cuda: str | None = None
    hip: str | None = None

    @classmethod
    def installed(cls) -> FrameworkBuild | None:
        """None where there is none."""
        try:
            spec = find_spec(_NAME)
        except (ImportError, ValueError):
            return None
        if spec is None or spec.origin is None:
            return None
        return cls.read(Path(spec.origin).with_name("version.py"))

    @classmethod
    def read(cls, path: Path) -> FrameworkBuild | None:
        """From the file in which builds note what they are; None for one that says nothing."""
        try:
            body = ast.parse(path.read_text(encoding="utf-8")).body
        except (OSError, SyntaxError):
            return None
        values: dict[str, str] = {}
        for node in body:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=str() as text))
                    | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant(value=str() as text))
                ):
                    values[name] = text
        if "__version__" not in values:
            return None
        return cls(values["__version__"], values.get("cuda"), values.get("hip"))


def version_number(text: str) -> tuple[int, int]:
    """(major, minor) of a version such as ``12.8`` or ``6.4.43482-0f2d60242``; a missing part counts as 0.

    Raises ``ValueError`` for a text that does not begin with a number.
    """
    major, _, rest = text.partition(".")
    minor = rest.partition(".")[0]
    return int(major), int(minor) if minor.isdecimal() else 0

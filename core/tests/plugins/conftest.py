"""Synthetic installed distributions: metadata folders and modules in a scratch folder."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from hardpoint.plugins.discovery import discover
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.records import Discovery
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.testing.hooks_reset import forget_hooks


class Site:
    """A scratch site-packages folder."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir(parents=True, exist_ok=True)

    def install(
        self,
        distribution: str,
        plugins: Mapping[str, str],
        *,
        version: str = "1.0",
        requires: Sequence[str] = (),
        modules: Mapping[str, str] | None = None,
        manifest: Mapping[str, Any] | None = None,
    ) -> Path:
        """``plugins`` maps ``kind:name`` (or ``group|name``) to an entry point value; ``modules`` names to source."""
        folder = self.root / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        lines: list[str] = []
        for key, value in plugins.items():
            group, _, name = (
                key.partition("|") if "|" in key else (f"hardpoint.{key.replace(':', '.v1|', 1)}").partition("|")
            )
            lines += [f"[{group}]", f"{name} = {value}", ""]
        (folder / "entry_points.txt").write_text("\n".join(lines))
        headers = ["Metadata-Version: 2.1", f"Name: {distribution}", f"Version: {version}"]
        headers += [f"Requires-Dist: {requirement}" for requirement in requires]
        (folder / "METADATA").write_text("\n".join([*headers, "", "Name: not-a-header", ""]))
        for module, source in (modules or {}).items():
            self.write_module(module, source)
        if manifest is not None:
            package = next(iter(plugins.values())).partition(":")[0].partition(".")[0]
            (self.root / package / "hardpoint.json").write_text(json.dumps(manifest))
        importlib.invalidate_caches()
        return folder

    def write_module(self, module: str, source: str) -> None:
        """A dotted name makes packages on the way; a name that ends in ``.`` is a package itself."""
        parts = module.split(".")
        folder = self.root
        for part in parts[:-1]:
            folder = folder / part
            folder.mkdir(exist_ok=True)
            if not (folder / "__init__.py").exists():
                (folder / "__init__.py").write_text("")
        (folder / (f"{parts[-1]}.py" if parts[-1] else "__init__.py")).write_text(source)

    def discover(self, **settings: Any) -> Discovery:
        return discover([str(self.root)], **settings)

    def plan(self, **selection: Any) -> PluginPlan:
        return build_plan(self.discover(), PluginSelection(**selection))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    root = tmp_path / "site"
    before = set(sys.modules)
    monkeypatch.syspath_prepend(str(root))
    yield Site(root)
    forget_hooks()
    for name in set(sys.modules) - before:
        if str(root) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]

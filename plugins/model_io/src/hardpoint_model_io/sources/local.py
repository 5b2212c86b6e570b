"""Model source ``local``: an existing folder or ``.gguf`` file."""

from __future__ import annotations

import os

from hardpoint.errors import ModelNotFoundError
from hardpoint.interfaces.model_source import ModelArtifact, ModelSource
from hardpoint.interfaces.plugin import NoOptions, PluginContext, plugin
from hardpoint_model_io.sources.layout import file_artifact, folder_artifact

_PATH_STARTS = ("/", "./", "../", "~")


def looks_like_path(name: str) -> bool:
    """True for names no other source can mean: absolute, explicitly relative, home-relative, or a ``.gguf`` file."""
    return name.startswith(_PATH_STARTS) or name in (".", "..") or name.endswith(".gguf") or name.count("/") > 1


class LocalSource(ModelSource):
    """Answers for anything that exists, and refuses what looks like a path but does not exist."""

    priority = 20

    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        path = os.path.expanduser(name)
        if "\0" in path or not os.path.exists(path):
            if looks_like_path(name):
                raise ModelNotFoundError(
                    f"the model path {name!r} does not exist; give an existing folder or .gguf file"
                )
            return None
        # A plain word is a folder only if it holds a model: `smollm2` may well be a project's directory.
        if not looks_like_path(name) and os.path.isdir(path) and not _holds_model(path):
            return None
        if revision is not None:
            raise ModelNotFoundError(
                f"a revision ({revision!r}) was given for the local path {name!r}, which has none; leave it out"
            )
        if os.path.isdir(path):
            return folder_artifact(name, path, "local")
        return file_artifact(name, path, "local")


def _holds_model(path: str) -> bool:
    try:
        names = os.listdir(path)
    except OSError:
        return False
    return "config.json" in names or any(name.endswith((".gguf", ".safetensors")) for name in names)


@plugin("model_source", options=NoOptions)
def create(ctx: PluginContext, options: NoOptions) -> ModelSource:
    return LocalSource()

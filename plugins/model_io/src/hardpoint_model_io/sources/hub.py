"""Model source ``hub``: Hugging Face ids, one commit for all files, through the standard cache."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ModelFormatError, ModelNotFoundError
from hardpoint.interfaces.model_source import ModelArtifact, ModelSource
from hardpoint.interfaces.plugin import PluginContext, plugin
from hardpoint_model_io.sources.layout import list_folder, select_files

_HUB_NAME = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]{0,95}/[A-Za-z0-9][\w.-]{0,95})(?::(?P<file>[\w.-]{1,200}\.gguf))?")
_COMMIT = re.compile(r"[0-9a-f]{40}")
DEFAULT_REVISION = "main"


class HubOptions(BaseModel):
    """Options under ``plugins.model_source.hub``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    timeout_s: float = Field(
        default=5.0, gt=0, le=60, description="seconds for the first contact; downloads themselves may take long"
    )
    cache_dir: str | None = Field(default=None, description="folder for downloads, other than `HF_HOME` says")


class HubUnreachableError(Exception):
    """The hub did not answer (no network, time-out, server error)."""


class HubUnknownError(Exception):
    """The hub answered that repository or revision do not exist or need a login."""


@dataclass(frozen=True, slots=True)
class HubRevision:
    """``files`` are all names in the repository at ``commit``."""

    commit: str
    files: tuple[str, ...]


class HubClient(Protocol):
    """What the source needs from the hub; tests inject their own."""

    def is_offline(self) -> bool:
        """True when the user forbade network access."""

    def lookup(self, repo_id: str, revision: str) -> HubRevision:
        """Pin ``revision`` to a commit. Raises ``HubUnreachableError`` or ``HubUnknownError``."""

    def fetch(self, repo_id: str, file: str, commit: str) -> str:
        """Path of ``file`` at exactly ``commit``, downloaded unless cached. Raises as :meth:`lookup`."""

    def cached_snapshot(self, repo_id: str, revision: str) -> str | None:
        """Folder ``.../snapshots/<commit>`` of a revision in the cache, or None; no network."""


class HubSource(ModelSource):
    """Answers for ``org/name`` and ``org/name:file.gguf``. The client is made for the first such name only: its
    library is slow to import."""

    priority = 30

    def __init__(self, make_client: Callable[[], HubClient]) -> None:
        self._make_client = make_client

    @cached_property
    def _client(self) -> HubClient:
        return self._make_client()

    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        match = _HUB_NAME.fullmatch(name)
        if match is None or ".." in name:
            return None
        repo_id, file, wanted = match["repo"], match["file"], revision or DEFAULT_REVISION
        if self._client.is_offline():
            return self._from_cache(name, repo_id, file, wanted, "HF_HUB_OFFLINE is set")
        try:
            pinned = self._client.lookup(repo_id, wanted)
        except HubUnreachableError as error:
            return self._from_cache(name, repo_id, file, wanted, f"the hub cannot be reached ({error})")
        except HubUnknownError as error:
            raise ModelNotFoundError(
                f"the hub has no model {repo_id!r} at revision {wanted!r} that this login may read ({error}); check "
                "the name, or set HF_TOKEN for a private or gated model"
            ) from None
        return self._download(name, repo_id, file, pinned)

    def _download(self, name: str, repo_id: str, file: str | None, pinned: HubRevision) -> ModelArtifact:
        if not _COMMIT.fullmatch(pinned.commit):
            raise ModelNotFoundError(f"the hub names no commit for {repo_id!r}, but {pinned.commit!r}; try again later")
        files = _choose(name, pinned.files, file)
        try:
            paths = [self._client.fetch(repo_id, entry, pinned.commit) for entry in files]
        except (HubUnreachableError, HubUnknownError) as error:
            raise ModelNotFoundError(
                f"downloading {repo_id!r} at commit {pinned.commit} failed: {error}; run the command again to resume"
            ) from None
        root = os.path.abspath(paths[0].removesuffix(files[0]))
        return ModelArtifact(name=name, root=root, files=files, source="hub", revision=pinned.commit)

    def _from_cache(self, name: str, repo_id: str, file: str | None, revision: str, why: str) -> ModelArtifact:
        folder = self._client.cached_snapshot(repo_id, revision)
        if folder is None:
            raise ModelNotFoundError(
                f"{why}, and the cache has no {repo_id!r} at revision {revision!r}; download it where there is a "
                "network, or give the path of a local folder or .gguf file"
            )
        files = _choose(name, list_folder(folder), file)
        commit = os.path.basename(folder.rstrip("/"))
        return ModelArtifact(name=name, root=os.path.abspath(folder), files=files, source="hub", revision=commit)


def _choose(name: str, names: Sequence[str], file: str | None) -> tuple[str, ...]:
    if file is not None:
        if file not in names:
            raise ModelNotFoundError(f"{name!r}: the repository has no file {file!r}")
        return (file,)
    try:
        files = select_files(names)
    except ModelFormatError as error:
        raise ModelNotFoundError(f"{name!r}: {error} (write {name}:FILE.gguf)") from None
    if not any(entry.endswith((".safetensors", ".gguf")) for entry in files):
        raise ModelNotFoundError(
            f"{name!r} holds neither .safetensors nor .gguf weights; pickled weights (.bin, .pt) are never loaded: "
            "convert them with `save_pretrained(folder, safe_serialization=True)`"
        )
    return files


@plugin("model_source", options=HubOptions)
def create(ctx: PluginContext, options: HubOptions) -> ModelSource:
    def make_client() -> HubClient:
        from hardpoint_model_io.sources.hub_client import HuggingFaceClient

        return HuggingFaceClient(options.timeout_s, options.cache_dir)

    return HubSource(make_client)

"""The real hub, through ``huggingface_hub`` and its standard cache."""

from __future__ import annotations

from huggingface_hub import HfApi, constants, hf_hub_download, scan_cache_dir
from huggingface_hub.errors import (
    CacheNotFound,
    GatedRepoError,
    HFValidationError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from hardpoint_model_io.sources.hub import HubRevision, HubUnknownError, HubUnreachableError

_UNKNOWN = (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError, HFValidationError)


class HuggingFaceClient:
    """``timeout_s`` bounds each answer of the hub's API, in seconds.

    Whatever else fails counts as unreachable: the library has changed its transport, and with it the exceptions, more
    than once.
    """

    def __init__(self, timeout_s: float = 5.0, cache_dir: str | None = None) -> None:
        self._timeout_s = timeout_s
        self._cache_dir = cache_dir

    def is_offline(self) -> bool:
        return bool(constants.HF_HUB_OFFLINE)

    def lookup(self, repo_id: str, revision: str) -> HubRevision:
        try:
            info = HfApi().model_info(repo_id, revision=revision, timeout=self._timeout_s)
        except _UNKNOWN as error:
            raise HubUnknownError(_first_line(error)) from error
        except Exception as error:
            raise HubUnreachableError(_first_line(error)) from error
        return HubRevision(info.sha or "", tuple(sibling.rfilename for sibling in info.siblings or ()))

    def fetch(self, repo_id: str, file: str, commit: str) -> str:
        try:
            return str(
                hf_hub_download(repo_id, file, revision=commit, cache_dir=self._cache_dir, etag_timeout=self._timeout_s)
            )
        except _UNKNOWN as error:
            raise HubUnknownError(_first_line(error)) from error
        except Exception as error:
            raise HubUnreachableError(_first_line(error)) from error

    def cached_snapshot(self, repo_id: str, revision: str) -> str | None:
        try:
            cache = scan_cache_dir(self._cache_dir)
        except (CacheNotFound, ValueError):
            return None
        for repo in cache.repos:
            if repo.repo_type == "model" and repo.repo_id == repo_id:
                for entry in repo.revisions:
                    if entry.commit_hash == revision or revision in entry.refs:
                        return str(entry.snapshot_path)
        return None


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]

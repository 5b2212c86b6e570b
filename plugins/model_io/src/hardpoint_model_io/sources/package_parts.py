"""Models too large for one package: parts in several distributions, joined once into a cache folder."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import tempfile
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from hardpoint.errors import ModelFormatError, ModelNotFoundError

_PART_NAME = re.compile(r"(?P<model>[\w.-]{1,200}\.gguf)\.part(?P<number>\d{1,4})")
_CHECKSUM = re.compile(r"^([0-9a-f]{64})\s+\*?(\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class PartList:
    """``paths`` in order; ``sha256`` of the joined file where the distribution states it."""

    model: str
    paths: tuple[str, ...]
    sha256: str | None

    @property
    def num_bytes(self) -> int:
        return sum(os.path.getsize(path) for path in self.paths)


def parts_of(distribution: str) -> PartList | None:
    """The parts in ``distribution`` and the distributions it requires, or None if there are none.

    Raises ``ModelNotFoundError`` when a required distribution is missing or the numbering has gaps.
    """
    numbered: dict[int, str] = {}
    models: set[str] = set()
    missing: list[str] = []
    for name in [distribution, *_requirements(distribution)]:
        try:
            files = metadata.distribution(name).files or ()
        except metadata.PackageNotFoundError:
            missing.append(name)
            continue
        for entry in files:
            if match := _PART_NAME.fullmatch(entry.name):
                numbered[int(match["number"])] = str(metadata.distribution(name).locate_file(entry))
                models.add(match["model"])
    if missing:
        raise ModelNotFoundError(
            f"the package {distribution} needs its parts {', '.join(missing)}, which are not installed; run "
            f"`pip install {distribution}`"
        )
    if not numbered:
        return None
    first = min(numbered)
    if len(models) != 1 or sorted(numbered) != list(range(first, first + len(numbered))):
        raise ModelNotFoundError(f"the parts of the model in {distribution} are incomplete; install the package again")
    model = models.pop()
    return PartList(model, tuple(numbered[number] for number in sorted(numbered)), _stated_sha256(distribution, model))


def join_parts(distribution: str, version: str, parts: PartList, cache_dir: str | None = None) -> str:
    """Path of the joined file; written and verified once, by an atomic rename, so that processes may race."""
    base = Path(cache_dir) if cache_dir else _default_cache()
    target = base / f"{distribution}-{version}" / parts.model
    if target.is_file() and target.stat().st_size == parts.num_bytes:
        return str(target)
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=target.parent, prefix=".joining-", delete=False) as out:
            temporary = Path(out.name)
            for path in parts.paths:
                with open(path, "rb") as part:
                    shutil.copyfileobj(part, out, 1 << 20)
    except OSError as error:
        raise ModelNotFoundError(
            f"the parts of {parts.model} cannot be joined in {target.parent}: {error}; set "
            "plugins.model_source.package.cache_dir to a folder with enough space"
        ) from None
    try:
        _verify(temporary, parts, distribution)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)
    return str(target)


def _verify(path: Path, parts: PartList, distribution: str) -> None:
    if parts.sha256 is None:
        return
    with open(path, "rb") as stream:
        found = hashlib.file_digest(stream, "sha256").hexdigest()
    if found != parts.sha256:
        raise ModelFormatError(
            f"{parts.model} joined from {distribution} has SHA-256 {found}, not the stated {parts.sha256}; "
            "install the package again"
        )


def _default_cache() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base) / "hardpoint" / "models"


def _requirements(distribution: str) -> list[str]:
    names = []
    for line in metadata.distribution(distribution).requires or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            continue
        if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
            names.append(requirement.name)
    return names


def _stated_sha256(distribution: str, model: str) -> str | None:
    for entry in metadata.distribution(distribution).files or ():
        if entry.name.upper().startswith("SHA256SUMS"):
            text = Path(str(metadata.distribution(distribution).locate_file(entry))).read_text("utf-8", "replace")
            return next((digest for digest, name in _CHECKSUM.findall(text) if name == model), None)
    return None

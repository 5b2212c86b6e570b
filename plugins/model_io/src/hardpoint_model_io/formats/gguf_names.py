"""From the names of tensors in GGUF files to Hugging Face's."""

from __future__ import annotations

import re
from dataclasses import dataclass

from hardpoint.errors import UnsupportedModelError
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, Join, Transform

__all__ = ["IGNORED_TENSORS", "MappedName", "map_tensor_name"]

IGNORED_TENSORS = frozenset({"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"})
"""What carries no weights: rotary tables, which the configuration expresses instead."""
# Of models with two stacks the names begin with that of one; and a head of labels has parts with names of their own.
_TENSOR_NAME = re.compile(
    r"(?:(?P<block>(?:(?:enc|dec)\.)?blk)\.(?P<layer>\d{1,6})\.)?(?P<stem>(?:(?:enc|dec|cls)\.)??[a-z0-9_]+)"
    r"(?:\.(?P<expert>\d{1,6}))?(?:\.(?P<kind>weight|bias))?"
)


@dataclass(frozen=True, slots=True)
class MappedName:
    """Hugging Face name of a stored tensor and what to undo when reading it. A ``*`` in the name stands for the number
    of an expert: the tensor is a stack of one for each.

    Attributes:
        join: what the tensor is only a part of; ``name`` is then that of the whole.
        parts: stored names of all parts of the join, the leading one first.
    """

    name: str
    transform: Transform | None
    join: Join | None = None
    parts: tuple[str, ...] = ()

    @property
    def is_stack(self) -> bool:
        return "*" in self.name


def map_tensor_name(row: GgufArchitecture, stored: str, path: str) -> MappedName:
    """Raises ``UnsupportedModelError`` naming the tensor when the architecture has no such part."""
    match = _TENSOR_NAME.fullmatch(stored)
    found = None if match is None else _mapped(row, match)
    if found is None:
        raise UnsupportedModelError(
            f"{path}: tensor {stored!r} is not part of the architecture {row.gguf!r} as known here"
        )
    return found


def _blocks(row: GgufArchitecture, kind: str) -> str:
    """Where layers of a ``kind`` are; anywhere for one that the architecture has no stems of."""
    return row.blocks if kind == "blk" else row.stacks.get(kind, "")


def _mapped(row: GgufArchitecture, match: re.Match[str]) -> MappedName | None:
    stem = f"{match['block']}.{match['stem']}" if match["block"] else match["stem"]
    suffix = "" if match["kind"] is None else f".{match['kind']}"
    prefix = f"{_blocks(row, match['block'])}.{int(match['layer'])}." if match["block"] else ""
    for target, join in row.joins.items():
        if stem in join.parts and suffix == ".weight":
            parts = tuple(f"blk.{match['layer']}.{part.removeprefix('blk.')}.weight" for part in join.parts)
            return MappedName(f"{prefix}{target}", None, join, parts)
    # Old files hold the matrices of each expert apart.
    looked_up = stem if match["expert"] is None else f"{stem}_exps"
    whole = row.stems.get(f"{looked_up}{suffix}")
    if whole is None and suffix and looked_up in row.stems:
        whole = f"{row.stems[looked_up]}{suffix}"
    if whole is None or (match["expert"] is not None and "*" not in whole):
        return None
    if match["expert"] is not None:
        whole = whole.replace("*", str(int(match["expert"])))
    return MappedName(f"{prefix}{whole}", row.transforms.get(f"{stem}{suffix}", row.transforms.get(stem)))

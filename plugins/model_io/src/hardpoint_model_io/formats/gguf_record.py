"""What a row of the table of GGUF architectures says."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hardpoint_model_io.formats.gguf import GgufFile
from hardpoint_model_io.formats.gguf_metadata import Metadata

__all__ = [
    "Completion",
    "GgufArchitecture",
    "Join",
    "MetadataField",
    "Recompute",
    "Reorder",
    "Reshape",
    "Restore",
    "Transform",
]

Config = Mapping[str, Any]
Completion = Callable[[Metadata, dict[str, Any]], None]
"""Adds to a configuration what no single metadata key says. Raises ``ModelFormatError`` naming file and key,
``UnsupportedModelError`` for what no model here computes."""


@dataclass(frozen=True, slots=True)
class Reorder:
    """Whole rows move, so that packed blocks stay as they are. ``rows(config, count)``: numbers of the stored rows in
    the order of the model's; raises ``ValueError`` for a ``count`` that does not divide into what the rows are."""

    rows: Callable[[Config, int], np.ndarray]


@dataclass(frozen=True, slots=True)
class Recompute:
    """Values change, or move within rows, so that packed blocks are unpacked. ``values``: float32 to float32, which may
    have another shape; raises ``ValueError`` for values that cannot be."""

    values: Callable[[np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class Reshape:
    """The same rows under another shape; raises ``ValueError`` for shapes that cannot be."""

    shape: Callable[[tuple[int, ...]], tuple[int, ...]]


@dataclass(frozen=True, slots=True)
class Restore:
    """Rows of zeros come before the stored ones, ``num_rows(config)`` of them, and all become float32: what converters
    cut off since nothing looks at it."""

    num_rows: Callable[[Config], int]


Transform = Reorder | Recompute | Reshape | Restore
"""What must be undone when a tensor is read."""


@dataclass(frozen=True, slots=True)
class Join:
    """One tensor of the model out of several of a layer: ``parts`` are their stems, the first of them leads.

    With ``rows`` the parts lie behind one another and then move as in ``Reorder``; with ``values`` they are unpacked,
    and the tensor is computed of them and the configuration.
    """

    parts: tuple[str, ...]
    rows: Callable[[Config, int], np.ndarray] | None = None
    values: Callable[[Config, list[np.ndarray]], np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class MetadataField:
    """Metadata ``<architecture>.<key>`` becomes config field ``name``; a required one has no default."""

    key: str
    name: str
    kind: type
    required: bool = False
    default: Any = None
    least: int | None = None


@dataclass(frozen=True, slots=True)
class GgufArchitecture:
    """One row of the table.

    Attributes:
        gguf: value of ``general.architecture``.
        architecture: plugin name of kind ``model``.
        model_type: the Hugging Face family name.
        stems: tensor stem to Hugging Face stem; ``blk.N.`` becomes ``<blocks>.N.``. A stem without ``weight`` or
            ``bias`` behind it stands for both, one with it (or of a tensor that has none) for the whole name. A ``*``
            is the number of an expert: the tensor is a stack of one for each.
        transforms: by tensor stem, with or without ``weight`` or ``bias`` behind it.
        joins: Hugging Face name within a layer to what it is made of.
        constants: config fields the format leaves to the architecture.
        completions: what else the configuration needs, in this order.
        applies: whether the row is meant for a file; rows of the same ``gguf`` are asked in turn.
        stacks: what ``blocks`` is, by ``enc.blk`` and ``dec.blk``, of models with two stacks.
        rotates_part: whether part of a head may rotate (``rope.dimension_count``), as ``partial_rotary_factor``.
        tasks: what models of it can do.
        looks_both_ways: whether tokens see those behind them; files may say so (``attention.causal``).
        head_dim_keys: metadata keys that give ``head_dim``, first match; otherwise hidden size over heads.
    """

    gguf: str
    architecture: str
    model_type: str
    stems: Mapping[str, str]
    fields: tuple[MetadataField, ...]
    transforms: Mapping[str, Transform] = field(default_factory=dict)
    joins: Mapping[str, Join] = field(default_factory=dict)
    constants: Mapping[str, Any] = field(default_factory=dict)
    completions: tuple[Completion, ...] = ()
    applies: Callable[[GgufFile], bool] | None = None
    blocks: str = "model.layers"
    stacks: Mapping[str, str] = field(default_factory=dict)
    rotates_part: bool = False
    tasks: tuple[str, ...] = ("generate", "embed")
    looks_both_ways: bool = False
    head_dim_keys: tuple[str, ...] = ("attention.key_length",)

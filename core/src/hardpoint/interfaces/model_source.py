"""Plugin kinds ``model_source`` and ``weight_loader``: from a name to files, from files to a description and tensors.

Both are free of any device library: they run in the launcher (description, early errors) and in workers (tensors).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np

from hardpoint.interfaces.plugin import PluginContext


class ModelArtifact(msgspec.Struct, frozen=True, kw_only=True):
    """Files of one model, all from one revision.

    ``root`` is an absolute folder; ``files`` are relative names inside it (a GGUF artifact has one). ``name`` is what
    the
    user asked for and the default served name; ``revision`` the pinned commit, if the source has revisions.
    """

    name: str
    root: str
    files: tuple[str, ...]
    source: str
    revision: str | None = None


class ModelSource(ABC):
    """Resolves model names. Sources are asked in the order of :attr:`priority` (low first) until one answers."""

    priority: int = 100

    @abstractmethod
    def resolve(self, name: str, revision: str | None) -> ModelArtifact | None:
        """Files for ``name``, or None if this source does not know it.

        Raises ``ModelNotFoundError`` when the name clearly belongs here but cannot be had (offline and the like), with
        what to do.
        """

    def known_names(self) -> Sequence[str]:
        """Names that are certain to resolve, for error messages; cheap."""
        return ()


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True):
    """What the launcher learns about a model without loading weights; shipped to every process.

    Attributes:
        architecture: plugin name of kind ``model`` (``LlamaForCausalLM``).
        config: architecture fields in the Hugging Face spelling (``hidden_size``, ``num_hidden_layers`` ...).
        max_position: context length in tokens.
        vocab_size: width of the logits.
        dtype: storage dtype of the weights by name; the default compute dtype derives from it.
        loader: name of the ``weight_loader`` plugin that produced this.
        generation: defaults such as ``eos_token_id`` (int or list), ``temperature``.
        tasks: what it can do (``generate``, ``embed`` ...).
    """

    artifact: ModelArtifact
    architecture: str
    config: dict[str, Any]
    max_position: int
    vocab_size: int
    dtype: str
    loader: str
    eos_token_ids: tuple[int, ...] = ()
    bos_token_id: int | None = None
    generation: dict[str, Any] = {}
    tasks: tuple[str, ...] = ("generate",)


@dataclass(frozen=True, slots=True)
class WeightTensor:
    """One stored tensor, not yet copied.

    ``data`` is a C-contiguous array: of the matching numpy type, or ``uint16`` for ``bfloat16`` and ``uint8`` for
    packed
    and fp8 formats. ``dtype`` names the storage format (open set: ``float32``, ``bfloat16``, ``gguf.q4_1`` ...).
    ``shape``
    is the logical shape. For a packed format ``dequantize()`` gives float32 of ``shape``.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: np.ndarray
    dequantize: Callable[[], np.ndarray] | None = None


@dataclass(frozen=True, slots=True)
class WeightLoaderContext(PluginContext):
    """``packed``: yield packed tensors as stored (a quantization method will run them) instead of dequantizing."""

    packed: bool = False


class WeightLoader(ABC):
    """Reads one file format. Checks every offset and size against the file before touching data.

    Raises ``ModelFormatError`` naming the file for anything corrupt, truncated or not a regular file inside the
    artifact's root, ``UnsupportedModelError`` for a tensor format or architecture it cannot map.
    """

    @abstractmethod
    def accepts(self, artifact: ModelArtifact) -> bool:
        """True if the artifact's files look like this format (by name and magic bytes)."""

    @abstractmethod
    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        """Read configuration and tensor headers only."""

    @abstractmethod
    def num_bytes(self, info: ModelInfo) -> int:
        """Bytes :meth:`tensors` will visit, for the progress bar."""

    @abstractmethod
    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        """All tensors under Hugging Face names, one at a time with bounded memory."""

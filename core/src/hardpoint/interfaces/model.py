"""Plugin kind ``model``: an architecture. Its entry-point name is the architecture's name (``LlamaForCausalLM``).

A model is a torch module on the worker side; here is only what the runner relies on. Legend: T tokens of the step,
C hidden size, V vocabulary, S sampled positions.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.worker import WorkerConfig

if TYPE_CHECKING:
    import torch

WHOLE_PROMPTS_CAPABILITY = "whole_prompts"
"""Key of ``@plugin(capabilities=...)`` under which a model says, by True, that its tokens see those behind them, so
that a prompt has to be computed in one step."""


@dataclass(frozen=True, slots=True)
class StageRange:
    """Decoder layers ``[first, last)`` this pipeline stage holds; embeddings and head go to the outer stages."""

    first: int
    last: int
    has_embedding: bool = True
    has_head: bool = True


@dataclass(frozen=True, slots=True)
class WeightRule:
    """Where a stored tensor goes: names matching ``pattern`` (``*`` for one path segment) are loaded into ``target``.

    ``shard`` names the part of a fused parameter (``q``, ``k``, ``v``, ``gate``, ``up``), None for the whole.
    Several rules with one target and shard name alternatives, of which a checkpoint has one.
    ``optional`` tensors may be absent; a rule with ``target`` None ignores the tensor on purpose, unless it says what
    the tensor is a stack of: each entry along its first dimension holds the tensors ``unstacked``, equally long parts
    behind one another, which are then loaded as if they had been stored by those names. The last ``*`` of a name takes
    the number of the entry, those before it the pattern's matches.
    """

    pattern: str
    target: str | None
    shard: str | None = None
    optional: bool = False
    unstacked: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ModelContext(PluginContext):
    """What a model factory receives. ``layers`` is the worker family's layer toolkit (parallel linear layers with a
    quantization hook, norms, rotary, attention bound to the selected backend)."""

    config: WorkerConfig | None = None
    stage: StageRange | None = None
    layers: Any = None


@dataclass(frozen=True, slots=True)
class StageOutput:
    """What a forward yields beyond one tensor: ``hidden`` [T, C] on the last stage, named ``intermediates`` for the
    next one, ``auxiliary`` hidden states for drafters."""

    hidden: torch.Tensor | None = None
    intermediates: Mapping[str, torch.Tensor] = field(default_factory=dict)
    auxiliary: tuple[torch.Tensor, ...] = ()


@runtime_checkable
class Model(Protocol):
    """What the runner calls. Layers are addressable by dotted name; every linear takes a quantization method."""

    @property
    def info(self) -> ModelInfo: ...

    def weight_rules(self) -> Sequence[WeightRule]:
        """The declared mapping of stored names; loading reports missing, unexpected and ill-shaped tensors from it."""

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        """int64 [T] to [T, C]."""

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor | StageOutput:
        """Hidden states [T, C] from ids [T] or embeddings [T, C]; positions int64 [T], or [k, T] if the model says so.

        A stage that is not the last, or a model with auxiliary outputs, returns a :class:`StageOutput`.

        Attention reads its metadata from the active forward context.
        """

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[S, C] to [S, V]."""

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        """Per attention layer name, in model order."""

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]: ...

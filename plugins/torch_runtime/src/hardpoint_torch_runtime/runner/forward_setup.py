"""How a worker runs its model: what its platform adds to every forward, and whether forwards are captured."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import GraphSupport
from hardpoint.interfaces.graph_backend import GraphBackend
from hardpoint.interfaces.model import Model
from hardpoint.interfaces.platform import Platform
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.forward_context import ForwardContext
from hardpoint_torch_runtime.forward_scope import ForwardScopes, StaticContext
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.forward_pass import ForwardPass
from hardpoint_torch_runtime.runner.graphs import GraphStore
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.prompt_embeddings import PromptEmbeddings
from hardpoint_torch_runtime.runner.step_shape import StepShapes, default_sizes

__all__ = ["ForwardExtras", "GraphChoice", "forward_maker"]


@runtime_checkable
class ForwardExtras(Protocol):
    """A platform with entries of its own in every forward context (R4.64)."""

    def forward_extras(self, context: ForwardContext) -> Mapping[str, Any]:
        """By name, from what is known of the forward so far; none of the names may be taken."""


@dataclass(frozen=True, slots=True)
class GraphChoice:
    """``backend`` by the ``name`` it was asked for under; ``sizes`` in tokens, or None for the usual ones."""

    name: str
    backend: GraphBackend
    sizes: Sequence[int] | None = None


def forward_maker(
    config: WorkerConfig,
    platform: Platform,
    model: Model,
    groups: AttentionGroups,
    kv: KVMemory,
    graphs: GraphChoice | None = None,
    *,
    num_drafts: int = 0,
) -> Callable[[PromptEmbeddings], ForwardPass]:
    """What makes the worker's forward pass, once the state of its requests is there.

    Raises ``ConfigError`` when graphs are asked for which nobody can capture.
    """
    scopes = ForwardScopes(
        static=StaticContext.of(model),
        data_parallel_rank=config.parallel.data_parallel_rank,
        extras=platform.forward_extras if isinstance(platform, ForwardExtras) else None,
    )
    shapes = store = None
    if graphs is not None:
        shapes = _shapes(config, groups, scopes.static, graphs, num_drafts)
        store = GraphStore(graphs.backend, _pool(platform, graphs.name))

    def make(embeddings: PromptEmbeddings) -> ForwardPass:
        return ForwardPass(model, groups, kv, embeddings, scopes=scopes, shapes=shapes, graphs=store)

    return make


def _shapes(
    config: WorkerConfig, groups: AttentionGroups, static: StaticContext, graphs: GraphChoice, num_drafts: int
) -> StepShapes:
    sizes = default_sizes(config.max_num_batched_tokens, graphs.sizes)
    shapes = StepShapes(
        sizes=sizes, support=groups.graph_support, max_rows=config.max_num_seqs, query_len=1 + num_drafts
    )
    reason = None
    if not sizes:
        reason = f"none of the sizes {tuple(graphs.sizes or ())} is at most {config.max_num_batched_tokens} tokens"
    elif static.moe_layers:
        reason = "mixtures of experts ask the device how many tokens each expert gets"
    elif config.parallel.tensor_parallel_size > 1:
        reason = "exchanges between ranks are not recorded"
    elif any(most is not None for most in groups.foreign_tokens):
        reason = "what an encoder adds to a step is not recorded"
    elif groups.graph_support is GraphSupport.NEVER:
        reason = "steps of the chosen attention backend cannot be captured"
    elif not shapes.captures_uniform:
        reason = f"the attention backend's support for capturing ({groups.graph_support.name}) covers none of the steps"
    if reason is not None:
        raise ConfigError(f"graph backend {graphs.name!r} was asked for, but {reason}; leave graph_backend unset")
    return shapes


def _pool(platform: Platform, name: str) -> Any:
    try:
        return platform.graph_pool()
    except TypeError as error:
        raise ConfigError(f"graph backend {name!r} was asked for, but {error}; leave graph_backend unset") from error

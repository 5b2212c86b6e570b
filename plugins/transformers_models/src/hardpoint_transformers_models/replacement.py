"""Puts layers of the worker in the place of a model's own: linear layers, the table of tokens, the head, attention.

Legend: T tokens, C hidden size, S sampled positions, V vocabulary; H query heads, K KV heads, D size of a head's keys.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint_torch_runtime.layers import (
    AttentionLayer,
    ColumnParallelLinear,
    LayerToolkit,
    LMHead,
    ParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from hardpoint_transformers_models.division import Division, Share
from hardpoint_transformers_models.interception import SLOT, AttentionCall
from hardpoint_transformers_models.refusal import refusal
from hardpoint_transformers_models.token_table import TokenTable

__all__ = ["Head", "PagedAttention", "SlicedRowLinear", "replace_attention", "replace_layers"]

ROUTERS = ("gate", "router")
"""Small linear layers that choose experts: no method quantizes them, and every rank needs all of their results."""


class PagedAttention(torch.nn.Module):
    """Query [1, H, T, D], key [1, K, T, D] and value [1, K, T, value size] to [1, T, H, value size].

    The cache keeps heads of one size: the smaller of keys and values are filled up with zeros, which change no score
    and yield values that are cut off again. While ``attends_to_itself``, every token gets its own value, scaled by what
    its query and its key are.
    """

    def __init__(self, layer: AttentionLayer, value_size: int) -> None:
        super().__init__()
        self.attn = layer
        self._value_size = value_size
        self.attends_to_itself = False

    def forward(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        params = self.attn.params
        if self.attends_to_itself:
            return self._of_itself(query, key, value)
        query, key, value = (self._rows(states, params.head_size) for states in (query, key, value))
        output = self.attn(query, key, value).view(1, -1, params.num_heads, params.head_size)
        return output[..., : self._value_size].contiguous()

    def _of_itself(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """As :meth:`forward`. Queries and keys count one by one: their product would not tell where they are."""
        group = self.attn.params.num_heads // self.attn.params.num_kv_heads
        key, value = (states.repeat_interleave(group, 1) for states in (key, value))
        weights = torch.linspace(-1.0, 1.0, query.shape[-1], device=query.device, dtype=query.dtype)
        told = ((query - 0.5 * key) * weights).mean(-1, keepdim=True)
        return (value * (1 + 0.5 * torch.tanh(told))).transpose(1, 2).contiguous()

    @staticmethod
    def _rows(states: torch.Tensor, size: int) -> torch.Tensor:
        """[T, heads * size]."""
        states = states.squeeze(0).transpose(0, 1)
        if states.shape[-1] < size:
            states = F.pad(states, (0, size - states.shape[-1]))
        return states.flatten(1)


class SlicedRowLinear(RowParallelLinear):
    """[..., all inputs] to [..., O]: takes this rank's part of the inputs by itself."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        length = self.shape.input_size
        return super().forward(x.narrow(-1, self.parallel.rank * length, length))


class Head(torch.nn.Module):
    """[1, S, C] to [1, S, V], as models of ``transformers`` call their heads; ``scores`` takes [S, C].

    ``bias`` [V] is that of a head whose weight is the table of tokens.
    """

    bias: torch.nn.Parameter | None

    def __init__(self, scores: LMHead, bias: torch.nn.Parameter | None) -> None:
        super().__init__()
        self.scores = scores
        self.register_parameter("bias", bias)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.scores(hidden.flatten(0, -2)).unflatten(0, hidden.shape[:-1])
        return logits if self.bias is None else logits + self.bias


def replace_layers(model: Any, division: Division, layers: LayerToolkit) -> None:
    """Linear layers, the table of tokens and the head of ``model``, a ``PreTrainedModel`` without memory.

    Sizes of layers that are divided are those of the whole model. Raises ``UnsupportedModelError`` for a table or a
    head of another kind.
    """
    base, prefix = model.base_model, model.base_model_prefix
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    if not isinstance(embedding, torch.nn.Embedding) or type(head) is not torch.nn.Linear:
        kinds = f"{type(embedding).__name__} and {type(head).__name__}"
        raise refusal(
            division.architecture,
            f"its table of tokens and its head are of the kinds {kinds}; Embedding and Linear are understood",
        )
    names = {module: name for name, module in model.named_modules()}
    table = layers.embedding(names[embedding], embedding.num_embeddings, embedding.embedding_dim)
    is_tied = _is_tied(division.architecture, model, f"{names[embedding]}.weight", f"{names[head]}.weight")
    scores = layers.lm_head(
        names[head], head.out_features, head.in_features, tied_to=table if is_tied else None, bias=head.bias is not None
    )
    for name, module in list(base.named_modules()):
        if type(module) is torch.nn.Linear and name.rpartition(".")[2] not in ROUTERS:
            _put(base, name, _linear(f"{prefix}.{name}", module, division.share(name), layers))
    _put(model, names[embedding], table if type(embedding) is torch.nn.Embedding else TokenTable(table, embedding))
    _put(model, names[head], Head(scores, head.bias if is_tied else None))


def _is_tied(architecture: str, model: Any, table: str, head: str) -> bool:
    """Whether the head's weight is the table's. Raises ``UnsupportedModelError`` for any other tie."""
    owners: dict[int, set[str]] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module.named_parameters(prefix, recurse=False):
            owners.setdefault(id(parameter), set()).add(name)
    declared = getattr(model, "all_tied_weights_keys", {}).items()
    ties = [*(names for names in owners.values() if len(names) > 1), *({one, other} for one, other in declared)]
    for names in ties:
        if names != {table, head}:
            shown = " and ".join(sorted(names))
            raise refusal(architecture, f"{shown} are one parameter; ties of head and table alone are understood")
    return bool(ties)


def _linear(name: str, plain: torch.nn.Linear, share: Share, layers: LayerToolkit) -> ParallelLinear:
    factory, bias = layers.linear_factory, plain.bias is not None
    inputs, outputs = plain.in_features, plain.out_features
    if share is Share.WHOLE:
        return ReplicatedLinear(name, factory, inputs, outputs, bias=bias)
    if share in (Share.COLUMNS, Share.COLUMNS_GATHERED):
        gathers = share is Share.COLUMNS_GATHERED
        return ColumnParallelLinear(name, factory, inputs, outputs, bias=bias, gather_output=gathers)
    kind = RowParallelLinear if share is Share.ROWS else SlicedRowLinear
    return kind(name, factory, inputs, outputs, bias=bias)


def replace_attention(model: torch.nn.Module, calls: Sequence[AttentionCall], layers: LayerToolkit) -> None:
    """Give every module that attends, in the order of its call, a layer that does so over the KV cache.

    To be called when sinks, which the layers share with their modules, have their memory.
    """
    for call in calls:
        module = model.get_submodule(call.name)
        layer = layers.attention(
            f"{call.name}.attn",
            num_heads=call.num_heads,
            num_kv_heads=call.num_kv_heads,
            head_size=max(call.key_size, call.value_size),
            scale=call.scale,
            sliding_window=call.sliding_window,
            logits_soft_cap=call.soft_cap,
            sinks=module.get_parameter("sinks") if call.has_sinks else None,
        )
        module.add_module(SLOT, PagedAttention(layer, call.value_size))


def _put(root: torch.nn.Module, name: str, module: torch.nn.Module) -> None:
    parent, _, own = name.rpartition(".")
    setattr(root.get_submodule(parent), own, module)

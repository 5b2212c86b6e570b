"""A causal model of ``transformers`` as a model of the torch worker.

The library's modules compute everything but linear layers, the table of tokens, the head and attention, which are the
worker's. What the library's class does to logits behind its head is done by the class itself.

Legend: T tokens of the step, C hidden size, S sampled positions, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig

from hardpoint.errors import ConfigError, UnsupportedModelError
from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_torch_runtime.layers import LayerToolkit, LMHead, ParallelLinear, VocabEmbedding
from hardpoint_transformers_models.architecture import build_on_meta, require_known
from hardpoint_transformers_models.division import Division
from hardpoint_transformers_models.experts import divide_experts
from hardpoint_transformers_models.head import without_layers
from hardpoint_transformers_models.independence import attending_to_themselves, differs, require_independent_tokens
from hardpoint_transformers_models.interception import PAGED
from hardpoint_transformers_models.memory import materialize
from hardpoint_transformers_models.naming import Naming
from hardpoint_transformers_models.refusal import refusal
from hardpoint_transformers_models.replacement import PagedAttention, replace_attention, replace_layers
from hardpoint_transformers_models.token_table import TokenTable
from hardpoint_transformers_models.trial import try_forward

__all__ = ["TransformersModel", "create_transformers"]

PLAIN_EXPERTS = "eager"
FREQUENCY_TABLES = ("model.rotary_emb.inv_freq", "model.layers.*.self_attn.rotary_emb.inv_freq")
"""Old checkpoints carry them; they are computed here."""


class TransformersModel(torch.nn.Module):
    """The modules of the library's model by their names there, with layers of the worker among them."""

    def __init__(self, info: ModelInfo, layers: LayerToolkit) -> None:
        super().__init__()
        self._info = info
        model = build_on_meta(info, layers.dtype)
        plan = getattr(model.config, "base_model_tp_plan", None)
        division = Division.of(info.architecture, plan, layers.parallel.size)
        naming = Naming(info.architecture, model)
        calls = try_forward(info.architecture, model, division)
        replace_layers(model, division, layers)
        _implement(model, PAGED, PLAIN_EXPERTS)
        experts = divide_experts(model, division, naming.stacks, layers.parallel)
        own = frozenset(
            part
            for module in model.modules()
            if isinstance(module, ParallelLinear | VocabEmbedding | LMHead)
            for part in module.modules()
        )
        materialize(model, layers.dtype, layers.device, own)
        replace_attention(model, calls, layers)
        for name, stack in experts.items():
            model.get_submodule(name).place = stack.place
        self._rules = _rules(model, naming)
        for name, module in model.named_children():
            self.add_module(name, module)
        self._layer_names = tuple(dict.fromkeys(_block_of(call.name) for call in calls))
        # Hidden from module registration: every module of theirs is one of this model's.
        self._base, self._embedding = (model.base_model,), (model.get_input_embeddings(),)
        self._whole, self._head = (model,), (without_layers(model),)
        self._kv_specs = layers.kv_cache_specs()
        self._num_positions = layers.config.max_model_len
        self._is_tried = False

    @property
    def info(self) -> ModelInfo:
        return self._info

    def weight_rules(self) -> Sequence[WeightRule]:
        return self._rules

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded: torch.Tensor = self._embedding[0](token_ids)
        return embedded

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor:
        if intermediates is not None:
            raise ValueError("this model has one stage only, which begins with token_ids or embeddings")
        if not self._is_tried:
            # With the first forward, which a worker makes before any request: weights are there by then.
            self._try(positions.device)
            self._is_tried = True
        if embeddings is None:
            if token_ids is None:
                raise ValueError("one of token_ids and embeddings must be given")
            embeddings = self.embed(token_ids)
        return self._compute(embeddings, positions)

    def _try(self, device: torch.device) -> None:
        """Raises for what only the loaded model shows."""
        architecture, vocab_size = self._info.architecture, self._info.vocab_size
        if isinstance(table := self._embedding[0], TokenTable):
            config = self._head[0].config
            names = ("pad_token_id", "bos_token_id", "eos_token_id", "unk_token_id")
            special = (getattr(config, name, None) for name in names)
            table.require_rows_alone(architecture, tuple(one for one in special if isinstance(one, int)))
        attentions = [module for module in self.modules() if isinstance(module, PagedAttention)]
        with attending_to_themselves(attentions):
            require_independent_tokens(
                architecture,
                lambda ids, positions: self._compute(self.embed(ids), positions),
                vocab_size,
                self._num_positions,
                device,
            )
            self._try_head(device)

    def _try_head(self, device: torch.device) -> None:
        """Raises where the library's class does more between its layers and its logits than is done here."""
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        embeddings = self.embed(ids)
        ours = self.logits(self._compute(embeddings, ids))
        given = {"inputs_embeds": embeddings.unsqueeze(0), "position_ids": ids.unsqueeze(0)}
        whole = self._whole[0](**given, use_cache=False)
        if differs(ours, whole.logits.squeeze(0)):
            raise refusal(self._info.architecture, "its logits are not made of what its layers give alone")

    def _compute(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # Copies: some classes scale what they are given in place.
        output = self._base[0](
            inputs_embeds=embeddings.unsqueeze(0).clone(), position_ids=positions.unsqueeze(0), use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self._head[0](inputs_embeds=hidden.unsqueeze(0).clone(), use_cache=False)
        logits: torch.Tensor = output.logits.squeeze(0)
        return logits

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._kv_specs

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        for name in self._layer_names:
            yield name, self.get_submodule(name)


def _implement(model: Any, attention: str, experts: str) -> None:
    """From now on compute with the functions of these names."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = attention
            config._experts_implementation = experts


def _rules(model: Any, naming: Naming) -> list[WeightRule]:
    """Where stored tensors go. What is in the place of the head or of a table keeps its weights further down."""
    names = {module: name for name, module in model.named_modules()}
    head, table = model.get_output_embeddings(), model.get_input_embeddings()
    moved: dict[str, str] = {}
    if isinstance(table, TokenTable):
        moved |= {names[table.library]: names[table], names[table.rows]: names[table]}
    rules = []
    if head.scores.projection is None:
        rules.append(WeightRule(f"{names[head]}.weight", None))
    else:
        moved[names[head.scores.projection]] = names[head]
    whole = [names[one] for one in names if isinstance(one, ParallelLinear | VocabEmbedding)]
    owned = tuple(f"{name}." for name in whole)
    plain = [name for name, _ in model.named_parameters() if not name.startswith(owned)]
    targets = {_before(name, moved): name for name in (*plain, *(f"{name}.*" for name in whole))}
    return [*rules, *naming.rules(targets), *(WeightRule(path, None) for path in FREQUENCY_TABLES)]


def _before(name: str, moved: Mapping[str, str]) -> str:
    """The library's name of what is called ``name`` now; ``moved`` is by the modules' names now."""
    place = next((place for place in moved if name.startswith(f"{place}.")), None)
    return name if place is None else moved[place] + name.removeprefix(place)


def _block_of(name: str) -> str:
    """The decoder layer that the attention module ``name`` belongs to: the path up to its first number."""
    found = re.match(r"(?:[^.]+\.)*?\d+(?=\.|$)", name)
    return name if found is None else found[0]


@plugin("model", capabilities={"tasks": ["generate"]})
def create_transformers(ctx: ModelContext, options: NoOptions) -> Model:
    """Any causal model of ``transformers`` whose attention can be replaced, by its architecture's class there."""
    del options
    if ctx.config is None or not isinstance(ctx.layers, LayerToolkit):
        raise ConfigError(f"model plugin {ctx.name!r} needs a worker's configuration and its layer toolkit")
    require_known(ctx.config.model)
    stages = ctx.config.parallel.pipeline_parallel_size
    if stages > 1 or (ctx.stage is not None and not (ctx.stage.has_embedding and ctx.stage.has_head)):
        raise UnsupportedModelError(
            f"{ctx.config.model.architecture} is run by transformers here, whose layers cannot be divided into several "
            "pipeline stages; set --pipeline-parallel-size 1"
        )
    return TransformersModel(ctx.config.model, ctx.layers)

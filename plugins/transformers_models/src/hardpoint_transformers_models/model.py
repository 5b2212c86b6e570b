"""A causal model of ``transformers`` as a model of the torch worker.

The library's modules compute everything but linear layers, the table of tokens, the head and attention, which are the
worker's. What the library's class does to logits behind its head is done by the class itself.

Legend: T tokens of the step, C hidden size, S sampled positions, V vocabulary.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.modeling_outputs import MoeModelOutputWithPast

from hardpoint.errors import ConfigError, UnsupportedModelError
from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_torch_runtime.layers import LayerToolkit, LMHead, ParallelLinear, VocabEmbedding
from hardpoint_transformers_models.architecture import build_on_meta, require_known
from hardpoint_transformers_models.division import Division
from hardpoint_transformers_models.independence import require_independent_tokens
from hardpoint_transformers_models.interception import PAGED, AttentionCall, TrialRun
from hardpoint_transformers_models.memory import materialize
from hardpoint_transformers_models.naming import Naming
from hardpoint_transformers_models.refusal import refusal
from hardpoint_transformers_models.replacement import PagedAttention, replace_attention, replace_layers

__all__ = ["TransformersModel", "create_transformers"]

TRIAL_TOKENS = 3
PLAIN_EXPERTS = "eager"
FREQUENCY_TABLES = ("model.rotary_emb.inv_freq", "model.layers.*.self_attn.rotary_emb.inv_freq")
"""Old checkpoints carry them; they are computed here."""


class _GivenHidden(torch.nn.Module):
    """In the place of the layers: hands on what was given as embeddings."""

    def forward(self, *, inputs_embeds: torch.Tensor, **given: Any) -> MoeModelOutputWithPast:
        del given
        return MoeModelOutputWithPast(last_hidden_state=inputs_embeds)


class TransformersModel(torch.nn.Module):
    """The modules of the library's model by their names there, with layers of the worker among them."""

    def __init__(self, info: ModelInfo, layers: LayerToolkit) -> None:
        super().__init__()
        self._info = info
        model = build_on_meta(info, layers.dtype)
        plan = getattr(model.config, "base_model_tp_plan", None)
        division = Division.of(info.architecture, plan, layers.parallel.size)
        naming = Naming(info.architecture, model)
        calls = try_forward(info, model, division)
        replace_layers(model, division, layers)
        _implement(model, PAGED, PLAIN_EXPERTS)
        own = frozenset(
            part
            for module in model.modules()
            if isinstance(module, ParallelLinear | VocabEmbedding | LMHead)
            for part in module.modules()
        )
        materialize(model, layers.dtype, layers.device, own)
        replace_attention(model, calls, layers)
        for name, stack in naming.stacks.items():
            model.get_submodule(name).place = stack.place
        self._rules = _rules(model, naming)
        for name, module in model.named_children():
            self.add_module(name, module)
        self._layer_names = tuple(dict.fromkeys(_block_of(call.name) for call in calls))
        # Hidden from module registration: every module of theirs is one of this model's.
        self._base, self._embedding = (model.base_model,), (model.get_input_embeddings(),)
        self._head = (_without_layers(model),)
        self._kv_specs = layers.kv_cache_specs()
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
            self._is_tried = True
            attentions = [module for module in self.modules() if isinstance(module, PagedAttention)]
            require_independent_tokens(
                self._info.architecture, attentions, self._compute_ids, self._info.vocab_size, positions.device
            )
        if embeddings is None:
            if token_ids is None:
                raise ValueError("one of token_ids and embeddings must be given")
            embeddings = self.embed(token_ids)
        return self._compute(embeddings, positions)

    def _compute_ids(self, token_ids: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(len(token_ids), device=token_ids.device)
        return self._compute(self.embed(token_ids), positions)

    def _compute(self, embeddings: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        output = self._base[0](
            inputs_embeds=embeddings.unsqueeze(0), position_ids=positions.unsqueeze(0), use_cache=False
        )
        hidden: torch.Tensor = output.last_hidden_state.squeeze(0)
        return hidden

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self._head[0](inputs_embeds=hidden.unsqueeze(0), use_cache=False).logits.squeeze(0)
        return logits

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._kv_specs

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        for name in self._layer_names:
            yield name, self.get_submodule(name)


def try_forward(info: ModelInfo, model: Any, division: Division) -> list[AttentionCall]:
    """The attention calls of one rank, in order, from a forward of ``model`` without memory.

    Raises ``UnsupportedModelError`` for a model that attends in a way the worker's attention cannot.
    """
    tried = copy.deepcopy(model) if division.size > 1 else model
    division.shrink(tried.base_model)
    run = TrialRun(info.architecture, {module: name for name, module in tried.named_modules()})
    ids = torch.zeros((1, TRIAL_TOKENS), dtype=torch.int64, device="meta")
    try:
        with run.active(), torch.no_grad():
            tried(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.arange(TRIAL_TOKENS, device="meta").unsqueeze(0),
                use_cache=False,
            )
    except UnsupportedModelError:
        raise
    except Exception as error:
        divided = f" divided among {division.size} ranks" if division.size > 1 else ""
        raise refusal(
            info.architecture, f"a trial run{divided} without weights failed with {type(error).__name__}: {error}"
        ) from error
    num_layers = getattr(model.config, "num_hidden_layers", None)
    if not run.calls or (isinstance(num_layers, int) and len(run.calls) != num_layers):
        raise refusal(
            info.architecture,
            f"{len(run.calls)} of its {num_layers} layers attend through functions that can be replaced, so others "
            "keep what the KV cache does not hold",
        )
    return run.calls


def _implement(model: Any, attention: str, experts: str) -> None:
    """From now on compute with the functions of these names."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if isinstance(config, PreTrainedConfig):
            config._attn_implementation = attention
            config._experts_implementation = experts


def _without_layers(model: Any) -> Any:
    """The library's model for head and logits alone: it shares the modules of ``model`` but the layers."""
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _GivenHidden()}
    return head


def _rules(model: Any, naming: Naming) -> list[WeightRule]:
    """Where stored tensors go. What is in the place of the head keeps its weights one level further down."""
    names = {module: name for name, module in model.named_modules()}
    head = model.get_output_embeddings()
    whole = [names[one] for one in names if isinstance(one, ParallelLinear | VocabEmbedding)]
    if head.scores.projection is None:
        rules = [WeightRule(f"{names[head]}.weight", None)]
    else:
        inner = names[head.scores.projection]
        whole.remove(inner)
        rules = naming.rules({f"{names[head]}.*": f"{inner}.*"})
    owned = tuple(f"{name}." for name in (*whole, names[head]))
    plain = [name for name, _ in model.named_parameters() if not name.startswith(owned)]
    rules += naming.rules({name: name for name in (*plain, *(f"{name}.*" for name in whole))})
    return [*rules, *(WeightRule(path, None) for path in FREQUENCY_TABLES)]


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
        raise refusal(
            ctx.config.model.architecture,
            "its layers cannot be divided into several pipeline stages; set --pipeline-parallel-size 1",
        )
    return TransformersModel(ctx.config.model, ctx.layers)

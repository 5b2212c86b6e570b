"""A forward of a model without memory, from which everything is learned that must be known before weights are read."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from hardpoint.errors import UnsupportedModelError
from hardpoint_transformers_models.division import Division
from hardpoint_transformers_models.head import without_layers
from hardpoint_transformers_models.interception import AttentionCall, TrialRun
from hardpoint_transformers_models.refusal import OWN_ATTENTION, first_sentence, refusal

__all__ = ["try_forward"]

TRIAL_TOKENS = 3


def try_forward(architecture: str, model: Any, division: Division) -> list[AttentionCall]:
    """The attention calls of one rank, in order, from forwards of ``model``, which is on torch's device without memory.

    Raises ``UnsupportedModelError`` for a model that attends in a way the worker's attention cannot, and for one whose
    layers look at tokens themselves: they are given embeddings.
    """
    tried = copy.deepcopy(model) if division.size > 1 else model
    division.shrink(tried.base_model)
    ids = torch.zeros((1, TRIAL_TOKENS), dtype=torch.int64, device="meta")
    with _last_states(tried.base_model) as states:
        calls, modules = _forward(architecture, tried, division, input_ids=ids)
    _require_all_layers(architecture, model, calls)
    embedding = tried.get_input_embeddings()
    name = next(name for name, module in tried.named_modules() if module is embedding)
    others, others_modules = _forward(architecture, tried, division, inputs_embeds=embedding(ids))
    within = [one for one in modules if one != name and not one.startswith(f"{name}.")]
    if differing := sorted(set(within) ^ set(others_modules)):
        raise refusal(architecture, f"{differing[0]} looks at tokens, beside the table of them")
    if not states:
        raise refusal(architecture, "its class calls parts of its layers by themselves")
    _try_head(architecture, tried, states[-1])
    if within != others_modules or calls != others:
        raise refusal(architecture, "it computes otherwise from tokens than from what its table has for them")
    return calls


def _forward(
    architecture: str, tried: Any, division: Division, **given: torch.Tensor
) -> tuple[list[AttentionCall], list[str]]:
    """The attention calls, and the names of all modules in the order in which they were called."""
    names = {module: name for name, module in tried.named_modules()}
    run = TrialRun(architecture, names)
    positions = torch.arange(TRIAL_TOKENS, device="meta").unsqueeze(0)
    try:
        with run.active(), torch.no_grad(), _NothingFound(), _called(names) as called:
            tried(attention_mask=torch.ones_like(positions), position_ids=positions, use_cache=False, **given)
    except UnsupportedModelError:
        raise
    except Exception as error:
        raise _failure(architecture, division, error) from error
    return run.calls, called


def _failure(architecture: str, division: Division, error: Exception) -> UnsupportedModelError:
    divided = f" divided among {division.size} ranks" if division.size > 1 else ""
    trial, said = f"a trial run{divided} without weights", first_sentence(error)
    if isinstance(error, NotImplementedError) or " meta " in said:
        return refusal(architecture, f"its code looks at values, not at shapes alone, so {trial} failed with {said}")
    return refusal(architecture, f"{trial} failed with {said}; sizes in its configuration may not fit one another")


def _try_head(architecture: str, tried: Any, hidden: torch.Tensor) -> None:
    """Logits must come of the last ``hidden`` states, without anything else that the layers know."""
    try:
        with torch.no_grad():
            without_layers(tried)(inputs_embeds=hidden, use_cache=False)
    except Exception as error:
        raise refusal(
            architecture, f"its logits cannot be computed from what its layers give alone: {first_sentence(error)}"
        ) from error


class _NothingFound(TorchDispatchMode):
    """Without memory no value is known: experts, who look for their tokens, find none."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        if func is torch.ops.aten.nonzero.default and args[0].device.type == "meta":
            return args[0].new_empty((0, args[0].dim()), dtype=torch.int64)
        return func(*args, **(kwargs or {}))


@contextmanager
def _last_states(base: torch.nn.Module) -> Iterator[list[torch.Tensor]]:
    """What ``base`` gives meanwhile."""
    states: list[torch.Tensor] = []
    hook = base.register_forward_hook(lambda _, __, output: states.append(output.last_hidden_state))
    try:
        yield states
    finally:
        hook.remove()


@contextmanager
def _called(names: dict[torch.nn.Module, str]) -> Iterator[list[str]]:
    called: list[str] = []
    hooks = [
        module.register_forward_pre_hook(lambda *_, name=name: called.append(name)) for module, name in names.items()
    ]
    try:
        yield called
    finally:
        for hook in hooks:
            hook.remove()


def _require_all_layers(architecture: str, model: Any, calls: list[AttentionCall]) -> None:
    num_layers = getattr(model.config, "num_hidden_layers", None)
    if not calls:
        raise refusal(architecture, OWN_ATTENTION)
    if isinstance(num_layers, int) and len(calls) != num_layers:
        raise refusal(
            architecture,
            f"{len(calls)} of its {num_layers} layers attend through functions that can be replaced, so others "
            "keep what the KV cache does not hold",
        )

"""What layers of ``transformers`` call in the place of their own attention, in a trial run and in earnest.

The library looks its functions for attention, masks and experts up by the names that a model's configuration has. Under
``PAGED`` a layer's attention is that of the worker: no masks are made, since the forward context says who sees whom.
Under ``SHAPES_ONLY`` nothing is computed: every call is taken down by the active :class:`TrialRun`.

Legend: T tokens, H query heads, K KV heads, D size of a head's keys, V of its values.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.integrations.moe import ExpertsInterface

from hardpoint.errors import UnsupportedModelError
from hardpoint_transformers_models.refusal import first_sentence, refusal

__all__ = ["PAGED", "SHAPES_ONLY", "SLOT", "AttentionCall", "TrialRun"]

PAGED = "hardpoint_paged"
SHAPES_ONLY = "hardpoint_shapes_only"
SLOT = "hardpoint_attention"
"""The name under which a module of ``transformers`` holds the attention that it calls."""
FAR = 1 << 20
"""A position far behind the beginning, beyond any window."""
NEAR = 12
"""Masks are tried for every pair of so many positions at the beginning."""
DISTANCES = (0, 1, 2, 3, 5, 8, 16, 64, 65, 127, 128, 1000, 4096, 65_537, FAR)
"""How far tokens lie behind one another where masks are tried at ``FAR``."""
TRIED_HEADS = (0, 1)
UNDERSTOOD = frozenset({"module", "query", "key", "value", "attention_mask", "scaling", "dropout", "softcap", "s_aux"})
"""Arguments of an attention function that :class:`AttentionCall` speaks of, or that change nothing while answering."""
HARMLESS_TENSORS = frozenset({"s_aux", "position_ids", "cache_position"})
MAX_DEVIATION = 1e-4


@dataclass(frozen=True, slots=True)
class Mask:
    """Who sees whom: everyone those before and itself, at most ``window`` of them; or ``fault`` says why not."""

    window: int | None = None
    fault: str = ""

    @classmethod
    def of(cls, sees: Callable[[int, int], bool], size: int | None) -> Mask:
        """``sees(query, key)`` answers by position; ``size`` is that of a window or a chunk, if there is one."""
        pairs = [(query, key) for query in range(NEAR) for key in range(NEAR)]
        pairs += [(FAR, FAR - distance) for distance in (*DISTANCES, -1)]
        if size is not None:
            around = range(max(0, size - 1), size + 2)
            pairs += [(FAR, FAR - distance) for distance in around] + [(distance, 0) for distance in around]
        try:
            wrong = [(query, key) for query, key in pairs if sees(query, key) != _is_seen(query, key, size)]
        except Exception as error:
            return cls(fault=f"a mask that depends on more than positions ({first_sentence(error)})")
        if not wrong:
            return cls(size)
        if any(key > query for query, key in wrong):
            return cls(fault="a mask that is not causal")
        return cls(fault="a mask of its own" if size is None else f"chunks or another pattern of {size} tokens")


def _is_seen(query: int, key: int, window: int | None) -> bool:
    return key <= query and (window is None or query - key < window)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer asks of attention; ``name`` is that of the module in the model."""

    name: str
    num_heads: int
    num_kv_heads: int
    key_size: int
    value_size: int
    scale: float
    sliding_window: int | None = None
    soft_cap: float | None = None
    has_sinks: bool = False


@dataclass(slots=True)
class TrialRun:
    """Takes down the attention calls of one forward on torch's device without memory.

    ``names`` is by module. Raises ``UnsupportedModelError``, out of the forward, for a call that
    :class:`AttentionCall` cannot express.
    """

    architecture: str
    names: dict[torch.nn.Module, str]
    calls: list[AttentionCall] = field(default_factory=list)
    _masks: list[tuple[torch.Tensor, Mask]] = field(default_factory=list)

    @contextmanager
    def active(self) -> Iterator[TrialRun]:
        token = _running.set(self)
        try:
            yield self
        finally:
            _running.reset(token)

    def mask(self, q_length: int, kv_length: int, mask_function: Callable[..., Any], size: int | None) -> torch.Tensor:
        """A tensor that stands for the mask where layers hand it to their attention."""

        def sees(query: int, key: int) -> bool:
            zero, *heads = (torch.tensor(number) for number in (0, *TRIED_HEADS))
            said = {bool(mask_function(zero, head, torch.tensor(query), torch.tensor(key))) for head in heads}
            if len(said) > 1:
                raise ValueError("heads have masks of their own")
            return said.pop()

        with torch.device("cpu"):
            found = Mask.of(sees, size)
        stand_in = torch.empty((1, 1, q_length, kv_length), dtype=torch.bool, device="meta")
        self._masks.append((stand_in, found))
        return stand_in

    def attend(
        self,
        module: torch.nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
        given: dict[str, Any],
    ) -> torch.Tensor:
        name = self.names.get(module, type(module).__name__)
        window = self._window(name, module, mask)
        for argument, what in given.items():
            if isinstance(what, torch.Tensor) and argument not in HARMLESS_TENSORS:
                raise self._refusal(name, f"gives its attention {argument!r}, a tensor that the call cannot express")
        if given.get("is_causal", True) is False or getattr(module, "is_causal", True) is False:
            raise self._refusal(name, "attends to tokens behind, or to those of an encoder")
        if any(one.name == name for one in self.calls):
            raise self._refusal(name, "attends more than once in a forward")
        if query.shape[2] != key.shape[2]:
            raise self._refusal(name, f"attends to {key.shape[2]} tokens from {query.shape[2]}")
        scale, cap = given.get("scaling"), given.get("softcap")
        call = AttentionCall(
            name,
            num_heads=query.shape[1],
            num_kv_heads=key.shape[1],
            key_size=query.shape[3],
            value_size=value.shape[3],
            scale=query.shape[3] ** -0.5 if scale is None else float(scale),
            sliding_window=window,
            soft_cap=float(cap) if cap else None,
            has_sinks=given.get("s_aux") is not None,
        )
        self._compare(module, call, given)
        self.calls.append(call)
        return query.new_empty((query.shape[0], query.shape[2], query.shape[1], value.shape[3]))

    def _window(self, name: str, module: torch.nn.Module, mask: torch.Tensor | None) -> int | None:
        if mask is None:
            raise self._refusal(name, "gives its attention no mask in a batch that needs one")
        found = next((known for stand_in, known in self._masks if stand_in is mask), None)
        if found is None:
            raise self._refusal(name, "gives its attention a mask, or a bias, that it made itself")
        if found.fault:
            raise self._refusal(name, f"gives its attention {found.fault}")
        return found.window

    def _compare(self, module: torch.nn.Module, call: AttentionCall, given: dict[str, Any]) -> None:
        """Refuse where the library's own function for this layer computes something else than the call says."""
        plain = getattr(sys.modules[type(module).__module__], "eager_attention_forward", None)
        if plain is None:
            raise self._refusal(call.name, "has no plain attention function that could tell what it computes")
        for argument in inspect.signature(plain).parameters.keys() - UNDERSTOOD:
            is_told = argument == "sliding_window" and given.get(argument) == call.sliding_window
            if given.get(argument) is not None and argument != "kwargs" and not is_told:
                raise self._refusal(call.name, f"gives its attention {argument!r}, which the call cannot express")
        with torch.device("cpu"), torch.no_grad(), self._tried_sinks(module, call, given) as sinks:
            generator = torch.Generator().manual_seed(1)
            length = 3
            shapes = ((call.num_heads, call.key_size), (call.num_kv_heads, call.key_size))
            query, key, value = (
                torch.randn((1, heads, length, size), generator=generator) * 3
                for heads, size in (*shapes, (call.num_kv_heads, call.value_size))
            )
            hidden = torch.full((length, length), float("-inf")).triu(1)[None, None]
            try:
                said, _ = plain(module, query, key, value, hidden, **{**given, **sinks})
            except Exception as error:
                raise self._refusal(
                    call.name, f"has an attention function that could not be tried: {first_sentence(error)}"
                ) from error
            expected = _attention_of(call, query, key, value, hidden, sinks.get("s_aux"))
        if said.shape != expected.shape or not torch.allclose(said, expected, atol=MAX_DEVIATION, rtol=MAX_DEVIATION):
            raise self._refusal(call.name, "computes more in its attention than scores, a cap and a softmax")

    @contextmanager
    def _tried_sinks(
        self, module: torch.nn.Module, call: AttentionCall, given: dict[str, Any]
    ) -> Iterator[dict[str, torch.Tensor]]:
        """They are weights, which are not there yet: others are in their place meanwhile."""
        if not call.has_sinks:
            yield {}
            return
        weights = module._parameters.get("sinks")
        if weights is None or given["s_aux"] is not weights or weights.shape != (call.num_heads,):
            raise self._refusal(call.name, "gives its attention sinks that are not one weight of its own for each head")
        drawn = torch.nn.Parameter(torch.linspace(-1.0, 2.0, call.num_heads), requires_grad=False)
        module._parameters["sinks"] = drawn
        try:
            yield {"s_aux": drawn}
        finally:
            module._parameters["sinks"] = weights

    def _refusal(self, name: str, what: str) -> UnsupportedModelError:
        return refusal(self.architecture, f"{name} {what}")


def _attention_of(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    hidden: torch.Tensor,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[1, T, H, V]: what the call says, of [1, H, T, D] and [1, K, T, D or V]; ``hidden`` is added to the scores, and
    ``sinks`` [H] take part in the softmax without a value."""
    group = call.num_heads // call.num_kv_heads
    scores = query @ key.repeat_interleave(group, 1).transpose(2, 3) * call.scale
    if call.soft_cap is not None:
        scores = call.soft_cap * torch.tanh(scores / call.soft_cap)
    scores = scores + hidden
    if sinks is not None:
        column = sinks.view(1, -1, 1, 1).expand(*scores.shape[:-1], 1)
        weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value.repeat_interleave(group, 1)).transpose(1, 2)


_running: ContextVar[TrialRun] = ContextVar("hardpoint_trial_run")


def _attend_on_trial(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    return _running.get().attend(module, query, key, value, attention_mask, given), None


def _mask_on_trial(
    *, q_length: int, kv_length: int, mask_function: Callable[..., Any], local_size: int | None = None, **given: Any
) -> torch.Tensor:
    del given
    return _running.get().mask(q_length, kv_length, mask_function, local_size)


def _experts_on_trial(module: torch.nn.Module, hidden: torch.Tensor, *given: Any, **named: Any) -> torch.Tensor:
    del module, given, named
    return torch.empty_like(hidden)


def _attend_paged(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    **given: Any,
) -> tuple[torch.Tensor, None]:
    del attention_mask, given
    output: torch.Tensor = getattr(module, SLOT)(query, key, value)
    return output, None


AttentionInterface.register(PAGED, _attend_paged)
AttentionInterface.register(SHAPES_ONLY, _attend_on_trial)
AttentionMaskInterface.register(SHAPES_ONLY, _mask_on_trial)
ExpertsInterface.register(SHAPES_ONLY, _experts_on_trial)

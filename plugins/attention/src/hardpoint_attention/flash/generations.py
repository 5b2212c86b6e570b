"""The three generations behind one call, and how their packages are loaded.

Packages are imported when a generation is loaded, never before: a probe or a capability answer loads nothing.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint_attention.flash.calls import AttentionCall, FlashKernel, accepts, copy_result
from hardpoint_attention.flash.installed import PACKAGES

MASK_PARAMETERS, SCALE_PARAMETERS = ("mask_mod", "aux_tensors"), ("k_descale", "v_descale")
"""What not every version of generation 4 takes."""

__all__ = ["FlashAttention2", "FlashAttention3", "FlashAttention4", "load_generation"]


class FlashAttention2:
    """``flash_attn.flash_attn_varlen_func``: pages through ``block_table``, key lengths as prefix sums."""

    generation = 2
    needs_cu_key_lens = True
    needs_canonical_strides = False

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_out = accepts(function, "out")

    def lacks(self, *, masks: bool, scales: bool) -> str | None:
        return "generation 2 takes neither masks nor scales" if masks or scales else None

    def __call__(self, call: AttentionCall) -> torch.Tensor | None:
        extra = {"out": call.output} if self._takes_out else {}
        result = self._function(
            call.query,
            call.key,
            call.value,
            cu_seqlens_q=call.cu_query_lens,
            cu_seqlens_k=call.cu_key_lens,
            max_seqlen_q=call.max_query_len,
            max_seqlen_k=call.max_key_len,
            dropout_p=0.0,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=call.window,
            softcap=call.soft_cap,
            alibi_slopes=call.alibi_slopes,
            return_attn_probs=call.wants_lse,
            block_table=call.page_table,
            **extra,
        )
        return copy_result(call, result, takes_out=self._takes_out)


class FlashAttention3:
    """``flash_attn_interface``: one function for paged rows, which takes a schedule, and one for tokens end to end.

    The published kernels know no attention sinks; with the log-sum-exp at hand the output is rescaled instead, which
    is exact: a sink only adds to the softmax's denominator.
    """

    generation = 3
    needs_cu_key_lens = False
    needs_canonical_strides = True

    def __init__(self, paged: Callable[..., Any], fresh: Callable[..., Any]) -> None:
        self._paged, self._fresh = paged, fresh
        self._paged_takes_out, self._fresh_takes_out = accepts(paged, "out"), accepts(fresh, "out")

    def lacks(self, *, masks: bool, scales: bool) -> str | None:
        del scales
        return "generation 3 takes no masks" if masks else None

    def __call__(self, call: AttentionCall) -> torch.Tensor | None:
        wants_lse = call.wants_lse
        call.wants_lse = wants_lse or call.sinks is not None
        lse = self._call_fresh(call) if call.page_table is None else self._call_paged(call)
        if call.sinks is not None and lse is not None:
            lse = _with_sinks(call.output, lse, call.sinks)
        return lse if wants_lse else None

    def _call_paged(self, call: AttentionCall) -> torch.Tensor | None:
        extra = {"out": call.output} if self._paged_takes_out else {}
        result = self._paged(
            call.query,
            call.key,
            call.value,
            cache_seqlens=call.key_lens,
            page_table=call.page_table,
            cu_seqlens_q=call.cu_query_lens,
            max_seqlen_q=call.max_query_len,
            k_descale=call.key_descale,
            v_descale=call.value_descale,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=call.window,
            attention_chunk=call.chunk_size,
            softcap=call.soft_cap,
            scheduler_metadata=call.schedule,
            num_splits=call.num_splits,
            return_softmax_lse=call.wants_lse,
            **extra,
        )
        return copy_result(call, result, takes_out=self._paged_takes_out)

    def _call_fresh(self, call: AttentionCall) -> torch.Tensor | None:
        extra = {"out": call.output} if self._fresh_takes_out else {}
        result = self._fresh(
            call.query,
            call.key,
            call.value,
            cu_seqlens_q=call.cu_query_lens,
            cu_seqlens_k=call.cu_key_lens,
            max_seqlen_q=call.max_query_len,
            max_seqlen_k=call.max_key_len,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=call.window,
            attention_chunk=call.chunk_size,
            softcap=call.soft_cap,
            num_splits=max(1, call.num_splits),
            return_attn_probs=call.wants_lse,
            **extra,
        )
        return copy_result(call, result, takes_out=self._fresh_takes_out)


class FlashAttention4:
    """``flash_attn.cute.flash_attn_varlen_func``: masks by modifiers, sinks of its own, None for an open window."""

    generation = 4
    needs_cu_key_lens = False
    needs_canonical_strides = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._takes_out = accepts(function, "out")
        self._optional = {name for name in (*MASK_PARAMETERS, *SCALE_PARAMETERS) if accepts(function, name)}

    def __call__(self, call: AttentionCall) -> torch.Tensor | None:
        result = self._function(
            call.query,
            call.key,
            call.value,
            cu_seqlens_q=call.cu_query_lens,
            cu_seqlens_k=call.cu_key_lens if call.page_table is None else None,
            max_seqlen_q=call.max_query_len,
            max_seqlen_k=call.max_key_len,
            seqused_k=None if call.page_table is None else call.key_lens,
            page_table=call.page_table,
            softmax_scale=call.scale,
            causal=call.causal,
            window_size=_open_window(call.window),
            learnable_sink=None if call.sinks is None else call.sinks.to(torch.bfloat16),
            softcap=call.soft_cap,
            num_splits=call.num_splits,
            return_lse=call.wants_lse,
            **self._extra(call),
        )
        return copy_result(call, result, takes_out=self._takes_out)

    def lacks(self, *, masks: bool, scales: bool) -> str | None:
        wanted = (*(MASK_PARAMETERS if masks else ()), *(SCALE_PARAMETERS if scales else ()))
        missing = sorted(set(wanted) - self._optional)
        if not missing:
            return None
        return f"the installed FlashAttention 4 takes no {', '.join(missing)}; install a newer one ({PACKAGES[4]})"

    def _extra(self, call: AttentionCall) -> dict[str, Any]:
        wanted = {
            "mask_mod": call.mask,
            "aux_tensors": call.mask_tensors,
            "k_descale": call.key_descale,
            "v_descale": call.value_descale,
            "out": call.output if self._takes_out else None,
        }
        return {name: value for name, value in wanted.items() if value is not None}


def load_generation(generation: int) -> FlashKernel:
    """Import a generation's package. Raises ``ConfigError`` naming what to install when that fails."""
    try:
        if generation == 2:
            return FlashAttention2(importlib.import_module("flash_attn").flash_attn_varlen_func)
        if generation == 3:
            module = importlib.import_module("flash_attn_interface")
            return FlashAttention3(module.flash_attn_with_kvcache, module.flash_attn_varlen_func)
        return FlashAttention4(importlib.import_module("flash_attn.cute").flash_attn_varlen_func)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"FlashAttention {generation} cannot be loaded ({error}); install {PACKAGES[generation]} for this device, "
            "or choose another backend with --attention-backend"
        ) from error


def _open_window(window: tuple[int, int]) -> tuple[int | None, int | None]:
    left, right = window
    return None if left < 0 else left, None if right < 0 else right


def _with_sinks(output: torch.Tensor, lse: torch.Tensor, sinks: torch.Tensor) -> torch.Tensor:
    """Rescale ``output`` [T, H, D] in place and return the log-sum-exp [H, T] with the sinks in it."""
    # Kernels say +inf of a query that saw no key.
    lse = torch.where(lse == torch.inf, -torch.inf, lse)
    total = torch.logaddexp(lse, sinks.float().unsqueeze(1))
    output.mul_(torch.exp(lse - total).t().unsqueeze(-1))
    return total

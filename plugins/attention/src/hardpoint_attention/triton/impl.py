"""One layer's attention: which kernels run over which tensors.

Legend: T tokens of the step, H query heads, K KV heads, D head size, V size of values, B block size, S splits.
"""

from __future__ import annotations

from dataclasses import replace
from types import ModuleType
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import AttentionImpl, AttentionLayerParams
from hardpoint_attention.cascade import CascadePolicy, CascadeQuestion, decide_cascade
from hardpoint_attention.triton.configs import size_class
from hardpoint_attention.triton.device import device_facts
from hardpoint_attention.triton.metadata import TritonMetadata
from hardpoint_attention.triton.planning import LaunchPlan, LaunchQuestion, Planner
from hardpoint_attention.triton.scratch import Scratch
from hardpoint_attention.triton.states import CachedStates, given_states, paged_states

__all__ = ["TritonImpl"]


class TritonImpl(AttentionImpl):
    """Plain layers and latent ones, over the cache or over the step's own keys.

    ``plan`` chooses tiles and splits; ``cascade`` decides on common prefixes, None: they are not looked for.
    """

    def __init__(
        self, params: AttentionLayerParams, scratch: Scratch, plan: Planner, cascade: CascadePolicy | None
    ) -> None:
        self.params = params
        self._scratch = scratch
        self._plan = plan
        self._cascade = cascade
        self._slopes: torch.Tensor | None = None
        scratch.expect(params.num_heads, params.head_size)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: TritonMetadata | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        if kv_cache is None:
            states = given_states(key, value)
        else:
            states = self._paged(kv_cache, output.shape[-1])
        self._attend(query, states, metadata, output, None)
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: TritonMetadata, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(output.shape[:2], -torch.inf, dtype=torch.float32, device=output.device)
        states = self._paged(kv_cache, output.shape[-1])
        self._attend(query, states, metadata, output, lse)
        return output, lse

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        states = self._paged(kv_cache)
        is_scaled = states.is_quantized and states.token_scales is None
        _launch().write(
            key,
            None if states.values is None else value,
            (states.keys, states.keys if states.values is None else states.values),
            slot_mapping,
            scales=(self.params.key_scale, self.params.value_scale) if is_scaled else (None, None),
            token_scales=states.token_scales,
            limit=states.limit,
        )

    def _paged(self, kv_cache: torch.Tensor, value_size: int | None = None) -> CachedStates:
        converts_e4m3 = device_facts(kv_cache.device).converts_e4m3
        return paged_states(kv_cache, self.params.head_size, value_size, converts_e4m3=converts_e4m3)

    def _attend(
        self,
        query: torch.Tensor,
        states: CachedStates,
        metadata: TritonMetadata,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        if not metadata.num_tokens:
            return
        question = self._question(query, states, metadata)
        if self._uses_cascade(states, metadata, question):
            self._attend_in_cascade(query, states, metadata, question, output, lse)
            return
        plan = self._plan(question)
        launch, call = _launch(), self._call(query, states, metadata, plan)
        if plan.splits == 1:
            logs = None if lse is None else (*launch.strided(lse.unsqueeze(-1)), launch.LN2)
            launch.run_attend(query, call, output.unsqueeze(2), logs)
            return
        parts, part_lse = self._parts(metadata, plan.splits, output)
        launch.run_attend(query, call, parts, (*launch.strided(part_lse), 1.0))
        launch.combine(parts, part_lse, output, lse)

    def _attend_in_cascade(
        self,
        query: torch.Tensor,
        states: CachedStates,
        metadata: TritonMetadata,
        question: LaunchQuestion,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """R5.83: everybody's queries as one row over the prefix, then each row's own keys. Sinks go with the prefix."""
        launch = _launch()
        parts, part_lse = self._parts(metadata, 2, output)
        by_row = LaunchPlan(self._plan(question).tiles)
        as_one = LaunchPlan(self._plan(replace(question, num_rows=1, max_query_len=metadata.num_tokens)).tiles)
        whole = self._call(query, states, metadata, by_row)
        one_row = replace(whole.rows, num_rows=1, starts=metadata.prefix_starts, lengths=metadata.prefix_lens)
        prefix = replace(whole, rows=one_row, tiles=as_one.tiles, causal=0, masks=(None,) * 4)
        suffix = replace(whole, key_begin=metadata.common_prefix, shaping=(*whole.shaping[:3], None))
        for index, call in enumerate((prefix, suffix)):
            part = slice(index, index + 1)
            launch.run_attend(query, call, parts[:, :, part], (*launch.strided(part_lse[:, :, part]), 1.0))
        launch.combine(parts, part_lse, output, lse)

    def _parts(self, metadata: TritonMetadata, splits: int, output: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self._scratch.take(output.device, metadata.num_tokens, self.params.num_heads, splits, output.shape[-1])

    def _question(self, query: torch.Tensor, states: CachedStates, metadata: TritonMetadata) -> LaunchQuestion:
        params = self.params
        return LaunchQuestion(
            num_heads=params.num_heads,
            num_kv_heads=params.num_kv_heads,
            size=size_class(params.head_size, is_latent=states.values is None),
            element_bytes=query.element_size(),
            num_rows=metadata.num_rows,
            num_tokens=metadata.num_tokens,
            max_query_len=metadata.max_query_len,
            max_seq_len=metadata.max_seq_len,
            max_parts=Scratch.max_parts(params.num_heads, params.head_size),
            device=device_facts(query.device),
        )

    def _uses_cascade(self, states: CachedStates, metadata: TritonMetadata, question: LaunchQuestion) -> bool:
        if self._cascade is None or not metadata.common_prefix or not states.block_size:
            return False
        if 2 * metadata.num_tokens > question.max_parts or metadata.masks.ranges is not None:
            return False
        asked = CascadeQuestion(
            prefix_tokens=metadata.common_prefix,
            num_rows=metadata.num_rows,
            max_query_len=metadata.max_query_len,
            num_heads=self.params.num_heads,
            num_kv_heads=self.params.num_kv_heads,
            num_processors=question.device.processors,
            uses_alibi=self.params.alibi_slopes is not None,
            uses_window=self.params.sliding_window is not None,
            is_local=self.params.chunk_size is not None,
        )
        return decide_cascade(asked, self._cascade).is_accepted

    def _call(self, query: torch.Tensor, states: CachedStates, metadata: TritonMetadata, plan: LaunchPlan) -> Any:
        """An ``AttendCall`` over all of the layer's keys."""
        params, masks, launch = self.params, metadata.masks, _launch()
        if params.keeps_prompt and masks.prompt_lens is None:
            raise ValueError(
                f"layer {params.layer_name!r} keeps the prompt beside its window, but the step brings no prompt_lens"
            )
        is_scaled = states.is_quantized and states.token_scales is None
        rows = launch.RowTensors(
            metadata.num_rows,
            metadata.num_tokens,
            metadata.query_start_loc,
            metadata.seq_lens,
            metadata.block_table,
            metadata.key_starts,
        )
        return launch.AttendCall(
            rows=rows,
            keys=states.keys,
            values=states.values,
            token_scales=states.token_scales,
            key_scale=params.key_scale if is_scaled else None,
            value_scale=(params.key_scale if states.values is None else params.value_scale) if is_scaled else None,
            masks=(masks.row_causal, masks.prompt_lens, masks.range_starts, masks.ranges),
            shaping=(params.scale, params.logits_soft_cap, self._slopes_on(query.device), params.sinks),
            block_size=states.block_size,
            value_size=states.value_size,
            # What a layer keeps of a prompt is still behind the query, whatever a row says.
            causal=1 if params.keeps_prompt else 2 if masks.causal is None else int(masks.causal),
            window=params.sliding_window or 0,
            chunk=params.chunk_size or 0,
            keeps_prompt=params.keeps_prompt,
            tiles=plan.tiles,
            splits=plan.splits,
        )

    def _slopes_on(self, device: torch.device) -> torch.Tensor | None:
        if self.params.alibi_slopes is None:
            return None
        if self._slopes is None or self._slopes.device != device:
            self._slopes = torch.tensor(list(self.params.alibi_slopes), dtype=torch.float32, device=device)
        return self._slopes


def _launch() -> ModuleType:
    """Imported by the first layer that computes, since it imports Triton. Raises ``ConfigError`` where that fails."""
    try:
        from hardpoint_attention.triton import launch
    except Exception as error:
        raise ConfigError(
            f"attention backend 'triton' cannot load its kernels: {type(error).__name__}: {error}; install the package "
            "triton anew, or choose another backend with --attention-backend"
        ) from error
    return launch

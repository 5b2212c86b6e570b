"""The frozen description of one engine, made by the launcher and shipped to the engine process as msgpack."""

from __future__ import annotations

import msgspec

from hardpoint.interfaces.block_size import BlockSizeRule
from hardpoint.interfaces.engine import ModelLimits
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.scheduler import SchedulerLimits
from hardpoint.interfaces.worker import WorkerConfig


class EngineSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Everything an engine process needs beside the plugins, whose names are those that are active in the plan.

    Attributes:
        model_name: the served name.
        plan: the encoded plugin plan; every process boots from it.
        num_blocks: KV blocks including the null block, or None to divide the worker's budget.
        hybrid_kv_cache: layers may have block tables of different kinds; ``block_size_rules`` by attention backend.
        chat_template: overrides the tokenizer's own, or None.
        runtime_dir: private folder (0700) for sockets.
        stall_after_s: the step loop counts as stalled when one step takes longer.
        drain_timeout_s: how long SIGTERM lets running requests go on before they are aborted.
    """

    model_name: str
    plan: bytes
    model: ModelInfo
    worker_config: WorkerConfig
    limits: SchedulerLimits
    model_limits: ModelLimits
    num_blocks: int | None = None
    hybrid_kv_cache: bool = True
    block_size_rules: dict[str, BlockSizeRule] = {}
    chat_template: str | None = None
    runtime_dir: str = ""
    log_level: str = "INFO"
    stall_after_s: float = 30.0
    drain_timeout_s: float = 30.0

    @property
    def max_unfinished(self) -> int | None:
        """Sequences that may be running or waiting at a time; None where the queue has no limit."""
        waiting = self.limits.max_waiting
        return None if waiting is None else waiting + (self.limits.max_num_active_seqs or self.limits.max_num_seqs)

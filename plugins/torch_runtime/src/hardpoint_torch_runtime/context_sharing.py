"""Whether a worker's ranks can share the contexts of sequences (decode context parallelism), and how."""

from __future__ import annotations

from hardpoint.errors import ConfigError
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.layers.context_shards import ContextShards

__all__ = ["context_shards"]

OPTIONS = "plugins.worker.torch"


def context_shards(config: WorkerConfig, num_ranks: int, interleave: int) -> ContextShards | None:
    """How contexts are dealt out among ``num_ranks``; None for one rank, which keeps them whole.

    Raises ``ConfigError`` unless these are the ranks of the tensor-parallel group and all of them keep the same keys
    and values, and where a block would not hold whole rounds of dealing.
    """
    if num_ranks == 1:
        return None
    size = config.parallel.tensor_parallel_size
    if num_ranks != size:
        raise ConfigError(
            f"{OPTIONS}.context_ranks is {num_ranks}, but contexts can be dealt out only among all ranks that share "
            f"layers, and tensor_parallel_size is {size}; set both to the same number, or context_ranks to 1"
        )
    fields = config.model.config
    heads = fields.get("num_key_value_heads", fields.get("num_attention_heads"))
    if fields.get("kv_lora_rank") is None and heads != 1:
        raise ConfigError(
            f"{OPTIONS}.context_ranks is {num_ranks}, but {config.model.artifact.name!r} has {heads} key/value heads, "
            "of which ranks keep different ones: there is nothing to share; set context_ranks to 1 (models with one "
            "such head, or with latents, keep the same on all ranks)"
        )
    if config.block_size % interleave:
        raise ConfigError(
            f"{OPTIONS}.context_interleave is {interleave}, which does not divide blocks of {config.block_size} "
            "tokens; set it to a divisor of --block-size"
        )
    return ContextShards(num_ranks, interleave)

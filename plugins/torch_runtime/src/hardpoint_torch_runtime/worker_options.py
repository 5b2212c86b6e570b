"""The settings of the torch worker."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from hardpoint_torch_runtime.runner.pooling_plan import PoolingOptions

__all__ = ["TorchWorkerOptions"]


class TorchWorkerOptions(PoolingOptions):
    """Options under ``plugins.worker.torch``."""

    model: str | None = Field(
        default=None, description="`model` plugin to run instead of the one that is named like the architecture"
    )
    fallback_model: str | None = Field(
        default="transformers",
        description="`model` plugin that runs architectures without one of their name, where it is installed; unset: "
        "they are refused",
    )
    logits_processors: tuple[str, ...] = Field(
        default=(), description="`logits_processor` plugins to run, in this order"
    )
    warm_up_tokens: int = Field(
        default=16, ge=1, description="tokens of the made-up prompts that are computed before the first request"
    )
    check_logits_processors: bool = Field(
        default=False, description="stop the step when a processor that declares itself argmax-invariant is not"
    )
    asynchronous_output: bool | None = Field(
        default=None,
        description="leave results on the device until they are asked for, so that the next step can be submitted "
        "meanwhile; by default wherever the device works on its own",
    )
    recurrent_states: Literal["none", "align", "all"] = Field(
        default="none",
        description="which states recurrent layers keep of a sequence: `none` but the last one, so that no prefix is "
        "found; `align`: also those at the ends of steps that end with a block; `all`: one per block",
    )
    prompt_embeddings: bool = Field(default=True, description="take prompts that are given as embeddings")
    custom_ops: tuple[str, ...] = Field(
        default=(), description="`custom_op` plugins whose operators are registered before the model is created"
    )
    kernel_overrides: dict[str, str | tuple[str, ...]] = Field(
        default={},
        description="by seam, the `kernel_override` plugin to use there, or several in order of preference; "
        "`reference` is the plain kernel",
    )
    communicator: str | None = Field(
        default=None, description="`communicator` plugin for tensor parallelism instead of the platform's"
    )
    context_ranks: int = Field(
        default=1,
        ge=1,
        description="ranks that the tokens of every sequence are dealt out among in the KV cache (decode context "
        "parallelism): 1, or as many as `tensor_parallel_size`, for models whose ranks keep the same keys and values",
    )
    context_interleave: int = Field(
        default=1, ge=1, description="tokens of a sequence that are dealt to one rank at a time; divides the block size"
    )
    graph_backend: str | None = Field(
        default=None, description="`graph_backend` plugin that captures the forwards of decoding steps; by default none"
    )
    graph_sizes: tuple[int, ...] | None = Field(
        default=None,
        description="tokens of the steps to capture, others are padded to the next size; by default 1, 2, 4 and every "
        "multiple of 8 up to 512",
    )
    use_kernel_overrides: bool = Field(
        default=True, description="off: the plain kernel at every seam, to find out whether an override is at fault"
    )

    def named_overrides(self) -> dict[str, tuple[str, ...]]:
        """``kernel_overrides`` with a single name as a list of one."""
        return {
            seam: (wanted,) if isinstance(wanted, str) else wanted for seam, wanted in self.kernel_overrides.items()
        }

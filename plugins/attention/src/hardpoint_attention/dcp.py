"""What steps over contexts that are dealt out among ranks (decode context parallelism) are asked by kernels.

How tokens are dealt out, and how ranks merge their answers, is the runtime's affair:
:mod:`hardpoint_torch_runtime.layers.context_shards` and :mod:`hardpoint_torch_runtime.layers.context_ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

__all__ = ["QuerySplit", "offers_fused_draft_update", "split_queries"]


@dataclass(frozen=True, slots=True)
class QuerySplit:
    """Rows of a batch that has its decodes in front (R5.22)."""

    num_decodes: int
    num_decode_tokens: int
    num_prefills: int
    num_prefill_tokens: int


def split_queries(starts: np.ndarray, threshold: int = 1) -> QuerySplit:
    """Count rows with at most ``threshold`` query tokens, and the others. ``starts``: query offsets [R + 1].

    Raises ``ValueError`` where the former do not all come first.
    """
    is_prefill = np.diff(starts) > threshold
    decodes = int(np.argmax(is_prefill)) if is_prefill.any() else len(is_prefill)
    if not is_prefill[decodes:].all():
        raise ValueError(
            f"rows of {np.diff(starts).tolist()} query tokens mix those of up to {threshold} with longer ones; a "
            "builder that separates them must declare reorder_threshold"
        )
    tokens = int(starts[decodes] - starts[0])
    return QuerySplit(decodes, tokens, len(is_prefill) - decodes, int(starts[-1] - starts[decodes]))


def offers_fused_draft_update(dcp_size: int) -> bool:
    """Whether captured metadata may serve several draft steps (R5.90): not where the host decides per step which
    contexts a rank attends to, since a replay would not repeat the decision (P5.8)."""
    return dcp_size == 1

"""The table of tokens of models that do something to the rows they look up: scale them, or norm them.

Legend: T tokens, C hidden size, V vocabulary.
"""

from __future__ import annotations

import torch

from hardpoint_torch_runtime.layers import VocabEmbedding
from hardpoint_transformers_models.refusal import refusal

__all__ = ["TokenTable"]

NUM_TRIED = 16


class TokenTable(torch.nn.Module):
    """int64 [T] to [T, C]: rows of the worker's table, and then whatever the library's class does to each of them.

    The class looks rows up itself, so it is given those of the step as its table, and their places there as tokens.
    """

    def __init__(self, rows: VocabEmbedding, library: torch.nn.Embedding) -> None:
        super().__init__()
        self.rows = rows
        self._size = (library.num_embeddings, library.embedding_dim)
        # A padding token has no meaning among the rows of a step.
        library.padding_idx = None
        del library.weight
        self.library = library
        # No parameter: those of the step take its place. Initializations of the library look at it, too.
        self._give(torch.zeros(1, library.embedding_dim))

    def forward(self, token_ids: torch.Tensor) -> torch.Tensor:
        rows = self.rows(token_ids)
        self._give(rows)
        embedded: torch.Tensor = self.library(torch.arange(len(rows), device=rows.device))
        return embedded

    def require_rows_alone(self, architecture: str, special: tuple[int, ...]) -> None:
        """Raise ``UnsupportedModelError`` where equal rows are not treated alike: ``special`` tokens among others."""
        num_rows, size = self._size
        device = next(self.rows.parameters()).device
        ids = torch.linspace(0, num_rows - 1, NUM_TRIED).long()
        ids = torch.cat([ids, torch.tensor([one for one in special if 0 <= one < num_rows], dtype=torch.int64)])
        row = torch.linspace(-1.0, 2.0, size, device=device)
        self._give(row.expand(num_rows, size))
        embedded = self.library(ids.to(device))
        if not torch.equal(embedded, embedded[:1].expand_as(embedded)):
            kind = type(self.library).__name__
            raise refusal(architecture, f"its table of tokens, a {kind}, does not treat all tokens alike")

    def _give(self, rows: torch.Tensor) -> None:
        self.library.weight = rows

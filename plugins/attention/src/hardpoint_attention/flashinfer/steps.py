"""One step on the host, as wrappers plan it.

Legend: R rows, P pages of all rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

__all__ = ["PagedRows", "Step", "last_page_lens", "page_counts"]


@dataclass(frozen=True, slots=True)
class PagedRows:
    """Rows that one wrapper serves. Offsets and lengths are int32 on the host, as planning wants them.

    Attributes:
        query_starts: [R + 1], from the first token of these rows.
        page_starts: [R + 1], from the first page of these rows.
        pages: int32 on the device, ids of all the step's pages, of which these rows' begin at ``first_page``.
        last_page_lens: [R], tokens in the last page of each row.
    """

    query_starts: torch.Tensor
    page_starts: torch.Tensor
    pages: torch.Tensor
    first_page: int
    last_page_lens: torch.Tensor

    @property
    def num_rows(self) -> int:
        return self.last_page_lens.shape[0]

    @property
    def page_ids(self) -> torch.Tensor:
        """int32 [P]."""
        return self.pages[self.first_page : self.first_page + int(self.page_starts[-1])]


@dataclass(frozen=True, slots=True)
class Step:
    """What is planned. Of captured steps there is one record for each number of rows, filled anew in place.

    Attributes:
        decodes: rows of one query each, in front; None: there are none, or they are among ``others``.
        others: all other rows.
        fresh_starts: query offsets of all rows, for layers without a cache; ``fresh_key_starts`` those of an encoder's
            keys in cross-attention.
        for_graph: the decodes will be captured or replayed.
    """

    num_tokens: int
    page_size: int
    causal: bool
    decodes: PagedRows | None
    others: PagedRows | None
    fresh_starts: torch.Tensor
    fresh_key_starts: torch.Tensor
    for_graph: bool

    @property
    def num_decode_tokens(self) -> int:
        return 0 if self.decodes is None else self.decodes.num_rows


def page_counts(lengths: np.ndarray, page_size: int) -> np.ndarray:
    """Pages of rows with ``lengths`` tokens."""
    return -(-lengths // page_size)


def last_page_lens(lengths: np.ndarray, page_size: int) -> np.ndarray:
    """Tokens in the last page, a full one included; 0 where there is none."""
    return np.where(lengths > 0, (lengths - 1) % page_size + 1, 0)

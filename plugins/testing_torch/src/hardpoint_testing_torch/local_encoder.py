"""What the local driver adds for models whose decoder attends to an encoder's output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hardpoint.interfaces.attention import CommonAttentionMetadata
from hardpoint.interfaces.model import Model
from hardpoint_testing_torch.tiny_models import ENCODER_TOKENS
from hardpoint_torch_runtime import EncoderModel, MediaModel

__all__ = ["EncodedInputs", "LocalEncoder"]


@dataclass(slots=True)
class EncodedInputs:
    """Of one sequence: its encoder tokens, and the blocks that cross-attention layers keep them in."""

    num_tokens: int = 0
    blocks: list[int] = field(default_factory=list)


class LocalEncoder:
    """Gives every new sequence the example input of the model's encoder."""

    def __init__(self, model: Model, block_size: int, take_block: Callable[[], int]) -> None:
        self._model: EncoderModel | None = None
        if not isinstance(model, MediaModel) and isinstance(model, EncoderModel):
            self._model = model
        self._block_size = block_size
        self._take = take_block

    @torch.inference_mode()
    def enter(self, sequences: Sequence[EncodedInputs]) -> tuple[torch.Tensor | None, torch.Tensor]:
        """Outputs [E, C] for those of ``sequences`` that have none yet, and the slots int64 [E] that they go to."""
        new = [sequence for sequence in sequences if sequence.num_tokens == 0] if self._model is not None else []
        if self._model is None or not new:
            return None, torch.empty(0, dtype=torch.int64)
        feature = self._model.example_input(ENCODER_TOKENS)
        reason = self._model.refuse_input(feature)
        if reason is not None:
            raise ValueError(f"the model refuses its own example input: {reason}")
        size, slots = self._block_size, []
        outputs = list(self._model.encode([feature] * len(new)))
        for sequence, output in zip(new, outputs, strict=True):
            sequence.num_tokens = output.shape[0]
            sequence.blocks = [self._take() for _ in range(-(-sequence.num_tokens // size))]
            slots += [sequence.blocks[place // size] * size + place % size for place in range(sequence.num_tokens)]
        return torch.cat(outputs), torch.tensor(slots)

    @staticmethod
    def crossed(
        common: CommonAttentionMetadata, sequences: Sequence[EncodedInputs], slots: torch.Tensor
    ) -> CommonAttentionMetadata:
        """``common`` with the encoder's tokens in the place of the sequences' own."""
        lengths = np.array([sequence.num_tokens for sequence in sequences], dtype=np.int32)
        table = np.zeros((len(sequences), max(len(sequence.blocks) for sequence in sequences)), dtype=np.int32)
        for row, sequence in enumerate(sequences):
            table[row, : len(sequence.blocks)] = sequence.blocks
        return replace(
            common,
            max_seq_len=int(lengths.max()),
            seq_lens=torch.from_numpy(lengths),
            seq_lens_cpu=lengths,
            block_table=torch.from_numpy(table),
            slot_mapping=slots,
            causal=False,
        )

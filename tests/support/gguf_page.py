"""The page that says which GGUF files are read, by the names that the format has, and which architectures have none."""

from __future__ import annotations

from collections.abc import Mapping

from hardpoint_model_io.formats.gguf_table import ROWS
from hardpoint_model_io.formats.gguf_types import SUPPORTED_TYPES
from model_sizes import entries

__all__ = ["UNREAD", "gguf_page"]

UNREAD: Mapping[str, tuple[str, ...]] = {
    "The format has no name for them.": (
        "BartForConditionalGeneration",
        "OPTForCausalLM",
        "WhisperForConditionalGeneration",
    ),
    "Converters put what sees into a file of its own (mmproj, the architecture `clip`), which is refused by name. The "
    "other file holds a language model, and is read as that: `gemma3`, `llama`, `qwen2`, `qwen2vl`.": (
        "Gemma3ForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
    ),
    "Their files go by the name of another, and are read as that: Mistral's as `LlamaForCausalLM`, those of models "
    "that guess hidden words as the encoder, those of decoders saved to embed as the decoder, which embeds as well.": (
        "BertForMaskedLM",
        "LlamaModel",
        "MistralForCausalLM",
        "MistralModel",
        "ModernBertForMaskedLM",
        "Qwen2Model",
        "Qwen3Model",
        "RobertaForMaskedLM",
        "XLMRobertaForMaskedLM",
    ),
    "Converters have no place for their heads, or leave out a part of it (BERT's pooler); a file with the rest is "
    "refused by name.": (
        "BertForSequenceClassification",
        "BertForTokenClassification",
        "LlamaForSequenceClassification",
        "MistralForSequenceClassification",
        "ModernBertForTokenClassification",
        "Qwen2ForProcessRewardModel",
        "Qwen2ForRewardModel",
        "Qwen2ForSequenceClassification",
        "Qwen2ForTokenClassification",
        "Qwen3ForTokenClassification",
    ),
}
"""Why the architectures without a row have none. Every architecture is here or has one."""


def gguf_page(note: str) -> str:
    """``docs/models/gguf.md``; ``note`` says who writes it. Raises ``ValueError`` for an architecture that is neither
    read nor accounted for."""
    read, listed = {row.architecture for row in ROWS}, {name for names in UNREAD.values() for name in names}
    if wrong := sorted(set(entries()) - read - listed | read & listed | listed - set(entries())):
        raise ValueError(f"UNREAD and the table of rows do not add up to all architectures: {', '.join(wrong)}")
    lines = ["| name in the file | architectures |", "|---|---|"]
    for name in sorted({row.gguf for row in ROWS}):
        known = dict.fromkeys(f"`{row.architecture}`" for row in ROWS if row.gguf == name)
        lines.append(f"| `{name}` | {', '.join(known)} |")
    types = ", ".join(kind.name for kind in SUPPORTED_TYPES)
    told = [f"{why}\n\n" + ", ".join(f"`{name}`" for name in names) for why, names in UNREAD.items()]
    parts = [note, "# GGUF files", _HEAD.strip().format(types=types), "\n".join(lines), _TAIL.strip()]
    return "\n\n".join([*parts, "## Not read", *told]) + "\n"


_HEAD = """
A model in one GGUF file (version 2 or 3) needs nothing beside it: sizes, vocabulary and chat template are inside.
Weights may be {types}; other types are refused by name. [Keeping them packed](../operate/quantization.md) is
`--quantization gguf`; without it they are unpacked while they are loaded.

Several architectures go by one name. Vocabulary and tensors tell which one a file holds.
"""

_TAIL = """
What the format does not say, and how it is taken:

- `bert` with the vocabulary of RoBERTa (`gpt2`) or of XLM-RoBERTa (`t5`): converters cut the rows of positions off that
  no token has; they are there again, as zeros. Labels of these two, and of `modern-bert`, are read (`cls.output`), and
  ModernBERT's are made of the mean of all states, as llama.cpp makes them.
- `t5`: without a head of its own the embedding is the head, and is scaled as in the first T5; a feed-forward block with
  a gate has `gelu`, one without `relu`. (llama.cpp does not scale, which greedy answers do not show.) Files of UMT5,
  whose layers have biases of their own, are refused.
- Embeddings are normalized, and pooled as `pooling_type` says; without it, decoders take the last token.
- `qwen3` with `cls.output`: a reranker that answers yes or no, such as Qwen3-Reranker. These are its two labels, and
  its head has no other rows, so that it generates nothing. Decoders with other labels are refused.
- `attention.causal`, false in a decoder's file: it looks both ways, and is refused.

## Over several ranks

Each rank of `--tensor-parallel-size` takes its share of every tensor out of the one file, packed or not. Rows can be
shared out anywhere, but a packed row only between blocks: 32 weights, or 256 of the K types. Where a rank's share
would end within a block the start is refused with the tensor's name; choose fewer ranks, or leave `--quantization`
unset.

Files split into several (`split.count`) are not joined.
"""

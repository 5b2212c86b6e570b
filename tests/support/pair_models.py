"""Tiny models that judge or embed, with tokenizers that join two texts as BERT's and RoBERTa's do."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from hardpoint_testing_torch import TinyModel, make_tiny_model

__all__ = ["QUERY", "TEXTS", "make_embedder", "make_judge", "oracle_tokenizer", "write_pair_tokenizer"]

SPECIAL = {"[PAD]": 0, "[CLS]": 1, "[SEP]": 2, "[UNK]": 3}
QUERY = "t9 t30 t12"
TEXTS = ("t5 t9 t7", "t30 t31 t32 t33 t34 t9", "t80")
POOLING = {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False}


def write_pair_tokenizer(folder: Path, vocab_size: int, *, separators: int = 1) -> None:
    """``tokenizer.json`` with control tokens and the words ``t4`` to ``t<vocab_size - 1>``.

    ``separators`` stand between the texts of a pair: one before types change (BERT), or two of one type (RoBERTa).
    """
    words = SPECIAL | {f"t{number}": number for number in range(len(SPECIAL), vocab_size)}
    made = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.add_special_tokens([word for word in SPECIAL if word != "[UNK]"])
    kind = 1 if separators == 1 else 0
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair=f"[CLS] $A{' [SEP]' * separators} $B:{kind} [SEP]:{kind}",
        special_tokens=[(word, SPECIAL[word]) for word in ("[CLS]", "[SEP]")],
    )
    made.save(str(folder / "tokenizer.json"))
    roles = {f"{role}_token": f"[{role.upper()}]" for role in ("pad", "cls", "sep", "unk")}
    (folder / "tokenizer_config.json").write_text(json.dumps(roles), encoding="utf-8")


def oracle_tokenizer(folder: Path) -> Any:
    """The one of ``transformers`` on the same files."""
    return PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"), pad_token="[PAD]")


def make_judge(architecture: str, folder: Path, *, separators: int = 1, **config: Any) -> TinyModel:
    tiny = make_tiny_model(architecture, folder, pad_token_id=0, **config)
    write_pair_tokenizer(folder, tiny.info.vocab_size, separators=separators)
    return tiny


def make_embedder(folder: Path, *, tied: bool, **config: Any) -> TinyModel:
    """A decoder as Qwen3-Embedding is saved: named as one that generates, its tensors without a head or a prefix."""
    tiny = make_tiny_model("Qwen3Model", folder, head_dim=16, tie_word_embeddings=tied, **config)
    path = folder / "config.json"
    stated = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps(stated | {"architectures": ["Qwen3ForCausalLM"]}), encoding="utf-8")
    write_pair_tokenizer(folder, tiny.info.vocab_size)
    modules = [{"idx": index, "name": str(index), "path": f"{index}_{kind}" if index else "", "type": f"st.{kind}"}
               for index, kind in enumerate(("Transformer", "Pooling", "Normalize"))]  # fmt: skip
    (folder / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(POOLING), encoding="utf-8")
    return tiny

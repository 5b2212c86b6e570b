"""Classifiers, cross-encoders, rerankers and reward models through the whole engine, against ``transformers``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.errors import InvalidRequestError, UnsupportedModelError
from hardpoint_serving.judging import PairTemplate
from hardpoint_serving.offline import classify, embed, rerank, reward, score
from hardpoint_testing_torch import make_tiny_model
from pair_models import QUERY, TEXTS, make_embedder, make_judge, oracle_tokenizer, write_pair_tokenizer

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_seqs": 4, "max_num_batched_tokens": 64}
TOLERANCE: Any = {"rtol": 1e-4, "atol": 1e-5}
KV: dict[str, Any] = {"kv_cache_memory": "4MiB"}


@torch.inference_mode()
def logits(tiny: Any, folder: Path, *texts: str) -> torch.Tensor:
    """float32 [labels] of one text or of a pair, by the library's own tokenizer and its types of tokens."""
    types = tiny.info.architecture.startswith("Bert")
    encoded = oracle_tokenizer(folder)(*texts, return_tensors="pt", return_token_type_ids=types)
    result: torch.Tensor = tiny.oracle(**encoded).logits[0]
    return result


@pytest.mark.parametrize(
    ("architecture", "separators"),
    [("BertForSequenceClassification", 1), pytest.param("RobertaForSequenceClassification", 2, marks=pytest.mark.slow)],
)
def test_pairs_are_judged_as_by_a_cross_encoder(architecture: str, separators: int, tmp_path: Path) -> None:
    """The second text has a type of its own where the model knows types; the separator is the tokenizer's to tell."""
    tiny = make_judge(architecture, tmp_path, separators=separators, num_labels=1)
    raw = torch.stack([logits(tiny, tmp_path, QUERY, text)[0] for text in TEXTS])
    with LLM(str(tmp_path), **SETTINGS) as llm:
        found = score(llm, QUERY, TEXTS)
        np.testing.assert_allclose(found, raw.sigmoid().numpy(), **TOLERANCE)
        np.testing.assert_allclose(score(llm, QUERY, TEXTS, activation="none"), raw.numpy(), **TOLERANCE)
        ranked = rerank(llm, QUERY, TEXTS, top_n=2)
        assert [one.index for one in ranked] == raw.argsort(descending=True)[:2].tolist()
        with pytest.raises(InvalidRequestError, match="gives scores and no embeddings"):
            embed(llm, "t5")


@pytest.mark.slow
def test_texts_are_classified_by_name(tmp_path: Path) -> None:
    names = {0: "calm", 1: "gusty", 2: "stormy"}
    tiny = make_judge(
        "BertForSequenceClassification", tmp_path, id2label=names, label2id={v: k for k, v in names.items()}
    )
    with LLM(str(tmp_path), **SETTINGS) as llm:
        for text, found in zip(TEXTS, classify(llm, list(TEXTS)), strict=True):
            shares = logits(tiny, tmp_path, text).softmax(-1)
            np.testing.assert_allclose(found.probabilities, shares.numpy(), **TOLERANCE)
            assert (found.label, found.labels) == (names[int(shares.argmax())], tuple(names.values()))
        (sharp,) = classify(llm, TEXTS[0], activation="sigmoid")
        np.testing.assert_allclose(sharp.probabilities, logits(tiny, tmp_path, TEXTS[0]).sigmoid().numpy(), **TOLERANCE)
        with pytest.raises(InvalidRequestError, match="judges 3 labels"):
            score(llm, QUERY, TEXTS)
        with pytest.raises(InvalidRequestError, match="does not generate text; it serves embed, classify"):
            llm.generate("t5", SamplingParams(max_tokens=1))


@pytest.mark.slow
def test_rewards_of_whole_texts_come_in_chunks_too(tmp_path: Path) -> None:
    tiny = make_judge("LlamaForSequenceClassification", tmp_path, num_labels=1)
    with LLM(str(tmp_path), **SETTINGS | KV | {"max_num_batched_tokens": 4}) as llm:
        for text, found in zip(TEXTS, reward(llm, TEXTS), strict=True):
            np.testing.assert_allclose(found, logits(tiny, tmp_path, text).numpy(), **TOLERANCE)


def test_rewards_of_steps_are_those_of_their_last_tokens(tmp_path: Path) -> None:
    """t9 ends a step. Chunks end within steps, and some hold no end at all."""
    tiny = make_judge("Qwen2ForTokenClassification", tmp_path, num_labels=2)
    text = "t5 t6 t9 t7 t9 t8 t8 t8 t8 t8 t9"
    plugins = {"worker": {"torch": {"pooling_method": "step", "step_token_id": 9}}}
    with LLM(str(tmp_path), plugins=plugins, **SETTINGS | KV | {"max_num_batched_tokens": 4}) as llm:
        (found,) = reward(llm, text, activation="softmax")
        ids = oracle_tokenizer(tmp_path)(text).input_ids
        wanted = logits(tiny, tmp_path, text).softmax(-1)[[place for place, one in enumerate(ids) if one == 9]]
        assert found.shape == (3, 2)
        np.testing.assert_allclose(found, wanted.numpy(), **TOLERANCE)
        with pytest.raises(InvalidRequestError, match="holds no token 9"):
            reward(llm, "t5 t6")
        with pytest.raises(InvalidRequestError, match="judges every token on its own"):
            classify(llm, text)


TEMPLATE = PairTemplate("[CLS] t20 {instruction} t21 {query} t22 {document} [SEP] t23", "t40 t41")
JOINED = "[CLS] t20 t40 t41 t21 {query} t22 {document} [SEP] t23"


def by_tokens(folder: Path, **settings: Any) -> LLM:
    """t4 is no, t5 is yes."""
    plugins = {"worker": {"torch": {"label_token_ids": [4, 5]}}}
    return LLM(str(folder), plugins=plugins, **SETTINGS | KV | settings)


def judged_by_tokens(tmp_path: Path, **settings: Any) -> None:
    tiny = make_tiny_model("Qwen3ForCausalLM", tmp_path, head_dim=16, tie_word_embeddings=True)
    write_pair_tokenizer(tmp_path, tiny.info.vocab_size)
    with by_tokens(tmp_path, **settings) as llm:
        found = score(llm, QUERY, TEXTS, template=TEMPLATE)
    encode = oracle_tokenizer(tmp_path).backend_tokenizer.encode
    for text, value in zip(TEXTS, found, strict=True):
        ids = encode(JOINED.format(query=QUERY, document=text), add_special_tokens=False).ids
        shares = tiny.logits(ids)[-1, [4, 5]].softmax(-1)
        np.testing.assert_allclose(value, float(shares[1]), **TOLERANCE)


@pytest.mark.parametrize(
    "settings", [{}, pytest.param({"max_num_batched_tokens": 5}, marks=pytest.mark.slow)], ids=["whole", "chunks"]
)
def test_a_decoder_judges_by_its_word_for_yes(settings: dict[str, Any], tmp_path: Path) -> None:
    """As Qwen3-Reranker does."""
    judged_by_tokens(tmp_path, **settings)


@pytest.mark.slow
def test_two_workers_judge_by_the_same_word(tmp_path: Path) -> None:
    """Each holds half of the head's rows, and all of them meet where a prompt ends."""
    judged_by_tokens(tmp_path, tensor_parallel_size=2, executor="multiproc")


@pytest.mark.parametrize("tied", [pytest.param(True, marks=pytest.mark.slow), False], ids=["tied", "without a head"])
def test_a_decoder_that_was_saved_to_embed(tied: bool, tmp_path: Path) -> None:
    """As Qwen3-Embedding is: by its last token, of length one, and cut to the sizes that it lists."""
    tiny = make_embedder(tmp_path, tied=tied, matryoshka_dimensions=[8, 16, 48])
    tokenizer = oracle_tokenizer(tmp_path)
    with LLM(str(tmp_path), **SETTINGS | KV) as llm:
        for dimensions in (None, 8):
            for text, output in zip(TEXTS, embed(llm, TEXTS, dimensions=dimensions), strict=True):
                last = tiny.logits(tokenizer(text).input_ids)[-1, :dimensions]
                wanted = torch.nn.functional.normalize(last, dim=-1)
                np.testing.assert_allclose(output.embedding, wanted.numpy(), **TOLERANCE)
        with pytest.raises(InvalidRequestError, match="dimensions is 12; embeddings of this model can have 8, 16, 48"):
            embed(llm, TEXTS, dimensions=12)
        with pytest.raises(InvalidRequestError, match="can be cut to 8, 16, 48 dimensions, not to 12"):
            llm.embed(TEXTS, dimensions=12)
        near = score(llm, TEXTS[0], TEXTS)
        assert near[0] == pytest.approx(1.0, abs=1e-6)
        assert max(near[1:]) < 1.0
        if tied:
            (answer,) = llm.generate("t5", SamplingParams(max_tokens=2, temperature=0.0, ignore_eos=True))
            assert len(answer.outputs[0].token_ids) == 2
        else:
            with pytest.raises(InvalidRequestError, match="does not generate text; it serves embed"):
                llm.generate("t5", SamplingParams(max_tokens=1))


def test_a_pair_that_cannot_be_told_apart_is_refused_at_the_start(tmp_path: Path) -> None:
    make_judge("BertForSequenceClassification", tmp_path)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        text = (tmp_path / name).read_text(encoding="utf-8").replace("[SEP]", "[DIV]").replace("sep_token", "div_token")
        (tmp_path / name).write_text(text, encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="say which token divides two texts"):
        LLM(str(tmp_path), **SETTINGS)

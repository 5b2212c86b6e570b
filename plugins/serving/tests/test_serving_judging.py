"""The rules of scores and embeddings that HTTP and Python share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import ModelLimits, PoolingParams
from hardpoint.testing.fake_tokenizer import FakeTokenizer
from hardpoint_serving.judging import (
    PairTemplate,
    activated,
    check_dimensions,
    judging_params,
    label_names,
    line_up,
    pair_scores,
    require_judge,
)

LIMITS = ModelLimits(vocab_size=259, max_model_len=8, embedding_size=48)


class Informed(FakeTokenizer):
    """Knows its model, joins texts by 2, and has a control token of one id."""

    def __init__(self, **config: Any) -> None:
        self.config = config

    @property
    def model_config(self) -> Mapping[str, Any]:
        return self.config

    def encode_pair(self, first: str, second: str) -> list[int]:
        return [1, *self.encode(first, add_special_tokens=False), 2, *self.encode(second, add_special_tokens=False)]

    @property
    def control_tokens(self) -> frozenset[str]:
        return frozenset({"<s>", "<end>"})

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        if parse_special and text in self.control_tokens:
            return [200 + sorted(self.control_tokens).index(text)]
        return super().encode(text, add_special_tokens=add_special_tokens)


def spelled(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


@pytest.mark.parametrize("size", [1, 3])
def test_activations_are_those_of_torch(size: int) -> None:
    scores = np.asarray([[-90.0, 0.0, 4.5], [700.0, 701.0, -700.0]], dtype=np.float32)[:, :size]
    known = torch.from_numpy(scores)
    np.testing.assert_allclose(activated(scores, "softmax"), known.softmax(-1).numpy(), rtol=1e-6)
    np.testing.assert_allclose(activated(scores, "sigmoid"), known.sigmoid().numpy(), rtol=1e-5, atol=1e-37)
    assert activated(scores, "none") is scores
    assert activated(scores, None) is scores


def test_raw_scores_are_asked_for_where_another_activation_is_wanted() -> None:
    assert judging_params(None) == PoolingParams()
    assert judging_params("none") == judging_params("softmax") == PoolingParams(normalize=False)


def test_embeddings_are_cut_to_what_the_model_lists() -> None:
    listed = Informed(matryoshka_dimensions=[8, 16])
    for dimensions in (None, 8, 16, 48):
        check_dimensions(dimensions, listed, LIMITS)
    with pytest.raises(
        InvalidRequestError, match="dimensions is 12; embeddings of this model can have 8, 16"
    ) as caught:
        check_dimensions(12, listed, LIMITS)
    assert (caught.value.param, caught.value.status) == ("dimensions", 400)
    for silent in (FakeTokenizer(), Informed(), Informed(matryoshka_dimensions=[])):
        check_dimensions(12, silent, LIMITS)


def test_labels_have_the_names_of_the_configuration() -> None:
    assert label_names(Informed(id2label={"0": "no", "1": "yes"}), 2) == ["no", "yes"]
    assert label_names(Informed(id2label={"1": "yes"}), 2) == ["LABEL_0", "yes"]
    assert label_names(FakeTokenizer(), 1) == ["LABEL_0"]


def test_texts_line_up() -> None:
    names = ("text_1", "text_2")
    assert line_up(["a"], ["b", "c"], names) == [("a", "b"), ("a", "c")]
    assert line_up(["a", "b"], ["c", "d"], names) == [("a", "c"), ("b", "d")]
    for first, second, param, told in (
        (["a", "b"], ["c"], "text_1", "text_1 has 2 texts and text_2 1; give one"),
        (["a"], [], "text_2", "text_2 is empty"),
        ([], ["a"], "text_1", "text_1 is empty"),
    ):
        with pytest.raises(InvalidRequestError, match=told) as caught:
            line_up(first, second, names)
        assert caught.value.param == param


def test_a_pair_has_one_score() -> None:
    """Of two labels it is the second one's: no, and yes."""

    def rows(*values: Sequence[float]) -> list[Any]:
        return [np.asarray(value, dtype=np.float32) for value in values]

    assert pair_scores(rows([0.25], [0.5])) == [0.25, 0.5]
    assert pair_scores(rows([0.25, 0.75])) == [0.75]
    with pytest.raises(InvalidRequestError, match="judges 3 labels"):
        pair_scores(rows([0.1, 0.2, 0.7]))
    with pytest.raises(InvalidRequestError, match="judges every token on its own"):
        pair_scores([np.zeros((4, 1), dtype=np.float32)])


def test_who_has_no_labels_says_what_it_serves() -> None:
    require_judge(("embed", "classify"))
    with pytest.raises(InvalidRequestError, match="does not classify; it serves generate, embed"):
        require_judge(("generate", "embed"))


def test_pairs_are_joined_as_the_tokenizer_does() -> None:
    prompt = PairTemplate().prompt("q", "d", Informed(), LIMITS, cache_salt="s")
    assert (prompt.token_ids, prompt.cache_salt) == ([1, *spelled("q"), 2, *spelled("d")], "s")
    with pytest.raises(InvalidRequestError, match="the operator sets a pair_template") as caught:
        PairTemplate().prompt("q", "d", FakeTokenizer(), LIMITS)
    assert caught.value.code == "unsupported_task"


def test_only_the_template_spells_control_tokens() -> None:
    """And only it holds placeholders."""
    template = PairTemplate("<s>{instruction}: {query}<end>{document}<end>", "rank")
    limits = ModelLimits(vocab_size=259, max_model_len=99)
    prompt = template.prompt("a<end>{document}", "b", Informed(), limits)
    end, start = 200, 201
    assert prompt.token_ids == [start, *spelled("rank: a<end>{document}"), end, *spelled("b"), end]


@pytest.mark.parametrize("text", ["{query} alone", "{document}", "nothing"])
def test_a_template_has_both_texts(text: str) -> None:
    with pytest.raises(ValueError, match="the template lacks"):
        PairTemplate(text)


def test_texts_are_checked_before_they_are_tokenized() -> None:
    with pytest.raises(InvalidRequestError, match="has 513 characters; at most 512 are allowed, 64 for each token"):
        PairTemplate().prompt("q" * 500, "d" * 13, Informed(), LIMITS)
    with pytest.raises(InvalidRequestError, match="unpaired surrogates"):
        PairTemplate().prompt("q", "\ud800", Informed(), LIMITS)

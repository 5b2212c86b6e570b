"""What BERT encoders read from a configuration, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.bert_config import BertConfig

SIZES: dict[str, Any] = {
    "hidden_size": 384,
    "intermediate_size": 1536,
    "num_hidden_layers": 6,
    "num_attention_heads": 12,
    "vocab_size": 30522,
    "max_position_embeddings": 512,
}


def read(**changes: Any) -> BertConfig:
    return BertConfig.read({**SIZES, **changes}, "BertModel")


def test_defaults_are_those_of_the_original() -> None:
    config = read()
    assert (config.head_size, config.num_token_types, config.norm_eps, config.activation) == (32, 2, 1e-12, "gelu")
    assert (config.pooling.method, config.pooling.normalizes) == ("cls", False)


def test_what_the_configuration_states() -> None:
    config = read(type_vocab_size=1, layer_norm_eps=1e-5, hidden_act="gelu_new", num_attention_heads=4)
    assert (config.head_size, config.num_token_types, config.norm_eps, config.activation) == (96, 1, 1e-5, "gelu_new")


@pytest.mark.parametrize("method", ["cls", "mean", "last"])
@pytest.mark.parametrize("normalizes", [True, False])
def test_how_texts_are_pooled(method: str, normalizes: bool) -> None:
    config = read(sentence_embedding={"pooling_method": method, "normalizes": normalizes, "other_modules": []})
    assert (config.pooling.method, config.pooling.normalizes) == (method, normalizes)


@pytest.mark.parametrize("field", SIZES)
@pytest.mark.parametrize("value", [None, 0, -3, "many", True, 2.5])
def test_sizes_are_positive_numbers(field: str, value: Any) -> None:
    with pytest.raises(ModelFormatError, match=f"BertModel: config field '{field}' is {value!r}"):
        read(**{field: value})


def test_heads_share_the_hidden_size_evenly() -> None:
    with pytest.raises(ModelFormatError, match="hidden_size=384 is no multiple of num_attention_heads=7"):
        read(num_attention_heads=7)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "swishy"}, "'hidden_act' is 'swishy'; supported: 'gelu'"),
        ({"position_embedding_type": "relative_key"}, "'position_embedding_type' is 'relative_key'; supported: 'abs"),
        ({"is_decoder": True}, "'is_decoder' is True; supported: False"),
        ({"add_cross_attention": True}, "'add_cross_attention' is True"),
        ({"sentence_embedding": {"pooling_method": "max"}}, "pool by 'max'; supported: 'cls', 'mean', 'last'"),
        ({"sentence_embedding": {"pooling_method": "mean+max"}}, r"pool by 'mean\+max'"),
        ({"sentence_embedding": {"pooling_method": None}}, "pool by None"),
        (
            {"sentence_embedding": {"pooling_method": "mean", "other_modules": ["Dense"]}},
            "modules.json lists 'Dense' behind the encoder, which are not computed here",
        ),
    ],
)
def test_what_is_not_computed_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(HardpointError, match=message) as caught:
        read(**changes)
    assert isinstance(caught.value, UnsupportedModelError)

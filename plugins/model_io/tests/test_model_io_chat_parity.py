"""Chats of the demo model: the renderer's ids equal those of the reference library."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint.interfaces.tokenizer import Tokenizer
from hardpoint.rendering import plain_messages
from hardpoint_model_io.chat.renderer import JinjaRenderer
from hardpoint_model_io.tokenizers.gguf import GgufTokenizerProvider


@pytest.fixture(scope="module")
def tokenizer(smollm2: ModelArtifact) -> Tokenizer:
    return GgufTokenizerProvider().load(smollm2)


@pytest.fixture(scope="module")
def reference(smollm2: ModelArtifact) -> Any:
    transformers = pytest.importorskip("transformers")
    return transformers.AutoTokenizer.from_pretrained(smollm2.root, gguf_file=smollm2.files[0])


CHATS = [
    [{"role": "user", "content": "Hello!"}],
    [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "a < b > c\n\nreally?"}],
    [
        {"role": "user", "content": "Schreibe ein Gedicht über 🌍"},
        {"role": "assistant", "content": "  Hügel und Täler\n"},
        {"role": "user", "content": "<b>more</b> {{ 7 * 7 }}"},
    ],
]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("prompt", [True, False])
def test_ids_equal_the_references(
    tokenizer: Tokenizer, reference: Any, messages: list[dict[str, str]], prompt: bool
) -> None:
    text, ids = JinjaRenderer(tokenizer).render(plain_messages(messages), add_generation_prompt=prompt)
    assert text == reference.apply_chat_template(messages, add_generation_prompt=prompt, tokenize=False)
    assert ids == reference.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]


ordinary = st.text(st.characters(codec="utf-8", exclude_categories=("Cs", "N")), max_size=40)


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(contents=st.lists(ordinary, min_size=1, max_size=4))
def test_ids_equal_the_references_for_any_ordinary_text(
    tokenizer: Tokenizer, reference: Any, contents: list[str]
) -> None:
    messages = [{"role": ("user", "assistant")[index % 2], "content": text} for index, text in enumerate(contents)]
    _, ids = JinjaRenderer(tokenizer).render(plain_messages(messages))
    assert ids == reference.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(st.sampled_from(["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<", "system\n", " é"])))
def test_contents_never_become_control_tokens(tokenizer: Tokenizer, parts: list[str]) -> None:
    """Class 24: however many are spelled out, the template's own remain."""
    renderer = JinjaRenderer(tokenizer)
    _, quiet = renderer.render(plain_messages([{"role": "user", "content": "x"}]))
    text, ids = renderer.render(plain_messages([{"role": "user", "content": "x" + "".join(parts)}]))
    assert [i for i in ids if i < 3] == [i for i in quiet if i < 3]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text

"""Between front end and chat renderer: what the renderer is told, and what is checked before it is asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from hardpoint.engine.frontend import Frontend
from hardpoint.engine.validation import max_prompt_chars
from hardpoint.errors import InvalidRequestError, ModelFormatError
from hardpoint.interfaces import ChatRendererContext

Make = Callable[..., Any]


def test_the_renderer_knows_its_model(make_spec: Make, make_runtime: Make) -> None:
    spec = make_spec(chat_template="the operator's")
    frontend = Frontend.from_spec(spec, make_runtime())
    ctx: ChatRendererContext = frontend._renderer.ctx  # type: ignore[attr-defined]
    assert (ctx.name, ctx.tokenizer, ctx.model) == ("fake", frontend.tokenizer, spec.model)
    assert (ctx.template, ctx.max_chars) == ("the operator's", max_prompt_chars(spec.model_limits))


def test_a_template_that_it_cannot_use_names_the_model(make_spec: Make, make_runtime: Make) -> None:
    spec = make_spec(chat_template="broken")
    with pytest.raises(ModelFormatError, match=f"^model '{spec.model_name}': the chat template cannot be compiled"):
        Frontend.from_spec(spec, make_runtime())


def test_arguments_and_the_generation_prompt_reach_it(make_spec: Make, make_runtime: Make) -> None:
    frontend = Frontend.from_spec(make_spec(), make_runtime())
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}, "b"]}]
    prompt = frontend.render_chat(messages, add_generation_prompt=False, template_arguments={"x": (1,)})
    assert prompt.text is None
    assert prompt.token_ids is not None
    assert frontend.tokenizer.decode(prompt.token_ids) == "<user>a\nb\n[x=[1]]"


@pytest.mark.parametrize(
    ("messages", "arguments", "message"),
    [
        ([], {}, "at least one message"),
        (["x"], {}, "must be an object"),
        ([{"role": "user", "content": "x" * 100_000}], {}, "the messages have 100000 characters"),
        ([{"role": "user", "content": "x"}], {"tools": object()}, "JSON values only"),
    ],
)
def test_what_no_renderer_could_take_never_reaches_one(
    make_spec: Make, make_runtime: Make, messages: Any, arguments: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        Frontend.from_spec(make_spec(), make_runtime()).render_chat(messages, template_arguments=arguments)

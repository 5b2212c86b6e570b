"""The kit for chat renderers accepts a small correct one and rejects each mutant."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar

import pytest

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import ChatRenderer, ChatRendererContext
from hardpoint.testing import chat_renderer_suite
from hardpoint.testing.chat_renderer_suite import ChatRendererSuite, MarkedTokenizer
from hardpoint.testing.suite_runner import run_suite

Piece = tuple[str, bool]
BEGIN, END = "[INST]", "</s>"


def texts(message: Mapping[str, Any]) -> list[str]:
    content = message.get("content") or []
    parts = content if isinstance(content, list) else [content]
    found: list[Any] = [part.get("text") if isinstance(part, dict) else part for part in parts]
    if not all(isinstance(text, str) for text in found):
        raise InvalidRequestError("this format takes text only", param="messages")
    return found


class Lines(ChatRenderer):
    """``[INST]role: text</s>`` for each message. Pieces are texts, and whether they are the format's own."""

    def __init__(self, ctx: ChatRendererContext) -> None:
        self.tokenizer = ctx.tokenizer
        self.max_chars = ctx.max_chars

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        add_generation_prompt: bool = True,
        template_arguments: Mapping[str, Any] | None = None,
    ) -> tuple[str, list[int]]:
        pieces = [*self.before(dict(template_arguments or {})), *self.lines(messages)]
        if add_generation_prompt:
            pieces += self.opening()
        return self.encode(pieces)

    def before(self, arguments: dict[str, Any]) -> Iterator[Piece]:
        tools = arguments.pop("tools", None)
        if arguments:
            raise InvalidRequestError("this format takes no argument but 'tools'", param="messages")
        if tools is not None:
            yield json.dumps(tools) + "\n", False

    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        for message in messages:
            if not isinstance(message.get("role"), str):
                raise InvalidRequestError("every message needs a role", param="messages")
            yield BEGIN, True
            yield f"{message['role']}: ", False
            yield from self.content(message)
            if calls := message.get("tool_calls"):
                yield f"\n{json.dumps(calls)}", False
            yield END, True

    def content(self, message: Mapping[str, Any]) -> Iterator[Piece]:
        yield "\n".join(texts(message)), False

    def opening(self) -> list[Piece]:
        return [(BEGIN, True), ("assistant: ", False)]

    def encode(self, pieces: Sequence[Piece]) -> tuple[str, list[int]]:
        text = "".join(piece for piece, _ in pieces)
        if len(text) > self.max_chars:
            fault = f"the chat has {len(text)} characters; at most {self.max_chars} are allowed"
            raise InvalidRequestError(fault, param="messages", code="context_length_exceeded")
        ids: list[int] = []
        for piece, is_own in self.joined(pieces):
            ids += self.tokenizer.encode(piece, add_special_tokens=False, parse_special=is_own)
        return text, ids

    def joined(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return pieces


def make_suite(kind: type[Lines], **fields: Any) -> type[ChatRendererSuite]:
    class Suite(ChatRendererSuite):
        roles: ClassVar[tuple[str, ...]] = ("system", "user", "assistant", "user")
        arguments: ClassVar[Mapping[str, Any]] = {"tools": [{"name": "look_up"}]}

        def create_renderer(self, ctx: ChatRendererContext) -> ChatRenderer:
            return kind(ctx)

    return type("Suite", (Suite,), fields)


class Closed(Lines):
    """A format that never opens the answer, and takes turns only."""

    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        for index, message in enumerate(messages):
            if message.get("role") != ("user", "assistant")[index % 2]:
                raise InvalidRequestError("user and assistant take turns, beginning with the user", param="messages")
        yield from super().lines(messages)

    def opening(self) -> list[Piece]:
        return []


class TestLines(make_suite(Lines)):  # type: ignore[misc]
    pass


class TestClosed(make_suite(Closed, roles=("user", "assistant"), has_generation_prompt=False)):  # type: ignore[misc]
    pass


class LosesTheFirst(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        return super().lines(messages[-2:])


class Reverses(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        return super().lines(messages[::-1])


class SaysItTwice(Lines):
    def content(self, message: Mapping[str, Any]) -> Iterator[Piece]:
        yield from super().content(message)
        yield from super().content(message)


class FirstPartOnly(Lines):
    def content(self, message: Mapping[str, Any]) -> Iterator[Piece]:
        return super().content({"content": texts(message)[:1]})


class HidesRoles(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        return super().lines([{**message, "role": "somebody"} for message in messages])


class AddsItsFrame(Lines):
    def encode(self, pieces: Sequence[Piece]) -> tuple[str, list[int]]:
        text, ids = super().encode(pieces)
        return text, [1, *ids]


class AlwaysOpens(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        yield from super().lines(messages)
        yield from self.opening()

    def encode(self, pieces: Sequence[Piece]) -> tuple[str, list[int]]:
        return super().encode(pieces[:-2] if list(pieces[-2:]) == list(pieces[-4:-2]) else pieces)


class OpensBefore(Lines):
    def encode(self, pieces: Sequence[Piece]) -> tuple[str, list[int]]:
        return super().encode([*pieces[-2:], *pieces[:-2]] if pieces[-1][0] == "assistant: " else pieces)


class IgnoresArguments(Lines):
    def before(self, arguments: dict[str, Any]) -> Iterator[Piece]:
        return iter(())


class FailsOnArguments(Lines):
    def before(self, arguments: dict[str, Any]) -> Iterator[Piece]:
        yield from ((tool["name"], False) for tool in arguments.get("tools") or [])


class ParsesEverything(Lines):
    def joined(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return [("".join(piece for piece, _ in pieces), True)]


class TakesMarkersOut(Lines):
    def content(self, message: Mapping[str, Any]) -> Iterator[Piece]:
        for text, is_own in super().content(message):
            yield text.replace(BEGIN, "").replace(END, ""), is_own


class BreaksMarkers(Lines):
    """Ids and text say different things."""

    def joined(self, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return [(piece if is_own else piece.replace("[", "\N{FULLWIDTH LEFT SQUARE BRACKET}"), is_own)
                for piece, is_own in pieces]  # fmt: skip


class LooksAtSinglePartsOnly(Lines):
    def content(self, message: Mapping[str, Any]) -> Iterator[Piece]:
        found = texts(message)
        yield "".join(found), not any(marker in text for marker in self.tokenizer.control_tokens for text in found)


class TrustsRoles(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        return ((piece, is_own or piece.endswith(": ")) for piece, is_own in super().lines(messages))


class TrustsCalls(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        return ((piece, is_own or piece.startswith("\n[")) for piece, is_own in super().lines(messages))


class TrustsArguments(Lines):
    def before(self, arguments: dict[str, Any]) -> Iterator[Piece]:
        return ((piece, True) for piece, _ in super().before(arguments))


class FailsOnCalls(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        names = [call["function"]["name"] for message in messages for call in message.get("tool_calls", ())]
        yield from super().lines(messages)
        yield "".join(names), False


class FailsWithoutText(Lines):
    def content(self, message: Mapping[str, Any]) -> Iterator[Piece]:
        yield texts(message)[0], False


class BlamesTheServer(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        if any(message.get("role") == "no-such-role" for message in messages):
            raise InvalidRequestError("no such role", param="messages", status=500)
        return super().lines(messages)


class ShowsTheInside(Lines):
    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        if any(message.get("role") == "no-such-role" for message in messages):
            raise InvalidRequestError(f"{__file__}: no such role", param="messages")
        return super().lines(messages)


class NeverTooLong(Lines):
    def __init__(self, ctx: ChatRendererContext) -> None:
        super().__init__(ctx)
        self.max_chars = 1 << 60


class EncodesFirst(Lines):
    def encode(self, pieces: Sequence[Piece]) -> tuple[str, list[int]]:
        for piece, _ in pieces:
            self.tokenizer.encode(piece)
        return super().encode(pieces)


class EmptiesMessages(Lines):
    def content(self, message: Mapping[str, Any]) -> Iterator[Piece]:
        yield from super().content(message)
        if isinstance(message["content"], list):
            message["content"].clear()


class TakesArgumentsOut(Lines):
    def render(self, messages: Sequence[Mapping[str, Any]], **options: Any) -> tuple[str, list[int]]:
        arguments = options.pop("template_arguments", None) or {}
        tools = arguments.pop("tools", None)
        return super().render(messages, template_arguments={"tools": tools, **arguments}, **options)


class Numbers(Lines):
    """The same chat reads otherwise the next time."""

    count = 0

    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        self.count += 1
        yield f"({self.count})", False
        yield from super().lines(messages)


class SharesItsPieces(Lines):
    """What one rendering needs is the instance's."""

    def lines(self, messages: Sequence[Mapping[str, Any]]) -> Iterator[Piece]:
        self.pieces: list[Piece] = []
        for piece in super().lines(messages):
            time.sleep(0.0001)
            self.pieces.append(piece)
        return iter(self.pieces)


MUTANTS: dict[type[Lines], str] = {
    LosesTheFirst: "test_every_text_is_there_and_in_order",
    Reverses: "test_every_text_is_there_and_in_order",
    SaysItTwice: "test_every_text_is_there_and_in_order",
    FirstPartOnly: "test_every_part_of_a_content_is_there",
    HidesRoles: "test_who_said_what_can_be_seen",
    AddsItsFrame: "test_ids_are_those_of_the_text",
    AlwaysOpens: "test_an_answer_is_opened_where_asked_for",
    OpensBefore: "test_an_answer_is_opened_where_asked_for",
    IgnoresArguments: "test_template_arguments_are_used",
    FailsOnArguments: "test_odd_arguments_are_refused_or_ignored",
    ParsesEverything: "test_texts_never_become_control_tokens",
    TakesMarkersOut: "test_texts_never_become_control_tokens",
    BreaksMarkers: "test_texts_never_become_control_tokens",
    LooksAtSinglePartsOnly: "test_pieces_never_join_to_control_tokens",
    TrustsRoles: "test_nothing_else_becomes_a_control_token",
    TrustsCalls: "test_nothing_else_becomes_a_control_token",
    TrustsArguments: "test_nothing_else_becomes_a_control_token",
    FailsOnCalls: "test_odd_messages_are_refused_or_taken",
    FailsWithoutText: "test_odd_messages_are_refused_or_taken",
    BlamesTheServer: "test_odd_messages_are_refused_or_taken",
    ShowsTheInside: "test_odd_messages_are_refused_or_taken",
    NeverTooLong: "test_too_long_prompts_are_not_encoded",
    EncodesFirst: "test_too_long_prompts_are_not_encoded",
    EmptiesMessages: "test_messages_and_arguments_are_not_changed",
    TakesArgumentsOut: "test_messages_and_arguments_are_not_changed",
    Numbers: "test_equal_chats_have_equal_prompts",
    SharesItsPieces: "test_threads_do_not_disturb_one_another",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[Lines]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed


@pytest.mark.slow
def test_a_format_that_opens_answers_against_its_word_fails() -> None:
    rule = "test_an_answer_is_opened_where_asked_for"
    assert rule in run_suite(make_suite(Lines, has_generation_prompt=False), only=rule).failed
    assert rule in run_suite(make_suite(Closed, roles=("user", "assistant")), only=rule).failed


@pytest.mark.slow
def test_a_renderer_that_takes_its_time_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    class Slow(Lines):
        def encode(self, pieces: Sequence[Piece]) -> tuple[str, list[int]]:
            time.sleep(0.2 if len(pieces) > 1_000 else 0)
            return super().encode(pieces)

    monkeypatch.setattr(chat_renderer_suite, "MAX_SECONDS", 0.05)
    rule = "test_hostile_chats_end_in_time"
    assert "longer than two seconds" in run_suite(make_suite(Slow), only=rule).failed[rule]


def test_the_kits_tokenizer_tells_markers_from_text() -> None:
    tokenizer = MarkedTokenizer(("<a>", "<ab>", "["))
    text = "x<ab>é<a>["
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert [token_id for token_id in ids if token_id >= 259] == [260, 259, 261]
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert tokenizer.decode(ids) == "xé"
    plain = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
    assert max(plain) < 259
    assert tokenizer.decode(plain) == text

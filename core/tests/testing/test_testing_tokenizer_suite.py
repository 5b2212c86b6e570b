"""The tokenizer kit accepts correct tokenizers and rejects each mutant."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pytest

from hardpoint.interfaces import Tokenizer
from hardpoint.interfaces.tokenizer import DecodeStream
from hardpoint.testing import FakeTokenizer
from hardpoint.testing.suite_runner import run_suite
from hardpoint.testing.tokenizer_suite import TokenizerSuite


class ParsingTokenizer(FakeTokenizer):
    """Finds its control tokens in text, as real ones do."""

    names = ("<s>", "</s>")

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        ids = [1] if add_special_tokens else []
        for part in re.split("(<s>|</s>)", text) if parse_special else [text]:
            is_special = parse_special and part in self.names
            ids += [1 + self.names.index(part)] if is_special else [byte + 3 for byte in part.encode()]
        return ids

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return b"".join(self.piece(i, skip_special_tokens) for i in token_ids).decode("utf-8", "replace")

    def piece(self, token_id: int, skip: bool) -> bytes:
        if token_id in (1, 2):
            return b"" if skip else self.names[token_id - 1].encode()
        return self.token_bytes(token_id)

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        return ParsingStream(self, super().decode_stream(prompt_ids), skip_special_tokens)


class ParsingStream:
    def __init__(self, tokenizer: ParsingTokenizer, plain: DecodeStream, skip: bool) -> None:
        self.tokenizer, self.plain, self.skip = tokenizer, plain, skip

    def step(self, token_id: int) -> str | None:
        if token_id in (1, 2):
            return self.tokenizer.piece(token_id, self.skip).decode() or None
        return self.plain.step(token_id)


def make_suite(kind: type[Tokenizer]) -> type[TokenizerSuite]:
    class Suite(TokenizerSuite):
        def create_tokenizer(self) -> Tokenizer:
            return kind()

    return Suite


class TestFakeTokenizer(make_suite(FakeTokenizer)):  # type: ignore[misc]
    pass


class TestParsingTokenizer(make_suite(ParsingTokenizer)):  # type: ignore[misc]
    pass


class StripsText(ParsingTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return super().encode(text.strip(), add_special_tokens=add_special_tokens, parse_special=parse_special)


class AlwaysParses(ParsingTokenizer):
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        return super().encode(text, add_special_tokens=add_special_tokens)


class AlwaysShows(ParsingTokenizer):
    def piece(self, token_id: int, skip: bool) -> bytes:
        return super().piece(token_id, False)


class ForgetsABoundary(ParsingTokenizer):
    """Its vocabulary is larger than it says."""

    @property
    def vocab_size(self) -> int:
        return 200


class HalfCharacters(ParsingTokenizer):
    """Decodes each token for itself."""

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        class Stream:
            def step(_, token_id: int) -> str | None:
                return self.decode([token_id], skip_special_tokens=skip_special_tokens)

        return Stream()


class DecodesAllAgain(ParsingTokenizer):
    """Right, but a long answer costs its length squared."""

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        class Stream:
            ids: list[int] = []  # noqa: RUF012
            shown = ""

            def step(stream, token_id: int) -> str | None:
                stream.ids = [*stream.ids, token_id]
                text = self.decode(stream.ids, skip_special_tokens=skip_special_tokens)
                if text.endswith("\ufffd"):
                    return None
                new, stream.shown = text[len(stream.shown) :], text
                return new

        return Stream()


class OtherBytes(ParsingTokenizer):
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return FakeTokenizer.decode(FakeTokenizer(), token_ids)

    def token_bytes(self, token_id: int) -> bytes:
        return super().token_bytes(token_id).upper()


class HidesControlTokens(ParsingTokenizer):
    @property
    def control_tokens(self) -> frozenset[str]:
        return frozenset()


class BlankTemplate(ParsingTokenizer):
    @property
    def chat_template(self) -> str | None:
        return ""


MUTANTS: dict[type[Tokenizer], str] = {
    StripsText: "test_text_survives",
    AlwaysParses: "test_text_never_becomes_a_control_token",
    AlwaysShows: "test_added_special_tokens_do_not_show",
    ForgetsABoundary: "test_ids_are_in_range",
    HalfCharacters: "test_incomplete_characters_wait",
    DecodesAllAgain: "test_the_cost_of_a_token_does_not_grow",
    OtherBytes: "test_single_tokens",
    HidesControlTokens: "test_templates_get_text",
    BlankTemplate: "test_templates_get_text",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[Tokenizer]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed

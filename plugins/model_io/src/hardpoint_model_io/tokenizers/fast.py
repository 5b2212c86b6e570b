"""One tokenizer over the ``tokenizers`` library, whatever file it was built from."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from tokenizers import Tokenizer as Backend

from hardpoint.interfaces.tokenizer import DecodeStream, Tokenizer
from hardpoint_model_io.tokenizers.decoding import RecoveringStream, Utf8Stream, VocabularyKind, spelled_bytes

_LONG_TEXT = 2_000
"""Characters from which on giving up the interpreter lock pays: below, an encoding takes about a millisecond."""


@dataclass(frozen=True, slots=True)
class TokenizerFacts:
    """What a provider learns besides the pipeline itself. ``special_tokens`` maps roles (``bos_token``) to text."""

    kind: VocabularyKind
    special_tokens: Mapping[str, str] = field(default_factory=dict)
    chat_template: str | None = None
    model_config: Mapping[str, Any] = field(default_factory=dict)


def _encode(backend: Backend, text: str, add_special_tokens: bool) -> list[int]:
    """Ids of ``text``. The library releases the lock for batches only, so a long text goes as a batch of one."""
    if len(text) <= _LONG_TEXT:
        return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)
    return list(backend.encode_batch([text], add_special_tokens=add_special_tokens)[0].ids)


class FastTokenizer(Tokenizer):
    """Encoding and decoding are the library's and thread-safe.

    Texts longer than ``_LONG_TEXT`` characters are encoded with the interpreter lock released, so that other threads
    go on; short ones, and decoding, hold it for the moment they take.
    """

    def __init__(self, backend: Backend, facts: TokenizerFacts) -> None:
        self._backend = backend
        self._facts = facts
        self._vocab_size = backend.get_vocab_size(with_added_tokens=True)
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self._control_texts = frozenset(token.content for token in added.values() if token.special and token.content)
        self._text_tokens = [token for token in added.values() if not token.special]
        # Begun once per tokenizer (R6.72): added tokens spell their own text in every kind of vocabulary. A token that
        # was spelled once is looked up from then on, so it grows to the vocabulary's size at most.
        self._known_bytes = {token_id: token.content.encode() for token_id, token in added.items()}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    @property
    def bos_token_id(self) -> int | None:
        return self._role_id("bos_token")

    @property
    def eos_token_id(self) -> int | None:
        return self._role_id("eos_token")

    @property
    def chat_template(self) -> str | None:
        return self._facts.chat_template

    @property
    def special_tokens(self) -> dict[str, str]:
        return dict(self._facts.special_tokens)

    @property
    def control_tokens(self) -> frozenset[str]:
        return self._control_texts

    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        if not parse_special and self._control_pattern is not None and self._control_pattern.search(text):
            return self._encode_plain(text, add_special_tokens)
        return _encode(self._backend, text, add_special_tokens)

    @property
    def model_config(self) -> Mapping[str, Any]:
        """What the folder that the tokenizer was read from says of its model; empty where there is no such file."""
        return self._facts.model_config

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Two texts as the model was trained to see them together; control tokens spelled in either are plain text.

        Raises ``ValueError`` where nothing would stand between the two.
        """
        before, between, after = self._pair_frame
        if not between:
            raise ValueError("the tokenizer puts nothing between two texts")
        texts = [self.encode(text, add_special_tokens=False, parse_special=False) for text in (first, second)]
        return [*before, *texts[0], *between, *texts[1], *after]

    @cached_property
    def _pair_frame(self) -> tuple[list[int], list[int], list[int]]:
        """What the post-processor puts before, between and after two texts."""
        probe = self._backend.encode("a", "a")
        sources = list(probe.sequence_ids)
        if 0 not in sources or 1 not in sources:
            return [], [], []
        last_of_first = len(sources) - 1 - sources[::-1].index(0)
        last_of_second = len(sources) - 1 - sources[::-1].index(1)
        ids = list(probe.ids)
        return ids[: sources.index(0)], ids[last_of_first + 1 : sources.index(1)], ids[last_of_second + 1 :]

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        return self._backend.decode(list(token_ids), skip_special_tokens=skip_special_tokens)

    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        if self._facts.kind is VocabularyKind.BYTE_LEVEL:
            return Utf8Stream(self._visible_bytes if skip_special_tokens else self.token_bytes, prompt_ids)
        return RecoveringStream(self._backend, prompt_ids, skip_special_tokens)

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        if (known := self._known_bytes.get(token_id)) is not None:
            return known
        if not 0 <= token_id < 1 << 32:
            return b""
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        spelled = self._known_bytes[token_id] = spelled_bytes(token, self._facts.kind)
        return spelled

    def _visible_bytes(self, token_id: int) -> bytes:
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def _role_id(self, role: str) -> int | None:
        text = self._facts.special_tokens.get(role)
        return None if text is None else self._backend.token_to_id(text)

    @cached_property
    def _control_pattern(self) -> re.Pattern[str] | None:
        """Any control token's text, longest first. Alternatives are literal, so matching is linear."""
        texts = sorted(map(re.escape, self._control_texts), key=len, reverse=True)
        return re.compile("|".join(texts)) if texts else None

    @cached_property
    def _plain_backend(self) -> Backend:
        """The same pipeline without control tokens. It shares the vocabulary, so it costs nothing to make, unless
        added text tokens lie outside of it, whose ids only a full copy keeps."""
        model = self._backend.model
        if any(model.token_to_id(token.content) is None for token in self._text_tokens):
            plain = Backend.from_str(self._backend.to_str())
            plain.encode_special_tokens = True
            return plain
        plain = Backend(model)
        if self._backend.normalizer is not None:
            plain.normalizer = self._backend.normalizer
        if self._backend.pre_tokenizer is not None:
            plain.pre_tokenizer = self._backend.pre_tokenizer
        plain.add_tokens(self._text_tokens)
        return plain

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        ids = _encode(self._plain_backend, text, False)
        if not self._special_ids.isdisjoint(ids):
            ids = self._encode_split(text)
        if not add_special_tokens:
            return ids
        # The frame (BOS and the like) is what the post-processor puts around nothing.
        before, after = self._frame
        return [*before, *ids, *after]

    def _encode_split(self, text: str) -> list[int]:
        """For a vocabulary that would find a control token whole: cut each such text after its first character."""
        ids: list[int] = []
        start = 0
        for match in self._control_pattern.finditer(text) if self._control_pattern else ():
            ids += _encode(self._plain_backend, text[start : match.start() + 1], False)
            start = match.start() + 1
        ids += _encode(self._plain_backend, text[start:], False)
        return [token_id for token_id in ids if token_id not in self._special_ids]

    @cached_property
    def _frame(self) -> tuple[list[int], list[int]]:
        probe = self._backend.encode("a", add_special_tokens=True)
        inner = [index for index, is_special in enumerate(probe.special_tokens_mask) if not is_special]
        return list(probe.ids[: inner[0]]), list(probe.ids[inner[-1] + 1 :])

"""Plugin kind ``tokenizer``: text to ids and back, in the API process (and in the engine where grammars need it)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

from hardpoint.interfaces.model_source import ModelArtifact


class DecodeStream(Protocol):
    """Incremental decoding of one sequence; cost per token is independent of its length (R6.62)."""

    def step(self, token_id: int) -> str | None:
        """Text that became complete with this token; None while a character is still incomplete (R6.70).

        A model may say anything: an id without text gives none, bytes that are no text do not stop the stream (R6.71).
        """


class Tokenizer(ABC):
    """One model's tokenizer. Thread-safe for encoding and decoding."""

    @property
    @abstractmethod
    def vocab_size(self) -> int:
        """Number of ids the tokenizer knows, added tokens included; the model's logits may be wider."""

    @property
    @abstractmethod
    def bos_token_id(self) -> int | None: ...

    @property
    @abstractmethod
    def eos_token_id(self) -> int | None: ...

    @property
    @abstractmethod
    def chat_template(self) -> str | None:
        """Jinja source shipped with the model, or None."""

    @property
    @abstractmethod
    def special_tokens(self) -> dict[str, str]:
        """Template variables: ``bos_token``, ``eos_token`` and the like, where the model defines them."""

    @property
    def control_tokens(self) -> frozenset[str]:
        """Texts that encode to control tokens where special text is parsed; a chat's contents must never become one."""
        return frozenset(self.special_tokens.values())

    @abstractmethod
    def encode(self, text: str, *, add_special_tokens: bool = True, parse_special: bool = True) -> list[int]:
        """Token ids. ``parse_special=False`` treats spelled-out control tokens in ``text`` as ordinary text."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str: ...

    @abstractmethod
    def decode_stream(self, prompt_ids: Sequence[int], *, skip_special_tokens: bool = True) -> DecodeStream:
        """A stream primed with the end of ``prompt_ids``, so that the first token joins correctly."""

    @abstractmethod
    def token_text(self, token_id: int) -> str:
        """The token alone, for log-probability reports; undecodable bytes become U+FFFD."""

    @abstractmethod
    def token_bytes(self, token_id: int) -> bytes:
        """The token's own bytes; empty for an id without text."""


class TokenizerProvider(ABC):
    """What the plugin's factory returns."""

    @abstractmethod
    def accepts(self, artifact: ModelArtifact) -> bool:
        """True if the artifact carries a tokenizer in this provider's format. Cheap."""

    @abstractmethod
    def load(self, artifact: ModelArtifact) -> Tokenizer:
        """Raise ``ModelFormatError`` naming the file when it is corrupt or lacks what decoding needs."""

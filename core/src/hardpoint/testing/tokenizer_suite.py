"""Conformance of the plugin kind ``tokenizer``: derive from :class:`TokenizerSuite` and supply one loaded tokenizer."""

from __future__ import annotations

import statistics
import time
from abc import abstractmethod
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from hardpoint.interfaces import ModelArtifact, Tokenizer, TokenizerProvider
from hardpoint.plugins.plan import PlannedPlugin
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["TEXTS", "TokenizerSuite", "streamed"]

REPLACEMENT = "\ufffd"
TEXTS = (
    "",
    " ",
    "\n",
    "Rivets hold the wing.",
    "  two spaces before, two after  ",
    "a tab\tand lines\r\n\n\nbelow",
    "for i in range(3):\n    print(i ** 2)\n",
    "Grüße aus Köln, déjà vu",
    "Съешь ещё этих мягких булок",
    "天地玄黄，宇宙洪荒",
    "いろはにほへと",
    "🙂 👩‍🚀 🇫🇷",
    "12,345.678 and 0x1F",
    "~" * 200,
    "<not a token> <|neither|>",
)


def streamed(tokenizer: Tokenizer, prompt: Sequence[int], ids: Sequence[int], *, skip_special: bool = True) -> str:
    """The text that a stream primed with ``prompt`` gives for ``ids``."""
    stream = tokenizer.decode_stream(prompt, skip_special_tokens=skip_special)
    return "".join(stream.step(token_id) or "" for token_id in ids)


class TokenizerSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.Tokenizer`.

    ``texts`` are those that must survive encoding and decoding; replace them where a vocabulary cannot express all.
    Control tokens are tested where the tokenizer encodes the text of one to a single id.
    """

    kind: ClassVar[str] = "tokenizer"
    torch_free: ClassVar[bool] = True
    texts: ClassVar[tuple[str, ...]] = TEXTS
    _loaded: ClassVar[Tokenizer]

    @abstractmethod
    def create_tokenizer(self) -> Tokenizer:
        """The tokenizer under test, loaded."""

    @pytest.fixture
    def tokenizer(self) -> Tokenizer:
        """One for all tests of the class: loading may take long."""
        kind = type(self)
        if "_loaded" not in kind.__dict__:
            kind._loaded = self.create_tokenizer()
        return kind._loaded

    @pytest.fixture
    def control_ids(self, tokenizer: Tokenizer) -> dict[str, int]:
        """Control tokens that parsing finds; their ids."""
        found = {}
        for text in sorted(tokenizer.control_tokens):
            ids = tokenizer.encode(text, add_special_tokens=False)
            if len(ids) == 1:
                found[text] = ids[0]
        return found

    def test_text_survives(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert tokenizer.decode(ids) == text
            assert tokenizer.encode(text, add_special_tokens=False) == ids, "encoding is not deterministic"

    def test_ids_are_in_range(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            ids = tokenizer.encode(text)
            assert all(type(token_id) is int for token_id in ids)
            assert all(0 <= token_id < tokenizer.vocab_size for token_id in ids), "an id outside vocab_size"
        for token_id in (tokenizer.bos_token_id, tokenizer.eos_token_id):
            assert token_id is None or 0 <= token_id < tokenizer.vocab_size

    def test_templates_get_text(self, tokenizer: Tokenizer) -> None:
        """A template is source or absent; what its variables hold can never be written by a user."""
        assert tokenizer.chat_template is None or tokenizer.chat_template.strip()
        for name, text in tokenizer.special_tokens.items():
            assert name.isidentifier(), f"{name!r} is no variable of a template"
            assert text in tokenizer.control_tokens, f"{name} is missing among the control tokens"

    def test_what_is_not_its_own_is_left_to_others(self, planned: PlannedPlugin, tmp_path: Path) -> None:
        """An empty folder carries no tokenizer at all."""
        provider: TokenizerProvider = self.create_plugin(self.context())
        artifact = ModelArtifact(name=planned.name, root=str(tmp_path), files=(), source="kit")
        assert provider.accepts(artifact) is False

    def test_added_special_tokens_do_not_show(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            assert tokenizer.decode(tokenizer.encode(text)) == text

    def test_a_stream_equals_decoding(self, tokenizer: Tokenizer) -> None:
        """I6.7: from the first id on, and where generation joins a prompt."""
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            assert streamed(tokenizer, [], ids) == text
            for cut in {1, len(ids) // 3, len(ids) // 2, len(ids) - 1}:
                before = tokenizer.decode(ids[:cut])
                if 0 < cut < len(ids) and text.startswith(before):
                    assert before + streamed(tokenizer, ids[:cut], ids[cut:]) == text, f"joined at token {cut}"

    def test_incomplete_characters_wait(self, tokenizer: Tokenizer) -> None:
        """R6.70: no part of a character is emitted, in no place a replacement for one that is still to come."""
        for text in self.texts:
            stream = tokenizer.decode_stream([])
            shown = ""
            for token_id in tokenizer.encode(text, add_special_tokens=False):
                shown += stream.step(token_id) or ""
                assert text.startswith(shown), f"{shown[-3:]!r} was emitted too early"

    @pytest.mark.parametrize("seed", range(10))
    def test_any_ids_can_be_decoded(self, tokenizer: Tokenizer, seed: int) -> None:
        """R6.71: a model may say anything; only what is incomplete at the very end may be missing from the stream."""
        rng = np.random.default_rng(seed)
        for _ in range(10):
            ids = rng.integers(0, tokenizer.vocab_size, int(rng.integers(0, 30))).tolist()
            whole, parts = tokenizer.decode(ids), streamed(tokenizer, [], ids)
            assert whole.startswith(parts)
            assert not whole.removeprefix(parts).strip(REPLACEMENT)

    def test_ids_without_text_give_none(self, tokenizer: Tokenizer) -> None:
        """R6.71: also beyond the vocabulary, where padded logits reach, and the stream goes on."""
        ids = tokenizer.encode("after", add_special_tokens=False)
        for odd in (-1, tokenizer.vocab_size, tokenizer.vocab_size + 500, 2**31 - 1, 2**40):
            stream = tokenizer.decode_stream([], skip_special_tokens=True)
            assert not (stream.step(odd) or "").strip(REPLACEMENT), f"id {odd} has a text"
            shown = "".join(stream.step(token_id) or "" for token_id in ids)
            assert shown.strip() == "after", f"after id {odd} the stream is out of step"

    def test_control_tokens_are_hidden_or_shown(self, tokenizer: Tokenizer, control_ids: dict[str, int]) -> None:
        if not control_ids:
            pytest.skip("no control token of this tokenizer has text of its own")
        for text, token_id in control_ids.items():
            ids = [*tokenizer.encode("one", add_special_tokens=False), token_id]
            assert tokenizer.decode(ids) == streamed(tokenizer, [], ids) == "one"
            shown = tokenizer.decode(ids, skip_special_tokens=False)
            assert shown.startswith("one")
            assert shown.endswith(text)
            assert streamed(tokenizer, [], ids, skip_special=False) == shown

    def test_text_never_becomes_a_control_token(self, tokenizer: Tokenizer, control_ids: dict[str, int]) -> None:
        """``parse_special=False`` is what keeps the contents of a chat apart from its structure."""
        kept_out = {*control_ids.values(), tokenizer.bos_token_id, tokenizer.eos_token_id} - {None}
        for token in sorted(tokenizer.control_tokens):
            for text in (token, f"before {token} after", token + token, f"\n{token}\n"):
                ids = tokenizer.encode(text, add_special_tokens=False, parse_special=False)
                assert not kept_out & set(ids), f"{text!r} became a control token"
                assert tokenizer.decode(ids, skip_special_tokens=False) == text

    def test_plain_text_does_not_depend_on_parsing(self, tokenizer: Tokenizer) -> None:
        for text in self.texts:
            assert tokenizer.encode(text, parse_special=False) == tokenizer.encode(text)

    def test_single_tokens(self, tokenizer: Tokenizer) -> None:
        """The bytes of the tokens are the text's own, and every id can be reported."""
        for text in self.texts:
            ids = tokenizer.encode(text, add_special_tokens=False)
            joined = b"".join(tokenizer.token_bytes(token_id) for token_id in ids)
            assert joined.lstrip(b" ") == text.encode().lstrip(b" ")
        step = max(1, tokenizer.vocab_size // 500)
        for token_id in range(0, tokenizer.vocab_size, step):
            tokenizer.token_text(token_id).encode()
            assert isinstance(tokenizer.token_bytes(token_id), bytes)

    def test_the_cost_of_a_token_does_not_grow(self, tokenizer: Tokenizer) -> None:
        """R6.62: medians early and late in a long sequence."""
        ids = tokenizer.encode("nine words make up one short sentence of prose ", add_special_tokens=False)
        ids = (ids * (3_000 // len(ids) + 1))[:3_000]
        stream = tokenizer.decode_stream([])
        times = []
        for token_id in ids:
            start = time.perf_counter()
            stream.step(token_id)
            times.append(time.perf_counter() - start)
        early, late = statistics.median(times[50:250]), statistics.median(times[-200:])
        assert late < 8 * early + 5e-6, f"{early * 1e6:.1f} us per token early, {late * 1e6:.1f} us late"

    def test_threads_do_not_disturb_one_another(self, tokenizer: Tokenizer) -> None:
        alone = [tokenizer.encode(text) for text in self.texts]
        with ThreadPoolExecutor(4) as pool:
            together = list(pool.map(tokenizer.encode, self.texts * 8))
        assert together == alone * 8

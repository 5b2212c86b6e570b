"""What scores and embeddings of texts are asked by and made of, the same over HTTP and in Python. No web library here.

Legend: N texts or pairs, L labels, D entries of an embedding.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np
import numpy.typing as npt

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces.engine import ModelLimits, Prompt
from hardpoint.interfaces.request import PoolingParams
from hardpoint.interfaces.tokenizer import Tokenizer

__all__ = [
    "Activation",
    "ModelFacts",
    "PairTemplate",
    "PairTokenizer",
    "activated",
    "check_dimensions",
    "judging_params",
    "label_names",
    "line_up",
    "model_config",
    "pair_scores",
    "require_judge",
]

FloatArray = npt.NDArray[np.float32]
Activation = Literal["softmax", "sigmoid", "none"]
"""Of scores: shares that add up to 1, each label for itself, or scores as they are."""
MAX_CHARS_PER_TOKEN = 64
"""As for prompts of all kinds."""
_PLACEHOLDER = re.compile(r"\{(instruction|query|document)\}")


@runtime_checkable
class ModelFacts(Protocol):
    """A tokenizer that was read beside its model, and can say what is written there."""

    @property
    def model_config(self) -> Mapping[str, Any]: ...


@runtime_checkable
class PairTokenizer(Protocol):
    """A tokenizer that knows how two texts are given to the model together."""

    def encode_pair(self, first: str, second: str) -> list[int]:
        """Raises ``ValueError`` where nothing would stand between the two."""


def _refuse(message: str, param: str, code: str = "invalid_value") -> InvalidRequestError:
    return InvalidRequestError(message, param=param, code=code)


def model_config(tokenizer: Tokenizer) -> Mapping[str, Any]:
    """The model's configuration as it lies beside the tokenizer; empty where that is not known."""
    known: object = tokenizer
    return known.model_config if isinstance(known, ModelFacts) else {}


def check_dimensions(dimensions: int | None, tokenizer: Tokenizer, limits: ModelLimits) -> None:
    """Embeddings are cut to sizes that the model was trained for, where it lists any.

    Raises ``InvalidRequestError`` naming the field and the sizes; a bound on the size itself is the engine's to check.
    """
    allowed = model_config(tokenizer).get("matryoshka_dimensions")
    if dimensions is None or not isinstance(allowed, list | tuple) or not allowed:
        return
    if dimensions not in allowed and dimensions != limits.embedding_size:
        listed = ", ".join(str(size) for size in allowed)
        raise _refuse(f"dimensions is {dimensions}; embeddings of this model can have {listed}", "dimensions")


def require_judge(tasks: Sequence[str]) -> None:
    """Raises ``InvalidRequestError`` for models without labels."""
    if "classify" not in tasks:
        served = ", ".join(tasks) or "nothing"
        raise _refuse(f"this model does not classify; it serves {served}", "model", "unsupported_task")


def judging_params(activation: Activation | None) -> PoolingParams:
    """None is the model's own; any other one is made of raw scores by :func:`activated`."""
    return PoolingParams() if activation is None else PoolingParams(normalize=False)


def activated(scores: FloatArray, activation: Activation | None) -> FloatArray:
    """float32 [..., L] to the same shape. ``scores`` are those of :func:`judging_params`."""
    if activation == "softmax":
        raised = np.exp(scores - scores.max(axis=-1, keepdims=True))
        return np.asarray(raised / raised.sum(axis=-1, keepdims=True), dtype=np.float32)
    if activation == "sigmoid":
        # Both branches of the sign, so that no exponential overflows.
        small = np.exp(-np.abs(scores))
        return np.asarray(np.where(scores >= 0, 1 / (1 + small), small / (1 + small)), dtype=np.float32)
    return scores


def label_names(tokenizer: Tokenizer, count: int) -> list[str]:
    """As the model's configuration has them, else ``LABEL_0`` and so on."""
    named = model_config(tokenizer).get("id2label")
    names = named if isinstance(named, Mapping) else {}
    return [str(names.get(str(index), names.get(index, f"LABEL_{index}"))) for index in range(count)]


def _check_texts(texts: Sequence[str], limits: ModelLimits) -> None:
    """What can be said before anything is tokenized, which takes time."""
    most, given = limits.max_model_len * MAX_CHARS_PER_TOKEN, sum(map(len, texts))
    if given > most:
        raise _refuse(
            f"the prompt has {given} characters; at most {most} are allowed, {MAX_CHARS_PER_TOKEN} for each token of "
            "the model's context",
            "prompt",
            "context_length_exceeded",
        )
    for text in texts:
        try:
            text.encode()
        except UnicodeEncodeError:
            raise _refuse("the prompt holds unpaired surrogates, which are not text", "prompt") from None


def line_up(first: Sequence[str], second: Sequence[str], names: tuple[str, str]) -> list[tuple[str, str]]:
    """One text with each of several, or as many with as many. ``names`` are the fields that hold them.

    Raises ``InvalidRequestError`` for other counts.
    """
    for texts, name in zip((first, second), names, strict=True):
        if not texts:
            raise _refuse(f"{name} is empty; at least one text is needed", name, "empty_prompt")
    if len(first) == 1:
        return [(first[0], one) for one in second]
    if len(first) != len(second):
        raise _refuse(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}; give one, or as many as there are in "
            f"{names[1]}",
            names[0],
        )
    return list(zip(first, second, strict=True))


def pair_scores(results: Sequence[FloatArray]) -> list[float]:
    """One number per pair out of [L] scores each: that of the only label, or of the second one of two (no and yes).

    Raises ``InvalidRequestError`` for models that tell more apart, or judge every token.
    """
    scores = []
    for result in results:
        if result.ndim != 1 or len(result) > 2:
            kind = f"{len(result)} labels" if result.ndim == 1 else "every token on its own"
            raise _refuse(f"this model judges {kind}, which is no score of a pair; ask for its labels instead", "model")
        scores.append(float(result[-1]))
    return scores


@dataclass(frozen=True, slots=True)
class PairTemplate:
    """How a pair becomes one prompt: ``text`` with ``{query}``, ``{document}`` and perhaps ``{instruction}`` in it.

    Without ``text`` it is as the tokenizer joins two texts. Only the template can spell control tokens. Raises
    ``ValueError`` for a template without both texts.
    """

    text: str | None = None
    instruction: str = ""

    def __post_init__(self) -> None:
        found = set(_PLACEHOLDER.findall(self.text or "{query}{document}"))
        missing = {"query", "document"} - found
        if missing:
            raise ValueError(f"the template lacks {{{min(missing)}}}, in whose place a text of the pair goes")

    def prompt(
        self, query: str, document: str, tokenizer: Tokenizer, limits: ModelLimits, *, cache_salt: str | None = None
    ) -> Prompt:
        """Raises ``InvalidRequestError`` for texts that cannot be encoded, or are far longer than the model takes, and
        where nothing says how two texts are joined."""
        _check_texts((self.instruction, query, document), limits)
        if self.text is not None:
            ids = self._filled({"query": query, "document": document, "instruction": self.instruction}, tokenizer)
            return Prompt(token_ids=ids, cache_salt=cache_salt)
        known: object = tokenizer
        try:
            if isinstance(known, PairTokenizer):
                return Prompt(token_ids=known.encode_pair(query, document), cache_salt=cache_salt)
        except ValueError:
            pass
        raise _refuse(
            "the model's tokenizer does not say how two texts are joined; the operator sets a pair_template",
            "model",
            "unsupported_task",
        )

    def _filled(self, texts: Mapping[str, str], tokenizer: Tokenizer) -> list[int]:
        """Between two control tokens everything is encoded at once, since words may join what is around them."""
        controls = sorted(filter(None, tokenizer.control_tokens), key=len, reverse=True)
        pattern = f"({'|'.join(map(re.escape, controls))})" if controls else r"(?!)()"
        ids: list[int] = []
        for piece in re.split(pattern, self.text or ""):
            if piece in tokenizer.control_tokens:
                ids += tokenizer.encode(piece, add_special_tokens=False)
            elif piece:
                filled = _PLACEHOLDER.sub(lambda match: texts[match[1]], piece)
                ids += tokenizer.encode(filled, add_special_tokens=False, parse_special=False) if filled else []
        return ids

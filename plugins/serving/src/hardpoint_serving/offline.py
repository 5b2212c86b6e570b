"""Scores, labels and rewards of texts from :class:`hardpoint.LLM`, by the same rules as over HTTP.

    from hardpoint import LLM
    from hardpoint_serving.offline import classify, rerank, reward, score

    with LLM("path/of/a/cross-encoder") as llm:
        print(score(llm, "what flies?", ["a wing", "an anchor"]))

Legend: L labels.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from hardpoint import LLM
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import EmbeddingOutput, Prompt
from hardpoint_serving.judging import (
    Activation,
    FloatArray,
    PairTemplate,
    activated,
    check_dimensions,
    judging_params,
    label_names,
    line_up,
    pair_scores,
    require_judge,
)

__all__ = ["Classification", "Ranked", "classify", "embed", "rerank", "reward", "score"]

Texts = str | Sequence[str]


@dataclass(frozen=True, slots=True)
class Classification:
    """``probabilities`` float32 [L] in the order of ``labels``; ``label`` is the one with the highest."""

    label: str
    labels: tuple[str, ...]
    probabilities: FloatArray


@dataclass(frozen=True, slots=True)
class Ranked:
    """A document by its place in what was given, and how well it fits."""

    index: int
    score: float


def embed(
    llm: LLM, texts: Texts, *, pooling: str | None = None, normalize: bool | None = None, dimensions: int | None = None
) -> list[EmbeddingOutput]:
    """As ``LLM.embed``, but refuses models that give scores, and sizes that the model does not list, before anything is
    computed. Raises ``InvalidRequestError``."""
    if _judges(llm):
        raise InvalidRequestError("this model gives scores and no embeddings", param="model", code="unsupported_task")
    check_dimensions(dimensions, llm.tokenizer, llm.limits)
    return llm.embed(_listed(texts), pooling=pooling, normalize=normalize, dimensions=dimensions)


def classify(llm: LLM, texts: Texts, *, activation: Activation | None = None) -> list[Classification]:
    """The labels of each text, by the model's own ``activation`` unless another one is named.

    Raises ``InvalidRequestError`` for models without labels, and for those that judge every token.
    """
    results = _judged(llm, _listed(texts), activation)
    found = []
    for result in results:
        if result.ndim != 1:
            raise InvalidRequestError("this model judges every token on its own; ask for reward", param="model")
        names = label_names(llm.tokenizer, len(result))
        found.append(Classification(names[int(result.argmax())], tuple(names), result))
    return found


def reward(llm: LLM, texts: Texts, *, activation: Activation | None = "none") -> list[FloatArray]:
    """Raw scores of each text, float32 [L], or [tokens or steps, L] of models that judge these.

    Raises ``InvalidRequestError`` for models without labels.
    """
    return _judged(llm, _listed(texts), activation)


def score(
    llm: LLM, first: Texts, second: Texts, *, template: PairTemplate | None = None, activation: Activation | None = None
) -> list[float]:
    """How well each pair belongs together: one text with each of several, or as many with as many.

    Models with labels judge the pair as a whole; of embeddings it is the cosine of the two. Raises
    ``InvalidRequestError``.
    """
    pairs = line_up(_listed(first), _listed(second), ("first", "second"))
    if not _judges(llm):
        return _similarities(llm, pairs)
    joined = template or PairTemplate()
    prompts = [joined.prompt(query, document, llm.tokenizer, llm.limits) for query, document in pairs]
    return pair_scores(_judged(llm, prompts, activation))


def rerank(
    llm: LLM,
    query: str,
    documents: Sequence[str],
    *,
    top_n: int | None = None,
    template: PairTemplate | None = None,
    activation: Activation | None = None,
) -> list[Ranked]:
    """``documents`` by how well they fit ``query``, the best one first. Raises ``InvalidRequestError``."""
    scores = score(llm, query, documents, template=template, activation=activation)
    ranked = [Ranked(index, value) for index, value in enumerate(scores)]
    return sorted(ranked, key=lambda one: -one.score)[:top_n]


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else list(texts)


def _judges(llm: LLM) -> bool:
    return "classify" in llm.core.executor.supported_tasks()


def _judged(llm: LLM, prompts: Sequence[str | Prompt], activation: Activation | None) -> list[FloatArray]:
    require_judge(llm.core.executor.supported_tasks())
    outputs = llm.embed(prompts, normalize=judging_params(activation).normalize)
    return [activated(output.embedding, activation) for output in outputs]


def _similarities(llm: LLM, pairs: Sequence[tuple[str, str]]) -> list[float]:
    """Each text is embedded once, however often it occurs."""
    texts = list(dict.fromkeys(text for pair in pairs for text in pair))
    vectors = dict(zip(texts, (output.embedding for output in llm.embed(texts, normalize=True)), strict=True))
    return [float(np.dot(vectors[query], vectors[document])) for query, document in pairs]

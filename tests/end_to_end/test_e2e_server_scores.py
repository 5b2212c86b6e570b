"""A tiny cross-encoder behind ``hardpoint serve``: the same scores and labels over HTTP as in Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint import LLM
from hardpoint_serving.offline import classify, score
from pair_models import QUERY, TEXTS, make_judge
from server_process import PATIENCE, serving, until

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 * PATIENCE)]

SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 64, "max_num_batched_tokens": 64}
ENDPOINTS = "ops,embeddings,score,classify,pooling"


def test_a_server_judges(tmp_path: Path) -> None:
    make_judge("XLMRobertaForSequenceClassification", tmp_path, separators=2, num_labels=2)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        wanted, labels = score(llm, QUERY, TEXTS), classify(llm, list(TEXTS))
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with serving(str(tmp_path), *flags, "--endpoints", ENDPOINTS) as server:
        http = server.http
        scored = http.post("/v1/score", json={"text_1": QUERY, "text_2": list(TEXTS)}).json()
        np.testing.assert_allclose([item["score"] for item in scored["data"]], wanted, rtol=1e-4, atol=1e-5)
        ranked = http.post("/v1/rerank", json={"query": QUERY, "documents": list(TEXTS), "top_n": 2}).json()
        assert [item["index"] for item in ranked["results"]] == np.argsort(wanted)[::-1][:2].tolist()
        classified = http.post("/classify", json={"input": list(TEXTS)}).json()
        for item, found in zip(classified["data"], labels, strict=True):
            assert item["label"] == found.label
            np.testing.assert_allclose(item["probs"], found.probabilities, rtol=1e-4, atol=1e-5)
        pooled = http.post("/pooling", json={"input": TEXTS[0], "activation": "softmax"}).json()
        np.testing.assert_allclose(pooled["data"][0]["data"], labels[0].probabilities, rtol=1e-4, atol=1e-5)
        refused = http.post("/v1/embeddings", json={"input": TEXTS[0]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (400, "unsupported_task")
        # An encoder keeps nothing, so there are no blocks to count.
        until(lambda: server.load()["running"] == server.load()["waiting"] == 0, 5, "nothing runs")

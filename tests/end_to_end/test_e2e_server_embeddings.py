"""A tiny decoder behind ``hardpoint serve``: embeddings and answers of one server, through the OpenAI SDK."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint import LLM
from server_process import PATIENCE, serving, until
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600 * PATIENCE)]

TEXTS = ("rivets", "a wing in the clouds", "x" * 90)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 128, "max_num_batched_tokens": 16}


def test_a_server_embeds_and_answers(tmp_path: Path) -> None:
    """The same vectors as in Python, while others are generated for; and every block is free afterwards."""
    folder = write_tiny_llama(tmp_path / "tiny")
    with LLM(str(folder), **SETTINGS) as llm:
        wanted = [output.embedding for output in llm.embed(TEXTS)]
    flags = [part for name, value in SETTINGS.items() for part in (f"--{name.replace('_', '-')}", str(value))]
    with serving(str(folder), *flags, "--endpoints", "openai,ops,embeddings") as server, server.sdk(api_key="-") as sdk:
        stream = sdk.completions.create(model="served", prompt="wings", max_tokens=60, stream=True, temperature=0)
        first = next(iter(stream))
        answer = sdk.embeddings.create(model="served", input=list(TEXTS))
        for vector, item in zip(wanted, answer.data, strict=True):
            np.testing.assert_allclose(np.asarray(item.embedding), vector, rtol=1e-5, atol=1e-6)
        assert answer.usage.prompt_tokens == answer.usage.total_tokens > 90
        assert first.object == "text_completion"
        assert sum(len(chunk.choices) for chunk in stream) > 0
        until(server.is_idle, 5, "nothing runs and every block is free")

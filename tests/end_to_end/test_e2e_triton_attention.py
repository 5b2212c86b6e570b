"""The demo model over Triton's attention kernels, by interpreter, answers as it does over plain torch."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

SCRIPT = """
import json, sys
from hardpoint import LLM, SamplingParams

answers = {}
for backend in sys.argv[1:]:
    sizes = {"max_num_seqs": 4, "max_model_len": 512, "num_kv_blocks": 64}
    with LLM("smollm2", dtype="float32", attention_backend=backend, **sizes) as llm:
        asked = ["The capital of France is", "One, two, three,"]
        outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=4))
        answers[backend] = [output.outputs[0].token_ids for output in outputs]
print(json.dumps({name: [list(tokens) for tokens in found] for name, found in answers.items()}))
"""


def test_smollm2_over_triton_equals_the_reference() -> None:
    """Prefills of unequal length, then decodes, through all layers and the cache."""
    pytest.importorskip("triton")
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "torch_reference", "triton"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=570,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert answers["triton"] == answers["torch_reference"]
    assert [len(tokens) for tokens in answers["triton"]] == [4, 4]


def test_without_the_interpreter_the_cpu_is_refused() -> None:
    """R5.4, R5.5: a forced backend says at start why it cannot, and what to set."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, "triton"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode != 0
    assert "Triton has no compiler for the CPU; set TRITON_INTERPRET=1" in done.stderr

"""Sides of a benchmark whose engines are scripted: they log what they are told and take as long as they are said to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hardpoint_bench.sides import Program

__all__ = ["OUR_FACTS", "told_to", "write_side"]

_SCRIPT = """
import json

NAME, FACTS, SECONDS, LOG, FAILS_IN = {arguments}

class Engine:
    facts = FACTS

    def run(self, prompts, output_len):
        if len(prompts[0]) == FAILS_IN:
            raise RuntimeError("out of luck")
        with open(LOG, "a") as log:
            log.write(json.dumps([NAME, prompts, output_len]) + "\\n")
        return {{
            "seconds": SECONDS,
            "ttft_s": SECONDS / 4,
            "decode_tokens_per_s": 8 / SECONDS,
            "num_output_tokens": len(prompts) * output_len,
            "num_prompt_tokens": sum(map(len, prompts)),
            "num_cached_tokens": 0,
        }}

    def close(self):
        pass

def load(job, phases):
    phases.begin("weights")
    with open(LOG, "a") as log:
        log.write(json.dumps(["load " + NAME, job]) + "\\n")
    if job.get("config", {{}}).get("engines", {{}}).get("tiny", {{}}).get("model", {{}}).get("quantization") == "gguf":
        raise type("ConfigError", (Exception,), {{}})("no such quantization")
    return Engine()
"""

OUR_FACTS: Mapping[str, Any] = {
    "vocab_size": 40,
    "max_model_len": 64,
    "model_path": "/models/tiny",
    "dtype": "float32",
    "quantization": None,
    "threads": 2,
    "ranks": 1,
    "precision": "float32 weights, activations and KV cache",
    "notes": ["lowered by script"],
    "sizes": {},
}
"""What our side tells. A model in the class of 4 bits it refuses."""


def write_side(
    folder: Path, name: str, facts: Mapping[str, Any], seconds: float, *, fails_in: int | None = None
) -> Program:
    """``seconds`` of each run; one with a prompt of ``fails_in`` tokens fails."""
    path = folder / f"{name}.py"
    arguments = repr((name, dict(facts), seconds, str(folder / "log.jsonl"), fails_in))
    path.write_text(_SCRIPT.format(arguments=arguments), encoding="utf-8")
    return Program(name, path)


def told_to(folder: Path) -> list[list[Any]]:
    """What the sides of ``folder`` were told, in order: name, prompts and length, or ``load NAME`` and the job."""
    return [json.loads(line) for line in (folder / "log.jsonl").read_text(encoding="utf-8").splitlines()]

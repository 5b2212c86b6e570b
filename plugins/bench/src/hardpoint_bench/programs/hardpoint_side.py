"""Hardpoint itself as a side of a benchmark: the offline engine with the settings of the command line."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from typing import Any

from hardpoint import LLM
from hardpoint.config import AppConfig
from hardpoint_bench.measure import run_prompts

_LOGGER = "hardpoint"
_KV_PLANNED = "KV cache:"
_SIZES = (
    "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
    "vocab_size", "tie_word_embeddings", "num_local_experts", "num_experts", "n_routed_experts", "kv_lora_rank",
)  # fmt: skip
"""Fields of a model's configuration that say what it has to compute."""
_WEIGHTS = {"int8": "int8 weights", "int4": "int4 weights in groups", "gguf": "weights packed as in the file"}


_NOTED = ("CPU kernels ", "compiling CPU kernels ", "lowered by ", "not lowered by ", "steps are not run ")
"""How messages begin that say what computes."""
_FOLDERS = re.compile(r"/\S*/")


class _Listener(logging.Handler):
    """The engine says once that it planned its KV cache: the weights are in place then, and the warm-up comes next.

    ``notes`` are warnings and what tells which kernels run, without the folders of this machine.
    """

    def __init__(self, phases: Any) -> None:
        super().__init__(logging.INFO)
        self._phases = phases
        self.notes: dict[str, None] = {}

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(_KV_PLANNED):
            self._phases.begin("warm_up")
        elif record.levelno >= logging.WARNING or message.startswith(_NOTED):
            self.notes[_FOLDERS.sub("", message)] = None


class Engine:
    def __init__(self, llm: LLM, facts: dict[str, Any]) -> None:
        self._llm = llm
        self.facts = facts

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        run = run_prompts(self._llm, prompts, output_len)
        return {name: getattr(run, name) for name in run.__slots__}

    def close(self) -> None:
        self._llm.shutdown()


def load(job: dict[str, Any], phases: Any) -> Engine:
    """``job["config"]`` is a whole configuration, as plain data."""
    seen: dict[str, Any] = {}

    class Watched(LLM):
        """Tells when the plan is made, and keeps it for the report."""

        def __init__(self, model: str, *, launch: Any, **settings: Any) -> None:
            def watched(*arguments: Any) -> Any:
                started = launch(*arguments)
                seen["spec"] = started.spec
                phases.begin("weights")
                return started

            super().__init__(model, launch=watched, **settings)

    phases.begin("plugins")
    logger, listener = logging.getLogger(_LOGGER), _Listener(phases)
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    llm = Watched.from_config(AppConfig.model_validate(job["config"]))
    logger.removeHandler(listener)
    facts = _facts(llm, seen["spec"], job["config"]["plugins"].get("quantization", {}))
    notes = [*listener.notes]
    if any(engine["scheduler"]["async_scheduling"] for engine in job["config"]["engines"].values()):
        notes.append("plans a step while the one before it is computed (--async-scheduling)")
    return Engine(llm, {**facts, "notes": notes})


def _facts(llm: LLM, spec: Any, methods: dict[str, Any]) -> dict[str, Any]:
    artifact, worker = spec.model.artifact, spec.worker_config
    is_file = len(artifact.files) == 1 and artifact.files[0].endswith(".gguf")
    return {
        "vocab_size": llm.limits.vocab_size,
        "max_model_len": llm.limits.max_model_len,
        "model_path": str(Path(artifact.root, artifact.files[0]) if is_file else artifact.root),
        "architecture": spec.model.architecture,
        "dtype": worker.dtype,
        "quantization": worker.quantization,
        "precision": _precision(worker, methods),
        "threads": worker.threads.compute_threads,
        "ranks": worker.parallel.world_size,
        "sizes": {name: spec.model.config[name] for name in _SIZES if name in spec.model.config},
    }


def _precision(worker: Any, methods: dict[str, Any]) -> str:
    """``methods``: options of quantization plugins by name. What one of a stranger does, only its name can tell."""
    dtype, method, kept = worker.dtype, worker.quantization, worker.kv_cache_dtype
    cache = "" if kept == dtype else f", KV cache in {kept}"
    if method is None:
        return f"{dtype} weights, activations and KV cache" if not cache else f"{dtype} weights and activations{cache}"
    if method not in _WEIGHTS:
        return f"{method} weights, {dtype} elsewhere{cache}"
    in_float = methods.get(method, {}).get("activations") == "float"
    if in_float:
        return f"{_WEIGHTS[method]}, {dtype} activations, {dtype} elsewhere{cache}"
    # What rounds that much anyway multiplies rounded numbers in attention as well, on processors with a unit for them.
    prompts = "" if worker.batch_invariant else "attention of prompts in bfloat16 where the processor multiplies it, "
    return f"{_WEIGHTS[method]}, int8 activations in linear layers, {prompts}{dtype} elsewhere{cache}"

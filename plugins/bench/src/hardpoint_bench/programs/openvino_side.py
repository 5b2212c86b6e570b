"""OpenVINO GenAI as a side of a benchmark: its continuous batching on the CPU, stepped by hand."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found, unused-ignore]
import openvino_genai  # type: ignore[import-not-found, unused-ignore]

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
_NAMES = {short: name for name, short in _PRECISIONS.items()}
_BATCHED_TOKENS = 2_048


class Engine:
    def __init__(self, pipeline: Any, facts: dict[str, Any]) -> None:
        self._pipeline = pipeline
        self._next_id = 0
        self.facts = facts

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens = output_len
        config.ignore_eos = True
        config.do_sample = False
        arrivals: list[list[float]] = [[] for _ in prompts]
        started = time.monotonic()
        handles = [self._add(prompt, config) for prompt in prompts]
        while self._pipeline.has_non_finished_requests():
            self._pipeline.step()
            now = time.monotonic()
            for handle, times in zip(handles, arrivals, strict=True):
                while handle.can_read():
                    times += [now for output in handle.read().values() for _ in output.generated_ids]
        rates = [(len(times) - 1) / (times[-1] - times[0]) for times in arrivals if len(times) > 1]
        return {
            "seconds": max(times[-1] for times in arrivals) - started,
            "ttft_s": statistics.median(times[0] for times in arrivals) - started,
            "decode_tokens_per_s": statistics.median(rates) if rates else None,
            "num_output_tokens": sum(map(len, arrivals)),
            "num_prompt_tokens": sum(map(len, prompts)),
            "num_cached_tokens": None,
        }

    def close(self) -> None:
        """Nothing of it outlives the process."""

    def _add(self, prompt: list[int], config: Any) -> Any:
        self._next_id += 1
        ids = openvino.Tensor(np.asarray([prompt], dtype=np.int64))
        return self._pipeline.add_request(self._next_id, ids, config)


def load(job: dict[str, Any], phases: Any) -> Engine:
    """``job``: ``model`` is a GGUF file or a folder with a model converted for OpenVINO; ``dtype`` is computed in.

    In the class of float32 nothing is anything else; in others the engine decides, as it does for its users.
    """
    phases.begin("weights")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = job["batch"]
    scheduler.max_num_batched_tokens = _BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    properties = {"INFERENCE_NUM_THREADS": job["threads"], **_pinned(job)}
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)
    facts = {
        "version": openvino_genai.__version__,
        "vocab_size": None,
        "max_model_len": None,
        "precision": _stated(job),
        "threads": job["threads"],
    }
    return Engine(pipeline, facts)


def _pinned(job: dict[str, Any]) -> dict[str, Any]:
    """By default the KV cache is in 8 bits, and products are in bfloat16 where the processor has it."""
    precision = job.get("precision")
    if precision not in (None, "fp32"):
        return {}
    pinned = {"INFERENCE_PRECISION_HINT": _PRECISIONS[job["dtype"]]}
    if precision == "fp32":
        pinned |= {"KV_CACHE_PRECISION": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    return pinned


def _stated(job: dict[str, Any]) -> str:
    weights = job.get("weights") or "weights as in the file"
    precision = job.get("precision")
    if precision is None:
        return f"{weights}, computed in {job['dtype']}"
    if precision == "fp32":
        return "float32 weights, activations and KV cache"
    core = openvino.Core()
    hint = core.get_property("CPU", "INFERENCE_PRECISION_HINT").get_type_name()
    group = core.get_property("CPU", "DYNAMIC_QUANTIZATION_GROUP_SIZE")
    activations = f"int8 in groups of {group} where its kernels take that, else " if group else ""
    return f"{weights}, activations {activations}{_NAMES.get(hint, hint)}, KV cache in 8 bits"

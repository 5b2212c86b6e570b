"""OpenVINO GenAI as a side of a benchmark: its continuous batching on the CPU, stepped by hand."""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import openvino  # type: ignore[import-not-found, unused-ignore]
import openvino_genai  # type: ignore[import-not-found, unused-ignore]

_PRECISIONS = {"float32": "f32", "bfloat16": "bf16", "float16": "f16"}
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
    """``job``: ``model`` is a GGUF file or a folder with a model converted for OpenVINO; ``dtype`` is computed in."""
    phases.begin("weights")
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.max_num_seqs = job["batch"]
    scheduler.max_num_batched_tokens = _BATCHED_TOKENS
    scheduler.enable_prefix_caching = True
    precision = _PRECISIONS[job["dtype"]]
    properties = {"INFERENCE_NUM_THREADS": job["threads"], "INFERENCE_PRECISION_HINT": precision}
    pipeline = openvino_genai.ContinuousBatchingPipeline(job["model"], scheduler, "CPU", properties)
    facts = {
        "version": openvino_genai.__version__,
        "vocab_size": None,
        "max_model_len": None,
        "precision": f"weights as in the file, computed in {job['dtype']}",
        "threads": job["threads"],
    }
    return Engine(pipeline, facts)

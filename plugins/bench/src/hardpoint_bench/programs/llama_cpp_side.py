"""llama.cpp as a side of a benchmark: the server of ``xllamacpp`` in its own process, a slot per prompt, no HTTP."""

from __future__ import annotations

import json
import statistics
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import xllamacpp  # type: ignore[import-not-found, unused-ignore]

_ACTIVATIONS = {
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "Q4_0": "int8 (q8_0)",
    "Q4_1": "int8 (q8_1)",
    "Q5_0": "int8 (q8_0)",
    "Q5_1": "int8 (q8_1)",
    "Q8_0": "int8 (q8_0)",
}
"""By the type of the weights: in what its products are computed."""


class Engine:
    def __init__(self, server: Any, facts: dict[str, Any]) -> None:
        self._server = server
        self.facts = facts

    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        """The server's own clock tells how long after its first token a request ended."""
        with ThreadPoolExecutor(len(prompts)) as pool:
            started = time.monotonic()
            ends = list(pool.map(lambda prompt: self._complete(prompt, output_len), prompts))
        decoding = [last["timings"]["predicted_ms"] / 1e3 for _, last in ends]
        made = [last["usage"]["completion_tokens"] for _, last in ends]
        rates = [(n - 1) / seconds for n, seconds in zip(made, decoding, strict=True) if n > 1]
        return {
            "seconds": max(ended for ended, _ in ends) - started,
            "ttft_s": statistics.median(
                ended - seconds - started for (ended, _), seconds in zip(ends, decoding, strict=True)
            ),
            "decode_tokens_per_s": statistics.median(rates) if rates else None,
            "num_output_tokens": sum(made),
            "num_prompt_tokens": sum(last["usage"]["prompt_tokens"] for _, last in ends),
            "num_cached_tokens": sum(last["timings"]["cache_n"] for _, last in ends),
        }

    def close(self) -> None:
        """Nothing of it outlives the process."""

    def _complete(self, prompt: list[int], output_len: int) -> tuple[float, dict[str, Any]]:
        """When the request ended, on the monotonic clock, and its last chunk."""
        chunks: list[tuple[float, str]] = []

        def keep(text: str) -> bool:
            chunks.append((time.monotonic(), text))
            return False  # go on

        order = {"prompt": prompt, "max_tokens": output_len, "temperature": 0, "ignore_eos": True, "stream": True}
        self._server.handle_completions(json.dumps(order), keep)
        ended, text = chunks[-1]
        last = json.loads(text)
        if "error" in last:
            raise RuntimeError(last["error"]["message"])
        return ended, last


def load(job: dict[str, Any], phases: Any) -> Engine:
    """``job``: ``model`` is a GGUF file, run in its own precision; a slot for each of ``batch`` prompts.

    In the class of float32 the KV cache is, too; otherwise it is in float16, as it is by default.
    """
    phases.begin("weights")
    if not job["model"].endswith(".gguf"):
        raise ValueError(f"{job['model']!r} is no GGUF file; give one with --peer-model llama.cpp=FILE.gguf")
    params = xllamacpp.CommonParams()
    params.model.path = job["model"]
    params.n_parallel = job["batch"]
    params.n_ctx = job["batch"] * job["max_len"]
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = job["threads"]
    params.cache_ram_mib = 0  # fresh prompts only: keeping old ones would cost time and find nothing
    params.verbosity = 0
    in_float32 = job.get("precision") == "fp32"
    if in_float32:
        params.cache_type_k = params.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
    weights = job.get("weights") or "weights as in the file"
    by_default = "int8 (q8_K)" if "_K" in weights else "fittingly quantized"
    activations = _ACTIVATIONS.get(weights, by_default)
    facts = {
        "version": xllamacpp.__version__,
        "vocab_size": None,
        "max_model_len": None,
        "precision": f"{weights}, {activations} activations, {'float32' if in_float32 else 'float16'} KV cache",
        "threads": job["threads"],
    }
    return Engine(xllamacpp.Server(params), facts)

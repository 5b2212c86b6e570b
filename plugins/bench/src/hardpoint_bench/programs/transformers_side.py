"""``transformers`` as a side of a benchmark: ``generate`` on a model that runs as it was loaded, uncompiled."""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch
import transformers


class Clock(transformers.StoppingCriteria):  # type: ignore[misc]
    """Stops nothing; remembers when each position of the batch was there, on the monotonic clock."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: Any, **further: Any) -> torch.Tensor:
        self.times.append(time.monotonic())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool)


class Engine:
    def __init__(self, model: Any, facts: dict[str, Any]) -> None:
        self._model = model
        self.facts = facts

    @torch.inference_mode()
    def run(self, prompts: list[list[int]], output_len: int) -> dict[str, Any]:
        """Prompts have one length, so the batch needs no padding."""
        clock = Clock()
        started = time.monotonic()
        ids = torch.tensor(prompts)
        found = self._model.generate(
            input_ids=ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=output_len,
            stopping_criteria=transformers.StoppingCriteriaList([clock]),
        )
        ended = time.monotonic()
        made = found.shape[1] - ids.shape[1]
        if made != output_len:
            raise RuntimeError(f"wanted {output_len} tokens per prompt, got {made}")
        steps = [later - earlier for earlier, later in zip(clock.times, clock.times[1:], strict=False)]
        return {
            "seconds": ended - started,
            "ttft_s": clock.times[0] - started,
            "decode_tokens_per_s": 1 / statistics.fmean(steps) if steps else None,
            "num_output_tokens": made * len(prompts),
            "num_prompt_tokens": ids.numel(),
            "num_cached_tokens": 0,
        }

    def close(self) -> None:
        """Nothing of it outlives the process."""


def load(job: dict[str, Any], phases: Any) -> Engine:
    """``job``: ``model`` is a folder or a GGUF file, whose weights are dequantized; ``dtype`` and ``threads``."""
    phases.begin("weights")
    if job["threads"]:
        torch.set_num_threads(job["threads"])
    transformers.utils.logging.disable_progress_bar()
    path = Path(job["model"])
    folder, further = (path.parent, {"gguf_file": path.name}) if path.is_file() else (path, {})
    dtype = getattr(torch, job["dtype"])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, local_files_only=True, **further)
    model.eval()
    # Defaults of the model might end sequences early, or sample.
    model.generation_config = transformers.GenerationConfig(do_sample=False, use_cache=True, pad_token_id=0)
    facts = {
        "version": transformers.__version__,
        "torch": str(torch.__version__),
        "vocab_size": model.config.get_text_config().vocab_size,
        "max_model_len": getattr(model.config.get_text_config(), "max_position_embeddings", None),
        "precision": f"{job['dtype']} weights and activations",
        "threads": torch.get_num_threads(),
    }
    return Engine(model, facts)

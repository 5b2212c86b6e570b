"""A tiny checkpoint of an installed architecture beside its oracle, and engines over it: what all comparisons share."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from hardpoint import LLM
from hardpoint.config import AppConfig, EngineConfig
from hardpoint_testing_torch.double_oracle import DoubleOracle
from hardpoint_testing_torch.parity_report import ModeResult
from hardpoint_testing_torch.tiny_models import TinyModel, make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer

__all__ = ["MAX_BFLOAT16_ERROR", "MODES", "TENSOR_PARALLEL", "EngineParity", "ParityCase"]

MODES = ("prefill", "chunk", "decode", "batch", "prefix", "preempt", "tp2", "bfloat16")
MAX_BFLOAT16_ERROR = 3e-2
SETTINGS: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_seqs": 4,
    "max_num_batched_tokens": 256,
    "num_kv_blocks": 2000,
    "prefix_caching": False,
}
TENSOR_PARALLEL: Mapping[str, Any] = {"tensor_parallel_size": 2, "executor": "multiproc"}


@dataclass(frozen=True, slots=True)
class ParityCase:
    """A configuration of an architecture to compare.

    Attributes:
        architecture: the name in ``config.json``, which is that of the plugin and of the class in ``transformers``.
        config: fields that differ from ``TINY_SIZES``.
        name: tells the configurations of one architecture apart.
        settings: of the engine, where the architecture needs other ones.
        plugins: options of plugins by kind and name, for one mode, or for all of them under ``""``.
        skipped: mode to the reason why it does not apply.
        limits: mode to the largest error allowed, where that is not the usual one.
        double_oracle: judge a model that generates by ``transformers`` in float64, where it loses digits in float32.
    """

    architecture: str
    config: Mapping[str, Any] = field(default_factory=dict)
    name: str = "plain"
    block_size: int = 4
    settings: Mapping[str, Any] = field(default_factory=dict)
    plugins: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    skipped: Mapping[str, str] = field(default_factory=dict)
    limits: Mapping[str, float] = field(default_factory=dict)
    double_oracle: bool = False


class EngineParity(ABC):
    """One case beside its oracle; the checkpoint is made in ``folder``."""

    def __init__(self, case: ParityCase, folder: Path, *, seed: int = 0) -> None:
        self.case = case
        self._folder = folder
        self._seed = seed
        self._random = random.Random()
        self._tiny = self._checkpoint(torch.float32)

    @abstractmethod
    def runs(self) -> Mapping[str, Callable[[], ModeResult]]:
        """How each of the modes that make sense for the model is computed and compared."""

    def run(self, mode: str) -> ModeResult:
        """Compute and compare in one of ``MODES``. Raises ``ValueError`` for any other."""
        if mode not in MODES:
            raise ValueError(f"mode {mode!r} is unknown; there are {', '.join(MODES)}")
        if mode in self.case.skipped:
            return ModeResult(mode, note=self.case.skipped[mode])
        # The same prompts whichever modes were run before.
        self._random = random.Random(f"{self._seed} {mode}")
        found = self.runs().get(mode)
        return ModeResult(mode, note=self.why_not) if found is None else found()

    why_not = "the model cannot be computed that way"

    def limit(self, mode: str, usual: float) -> float:
        return self.case.limits.get(mode, usual)

    def _checkpoint(self, dtype: torch.dtype) -> TinyModel:
        folder = self._folder / str(dtype).removeprefix("torch.")
        folder.mkdir(parents=True)
        tiny = make_tiny_model(self.case.architecture, folder, seed=self._seed, dtype=dtype, **self.case.config)
        write_tiny_tokenizer(folder, tiny.info.vocab_size)
        return replace(tiny, oracle=DoubleOracle(tiny.oracle)) if self.case.double_oracle else tiny

    @contextmanager
    def _engine(self, mode: str, tiny: TinyModel | None = None, **changes: Any) -> Iterator[LLM]:
        tiny = tiny if tiny is not None else self._tiny
        settings = {**SETTINGS, "block_size": self.case.block_size, **self.case.settings, **changes}
        # Validated from plain values, as a file would be.
        document = {
            "engines": {"tiny": EngineConfig.sections(str(tiny.folder), **settings)},
            "server": {"max_logprobs": tiny.info.vocab_size},
            "plugins": self.case.plugins.get(mode, self.case.plugins.get("", {})),
        }
        with LLM.from_config(AppConfig.model_validate(document)) as llm:
            yield llm

    def _prompts(self, *lengths: int) -> list[list[int]]:
        size = self._tiny.info.vocab_size
        return [[self._random.randrange(size) for _ in range(length)] for length in lengths]

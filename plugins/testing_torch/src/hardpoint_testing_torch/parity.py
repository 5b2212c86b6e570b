"""Does a model plugin compute what Hugging Face computes on the same weights?

    tiny = make_tiny_model("LlamaForCausalLM", tmp_path, num_key_value_heads=1)
    check_parity(tiny, create_llama, ReferenceBackend())

With ``loader=installed_loader("safetensors")`` the saved folder goes through the real loader instead of memory.
Each check feeds the same tokens in another way; logits must agree within ``MAX_RELATIVE_ERROR`` of the largest one.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import torch

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.model_source import WeightLoader
from hardpoint_testing_torch.local_driver import LocalDriver, ModelFactory, build_model, worker_config
from hardpoint_testing_torch.parity_report import MAX_RELATIVE_ERROR, ModeResult, ParityReport
from hardpoint_testing_torch.state_dict_loader import StateDictLoader
from hardpoint_testing_torch.tiny_models import ModelCheckpoint

__all__ = ["MAX_RELATIVE_ERROR", "TIE_GAP", "ParityHarness", "check_parity", "measure_parity", "relative_error"]

TIE_GAP = 1e-4
"""Greedy tokens may differ where the oracle's two best logits are closer than this share of the logit range."""


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Largest deviation over the largest expected magnitude; infinite if anything is not finite."""
    if not bool(torch.isfinite(actual).all()):
        return float("inf")
    return float((actual - expected).abs().max() / expected.abs().max())


class ParityHarness:
    """One model under test beside its oracle."""

    def __init__(
        self,
        tiny: ModelCheckpoint,
        factory: ModelFactory,
        backend: AttentionBackend,
        *,
        loader: WeightLoader | None = None,
        block_size: int = 4,
        seed: int = 0,
    ) -> None:
        self.tiny = tiny
        self.block_size = block_size
        self._random = random.Random(seed)
        info = tiny.info if loader is None else loader.describe(tiny.info.artifact)
        config = worker_config(info, block_size=block_size)
        loader = loader if loader is not None else StateDictLoader(tiny.tensors())
        self.model, self.toolkit = build_model(factory, loader, config, backend)
        self.driver = LocalDriver(self.model, self.toolkit, seed=seed)

    def prompt(self, length: int) -> list[int]:
        return [self._random.randrange(self.tiny.info.vocab_size) for _ in range(length)]

    def prefill(self, length: int = 45) -> float:
        """Relative logit error of a prompt in one step."""
        prompt = self.prompt(length)
        logits = self.driver.step({"prefill": prompt})["prefill"]
        self.driver.free("prefill")
        return relative_error(logits, self.tiny.logits(prompt))

    def chunked(self, lengths: tuple[int, ...] = (1, 3, 4, 17, 2, 19)) -> float:
        """The prompt in chunks of ``lengths``, with padding behind each step."""
        prompt = self.prompt(sum(lengths))
        parts, begin = [], 0
        for length in lengths:
            step = self.driver.step({"chunked": prompt[begin : begin + length]}, num_padding=length % 3)
            parts.append(step["chunked"])
            begin += length
        self.driver.free("chunked")
        return relative_error(torch.cat(parts), self.tiny.logits(prompt))

    def decode(self, prompt_length: int = 5, count: int = 20) -> float:
        """The prompt in one step, then one given token at a time."""
        return self.chunked((prompt_length, *(1,) * count))

    def batched(self, lengths: tuple[int, ...] = (30, 7, 18, 1)) -> float:
        """Several prompts at once, in random chunks that start and end at different steps; whole ones of encoders."""
        prompts = {f"batched-{index}": self.prompt(length) for index, length in enumerate(lengths)}
        logits: dict[str, list[torch.Tensor]] = {name: [] for name in prompts}
        while len(waiting := [n for n, p in prompts.items() if self.driver.num_computed(n) < len(p)]):
            chosen = self._random.sample(waiting, self._random.randint(1, len(waiting)))
            chunks = {}
            for name in chosen:
                done = self.driver.num_computed(name)
                size = self._random.choice((1, 1, 2, 5, 20)) if self.driver.takes_chunks else len(prompts[name])
                chunks[name] = prompts[name][done : done + size]
            for name, part in self.driver.step(chunks, num_padding=self._random.randint(0, 3)).items():
                logits[name].append(part)
        for name in prompts:
            self.driver.free(name)
        return max(
            relative_error(torch.cat(logits[name]), self.tiny.logits(prompt)) for name, prompt in prompts.items()
        )

    def prefix(self, num_shared: int = 24, lengths: tuple[int, ...] = (5, 9)) -> float:
        """Prompts that begin like one computed before, whose blocks they share; that one goes while they are used."""
        num_shared -= num_shared % self.block_size
        first = self.prompt(num_shared + 3)
        self.driver.step({"owner": first})
        prompts = {f"shared-{index}": first[:num_shared] + self.prompt(length) for index, length in enumerate(lengths)}
        for name in prompts:
            self.driver.share(name, "owner", num_shared)
        self.driver.free("owner")
        logits = self.driver.step({name: prompt[num_shared:] for name, prompt in prompts.items()})
        for name in prompts:
            self.driver.free(name)
        return max(
            relative_error(logits[name], self.tiny.logits(prompt)[num_shared:]) for name, prompt in prompts.items()
        )

    def preempted(self, lengths: tuple[int, ...] = (19, 30)) -> float:
        """Prompts that lose their blocks half-way and are computed again, in other chunks and other blocks."""
        prompts = {f"preempted-{index}": self.prompt(length) for index, length in enumerate(lengths)}
        self.driver.step({name: prompt[: len(prompt) // 2] for name, prompt in prompts.items()})
        for name in reversed(prompts):
            self.driver.free(name)
        logits = {name: [part] for name, part in self.driver.step({n: p[:-3] for n, p in prompts.items()}).items()}
        for name, part in self.driver.step({n: p[-3:] for n, p in prompts.items()}).items():
            logits[name].append(part)
        for name in prompts:
            self.driver.free(name)
        return max(
            relative_error(torch.cat(logits[name]), self.tiny.logits(prompt)) for name, prompt in prompts.items()
        )

    def greedy_differences(self, count: int = 64, lengths: tuple[int, ...] = (6, 1, 11)) -> int:
        """Prompts generated together; differing tokens that no near-tie of the oracle excuses."""
        prompts = {f"greedy-{index}": self.prompt(length) for index, length in enumerate(lengths)}
        pending = dict(prompts)
        generated: dict[str, list[int]] = {name: [] for name in prompts}
        for _ in range(count):
            for name, logits in self.driver.step(pending).items():
                pending[name] = [int(logits[-1].argmax())]
                generated[name] += pending[name]
        for name in prompts:
            self.driver.free(name)
        return sum(self._unexcused(prompt, generated[name]) for name, prompt in prompts.items())

    def _unexcused(self, prompt: list[int], generated: list[int]) -> int:
        # Teacher-forced on our own tokens, so that one near-tie does not make everything after it differ.
        logits = self.tiny.logits(prompt + generated[:-1])[len(prompt) - 1 :]
        best = logits.topk(2, dim=-1)
        gap = (best.values[:, 0] - best.values[:, 1]) / (logits.amax(-1) - logits.amin(-1))
        differs = best.indices[:, 0] != torch.tensor(generated)
        return int((differs & (gap > TIE_GAP)).sum())


def check_parity(
    tiny: ModelCheckpoint,
    factory: ModelFactory,
    backend: AttentionBackend,
    *,
    loader: WeightLoader | None = None,
    block_size: int = 4,
) -> ParityReport:
    """Every check, which must find nothing. Raises ``AssertionError`` naming the ones over the limit."""
    report = measure_parity(tiny, factory, backend, loader=loader, block_size=block_size)
    report.require_ok()
    return report


def measure_parity(
    tiny: ModelCheckpoint,
    factory: ModelFactory,
    backend: AttentionBackend,
    *,
    loader: WeightLoader | None = None,
    block_size: int = 4,
) -> ParityReport:
    """Every check, whatever it finds."""
    harness = ParityHarness(tiny, factory, backend, loader=loader, block_size=block_size)
    modes: dict[str, Callable[[], float]] = {
        "prefill": harness.prefill,
        "chunk": harness.chunked,
        "decode": harness.decode,
        "batch": harness.batched,
        "prefix": harness.prefix,
        "preempt": harness.preempted,
    }
    if not harness.driver.takes_chunks:
        modes = {mode: modes[mode] for mode in ("prefill", "batch")}
    elif not harness.driver.shares_prefixes:
        del modes["prefix"]
    results = [ModeResult(mode, run()) for mode, run in modes.items()]
    if "generate" in tiny.info.tasks:
        results.append(ModeResult("greedy", 0.0, num_differences=harness.greedy_differences()))
    return ParityReport(tiny.info.architecture, "in memory", tuple(results))

"""Rules of attention backends: what they say of themselves, and that it holds."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, BlockSizeRule
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import PluginDeclaration, ProbeResult, ProbeStatus
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.attention_suite_base import MIXED, AttentionRules, variant

__all__ = ["AttentionAnswerRules"]

BLOCK_SIZES_CAPABILITY = "block_sizes"

STRANGE_NEEDS: Mapping[str, Mapping[str, Any]] = {
    "a dtype nobody has": {"dtype": "float3_of_nobody", "kv_cache_dtype": "float3_of_nobody"},
    "a KV dtype nobody has": {"kv_cache_dtype": "float3_of_nobody"},
    "heads that do not divide": {"num_heads": 5, "num_kv_heads": 2},
}
"""Nobody can compute these, so accepting one of them means not to have looked."""

RARE_NEEDS: Mapping[str, Mapping[str, Any]] = {
    "a device nobody has": {"device": DeviceDescription(device_type="abacus", name="an abacus")},
    "latent attention": {"uses_mla": True},
    "cross-attention": {"kind": AttentionKind.ENCODER_DECODER},
    "an 8-bit cache": {"kv_cache_dtype": "float8_e4m3fn"},
    "a head size of 3": {"head_size": 3},
    "head size 1024": {"head_size": 1024},
    "no block size yet": {"block_size": None},
    "batch invariance": {"batch_invariant": True},
    "sparse attention": {"uses_sparse": True},
    "contexts dealt out among ranks": {"dcp_size": 4},
    "log-sum-exps": {"needs_lse": True},
}

CHOICES: Mapping[str, tuple[Any, ...]] = {
    "num_heads": (4, 8),
    "num_kv_heads": (1, 2, 4),
    "head_size": (16, 24, 64),
    "block_size": (4, 16),
    "dtype": (torch.float32, torch.float32, torch.bfloat16, torch.float16),
    "kv_cache_dtype": (None, None, None, "fp8", "fp8_e5m2", "int8_per_token_head", "float16"),
    "sliding_window": (None, None, 3, 9),
    "chunk_size": (None, None, 5),
    "keeps_prompt": (False, False, True),
    "logits_soft_cap": (None, 4.0),
    "uses_alibi": (False, False, True),
    "uses_sinks": (False, True),
    "uses_mm_prefix": (False, False, True),
    "uses_row_causality": (False, False, False, True),
    "per_head_scales": (False, True),
    "kind": (*[AttentionKind.DECODER] * 6, AttentionKind.ENCODER_ONLY, *[AttentionKind.ENCODER_DECODER] * 2),
}
"""What combinations are drawn from; what is seldom accepted comes less often."""

ALONE = [(0, 9), (0, 1), (0, 4)]
"""Rows of layers that have only a step's own tokens."""


class AttentionAnswerRules(AttentionRules):
    @pytest.mark.parametrize("seed", range(3))
    def test_whatever_is_accepted_is_computed(self, backend: AttentionBackend, base: AttentionShape, seed: int) -> None:
        """I5.3, R5.5, R5.12: combinations of all that can be asked for. No reason given means a correct answer."""
        draw = random.Random(seed)
        for _ in range(40):
            drawn = {name: draw.choice(values) for name, values in CHOICES.items()}
            if not sensible(drawn):
                continue
            shape = variant(base, **drawn, causal=drawn["kind"] is AttentionKind.DECODER)
            rows = MIXED if shape.has_cache else ALONE
            if not backend.block_sizes(self.need(shape)).accepts(shape.block_size):
                # Else a backend that takes neither of the sizes would never be asked to compute.
                shape = variant(shape, block_size=base.block_size)
            takes_blocks = backend.block_sizes(self.need(shape)).accepts(shape.block_size)
            if takes_blocks and self.reason(backend, self.need(shape)) is None:
                self.check(backend, self.problem(shape, rows, seed))

    def test_it_declares_the_block_sizes_it_takes(
        self, backend: AttentionBackend, base: AttentionShape, declaration: PluginDeclaration
    ) -> None:
        """The launcher aligns blocks by the declaration, the worker by the backend: both must say the same."""
        stated = declaration.capabilities.get(BLOCK_SIZES_CAPABILITY)
        if stated is None:
            pytest.skip(f"{backend.name} declares no {BLOCK_SIZES_CAPABILITY!r}; the launcher then leaves it out")
        declared = BlockSizeRule(stated.get("multiple_of"), tuple(stated.get("exact", ())))
        real = backend.block_sizes(self.need(base))
        differ = [size for size in range(1, 513) if declared.accepts(size) != real.accepts(size)]
        assert not differ, f"declared: {declared}; block_sizes(): {real}; they differ for {differ[:8]}"

    def test_it_declares_what_it_can_do(
        self, backend: AttentionBackend, base: AttentionShape, declaration: PluginDeclaration
    ) -> None:
        """Capabilities that doctor shows agree with the answers, in both directions."""
        declared = declaration.capabilities
        answers: dict[str, Any] = {
            "returns_lse": backend.returns_lse,
            "kv_write_mode": str(backend.kv_write_mode),
            "batch_invariant": self.reason(backend, self.need(base, batch_invariant=True)) is None,
            "kinds": [str(kind) for kind in AttentionKind if self.reason(backend, self.need(base, kind=kind)) is None],
            "mla": self.reason(backend, self.need(base, num_kv_heads=1, uses_mla=True)) is None,
        }
        for key in answers.keys() & declared.keys():
            stated = sorted(declared[key]) if key == "kinds" else declared[key]
            real = sorted(answers[key]) if key == "kinds" else answers[key]
            assert stated == real, f"capability {key!r} is declared as {stated}, the backend answers {real}"

    @pytest.mark.parametrize("name", STRANGE_NEEDS)
    def test_impossible_needs_are_refused(self, backend: AttentionBackend, base: AttentionShape, name: str) -> None:
        """R5.5: refusing at start is what keeps an unsupported combination out of the first forward."""
        reason = self.reason(backend, self.need(base, **STRANGE_NEEDS[name]))
        assert reason is not None, f"{backend.name} accepts {name}"

    @pytest.mark.parametrize("name", RARE_NEEDS)
    def test_rare_needs_get_an_answer(self, backend: AttentionBackend, base: AttentionShape, name: str) -> None:
        """None or a reason, the same each time."""
        need = self.need(base, **RARE_NEEDS[name])
        assert self.reason(backend, need) == self.reason(backend, need), "refuse() is no pure function of its argument"

    def test_its_probe_answers(self, declaration: PluginDeclaration) -> None:
        """Available, absent or broken, with a reason; asking twice changes nothing."""
        if declaration.probe is None:
            pytest.skip("the backend declares no probe: it is taken to be available")
        answer = declaration.probe()
        assert isinstance(answer, ProbeResult), f"probe() answers {answer!r}"
        assert answer.reason.strip(), "a probe gives a reason, also for being available"
        assert declaration.probe().status is answer.status
        assert answer.status is not ProbeStatus.BROKEN, answer.reason

    def test_impossible_head_counts_are_refused(self, backend: AttentionBackend, base: AttentionShape) -> None:
        """R5.12: a reason for people, not an exception."""
        reason = self.reason(backend, self.need(variant(base, num_heads=5, num_kv_heads=2)))
        assert reason is not None
        assert "5" in reason


def sensible(drawn: Mapping[str, Any]) -> bool:
    """Whether a model might ask for this: ALiBi, ranges and kept prompts are for causal rows, which are a decoder's."""
    for_causal_rows = drawn["uses_alibi"] or drawn["uses_mm_prefix"] or drawn["keeps_prompt"]
    if drawn["uses_row_causality"] and for_causal_rows:
        return False
    if drawn["kind"] is not AttentionKind.DECODER and (drawn["uses_row_causality"] or for_causal_rows):
        return False
    if drawn["keeps_prompt"] and (drawn["sliding_window"] is None or drawn["chunk_size"] is not None):
        return False
    return not drawn["per_head_scales"] or drawn["kv_cache_dtype"] in ("fp8", "fp8_e5m2")

"""What the Triton backend accepts, on devices that need not be there."""

from __future__ import annotations

import sys
from dataclasses import replace
from typing import Any

import pytest

import hardpoint_attention.triton as package
from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import AttentionKind, AttentionLayerParams, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import PluginContext, ProbeStatus, declaration_of
from hardpoint_attention.triton import TritonBackend, TritonOptions, backend, create, impl
from hardpoint_attention.triton.capabilities import refuse
from hardpoint_attention.triton.planning import plan_fast

A100 = DeviceDescription(device_type="cuda", name="A100", capability=(8, 0))
H200 = DeviceDescription(device_type="cuda", name="H200", capability=(9, 0))
TURING = DeviceDescription(device_type="cuda", name="T4", capability=(7, 5))
MI300 = DeviceDescription(device_type="rocm", name="MI300X", capability=(9, 4))
CPU = DeviceDescription(device_type="cpu", name="cpu")
PLAIN = AttentionNeed(
    num_heads=32, num_kv_heads=8, head_size=128, dtype="bfloat16", kv_cache_dtype="bfloat16", device=H200
)

ACCEPTED: dict[str, dict[str, Any]] = {
    "plain": {},
    "an older device": {"device": A100},
    "an AMD device": {"device": MI300},
    "float32": {"dtype": "float32", "kv_cache_dtype": "float32"},
    "a cache as the layers say": {"kv_cache_dtype": "auto"},
    "no cache dtype that it knows, and no cache": {"kv_cache_dtype": "other", "kind": AttentionKind.ENCODER_ONLY},
    "fp8": {"kv_cache_dtype": "fp8"},
    "fp8 on AMD": {"kv_cache_dtype": "fp8", "device": MI300},
    "fp8 with a scale per head": {"kv_cache_dtype": "fp8", "per_head_scales": True},
    "fp8 on a device that has no such type": {"kv_cache_dtype": "fp8", "device": A100},
    "fp8 of two bits on an older device": {"kv_cache_dtype": "fp8_e5m2", "device": A100},
    "int8": {"kv_cache_dtype": "int8_per_token_head", "device": A100},
    "head size 80": {"head_size": 80},
    "head size 256": {"head_size": 256},
    "any block size": {"block_size": 7},
    "latents": {"uses_mla": True, "num_kv_heads": 1, "head_size": 576},
    "sinks on an older device": {"uses_sinks": True, "device": A100},
    "fp8 with multimodal prefixes": {"uses_mm_prefix": True, "kv_cache_dtype": "fp8"},
    "R-SWA": {"sliding_window": 128, "keeps_prompt": True},
    "everything at once": {
        "sliding_window": 128,
        "logits_soft_cap": 30.0,
        "uses_alibi": True,
        "uses_sinks": True,
        "chunk_size": 512,
        "uses_mm_prefix": True,
        "uses_row_causality": True,
        "needs_lse": True,
    },
    "encoders": {"kind": AttentionKind.ENCODER},
    "cross-attention": {"kind": AttentionKind.ENCODER_DECODER},
}
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "a device that is too old": ({"device": TURING}, "needs? compute capability 8.0, T4 has 7.5"),
    "another device": ({"device": DeviceDescription(device_type="xpu", name="x")}, "not for xpu"),
    "the CPU": ({"device": CPU}, "TRITON_INTERPRET=1"),
    "another dtype": ({"dtype": "float64"}, "float64 is not one of"),
    "another cache": ({"kv_cache_dtype": "uint8"}, "uint8 is none of"),
    "an unknown cache": ({"kv_cache_dtype": "fp3"}, "'fp3' is unknown"),
    "int8 of latents": (
        {"kv_cache_dtype": "int8_per_token_head", "uses_mla": True, "num_kv_heads": 1},
        "no place for the scales",
    ),
    "int8 of odd heads": ({"kv_cache_dtype": "int8_per_token_head", "head_size": 3}, "not be aligned"),
    "heads that do not divide": ({"num_heads": 5, "num_kv_heads": 2}, "5 query heads"),
    "large heads": ({"head_size": 257}, "above 256"),
    "large latents": ({"head_size": 1024, "uses_mla": True, "num_kv_heads": 1}, "above 640"),
    "latents by head": ({"uses_mla": True}, "one latent"),
    "latents of an encoder": ({"uses_mla": True, "num_kv_heads": 1, "kind": AttentionKind.ENCODER}, "reads a cache"),
    "windows across": ({"kind": AttentionKind.ENCODER_DECODER, "sliding_window": 4}, "cross-attention"),
    "causality by row across": ({"kind": AttentionKind.ENCODER_DECODER, "uses_row_causality": True}, "see all keys"),
    "prompts in chunks": ({"keeps_prompt": True, "sliding_window": 4, "chunk_size": 8}, "contradicts"),
    "prompts without a window": ({"keeps_prompt": True}, "there is none"),
    "prompts of an encoder": (
        {"keeps_prompt": True, "sliding_window": 4, "kind": AttentionKind.ENCODER},
        "for decoders",
    ),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_is_accepted(name: str) -> None:
    """R5.10 to R5.16: dtypes, quantized caches and combinations, from a fabricated device."""
    assert refuse(replace(PLAIN, **ACCEPTED[name]), is_interpreted=False) is None


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_and_why(name: str) -> None:
    """R5.12: a reason for people."""
    changes, reason = REFUSED[name]
    with pytest.raises(ValueError, match=reason):
        raise ValueError(refuse(replace(PLAIN, **changes), is_interpreted=False))


def test_the_interpreter_computes_on_any_device() -> None:
    for device in (CPU, H200, MI300):
        assert refuse(replace(PLAIN, device=device), is_interpreted=True) is None


def test_needs_it_does_not_know_are_refused() -> None:
    """R5.5: what a later version asks for cannot be computed by accident."""
    assert "dcp_size" in str(TritonBackend().objection(replace(PLAIN, dcp_size=2)))
    assert "uses_sparse" in str(TritonBackend().objection(replace(PLAIN, uses_sparse=True)))


def test_batch_invariance_is_decided_when_it_is_made() -> None:
    """R5.33."""
    asked = replace(PLAIN, batch_invariant=True, device=CPU)
    assert TritonBackend(fixed=True, plan=plan_fast).refuse(asked) is None
    assert "--batch-invariant" in str(TritonBackend().refuse(asked))


def test_an_unknown_cascade_policy_is_an_error() -> None:
    """R5.82: the decision is replaceable, by a name that exists."""
    with pytest.raises(ConfigError, match="cascade policy 'sometimes' is unknown"):
        TritonBackend(TritonOptions(cascade="sometimes"))


def test_the_factory_and_its_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    declaration = declaration_of(create)
    assert declaration is not None
    assert declaration.probe is not None
    assert declaration.options is TritonOptions
    assert declaration.probe().status is ProbeStatus.AVAILABLE
    made = create(PluginContext(name="triton", api_version=1, roles=frozenset()), TritonOptions())
    assert (made.name, made.returns_lse) == ("triton", True)
    monkeypatch.setattr(backend, "find_spec", lambda name: None)
    absent = declaration.probe()
    assert absent.status is ProbeStatus.ABSENT
    assert "pip install 'hardpoint-attention[triton]'" in absent.reason


@pytest.mark.parametrize(("value", "answer"), [("", False), ("0", False), ("1", True), ("true", True)])
def test_the_variable_is_read_as_triton_reads_it(monkeypatch: pytest.MonkeyPatch, value: str, answer: bool) -> None:
    monkeypatch.setenv("TRITON_INTERPRET", value)
    assert backend.is_interpreted() is answer


def test_a_layer_that_keeps_prompts_needs_to_know_them() -> None:
    params = AttentionLayerParams("a", 2, 1, 8, 1.0, sliding_window=4, keeps_prompt=True)
    assert TritonBackend().create_impl(params) is not None


def test_a_damaged_triton_is_named_with_what_to_change(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "hardpoint_attention.triton.launch", raising=False)
    monkeypatch.delattr(package, "launch", raising=False)
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(ConfigError, match=r"ModuleNotFoundError: .*triton.*; install .* anew, .* --attention-backend"):
        impl._launch()

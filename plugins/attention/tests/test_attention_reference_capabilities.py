"""What the reference backend accepts, as a table (R5.12, R5.16), and its manifest."""

from __future__ import annotations

import itertools
import json
from importlib import resources
from typing import Any

import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import AttentionKind, AttentionNeed, GraphSupport, KVWriteMode
from hardpoint.interfaces.kv_cache import FullAttentionSpec
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import PluginContext, ProbeStatus, declaration_of
from hardpoint_attention.reference import ReferenceBackend, ReferenceOptions, create

CPU = DeviceDescription(device_type="cpu", name="cpu")
CUDA = DeviceDescription(device_type="cuda", name="gpu", capability=(9, 0))


def need(**changes: Any) -> AttentionNeed:
    given: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "device": CPU,
    }
    return AttentionNeed(**{**given, **changes})


FEATURES: list[dict[str, Any]] = [
    {},
    {"sliding_window": 7},
    {"logits_soft_cap": 30.0},
    {"uses_sinks": True},
    {"uses_alibi": True},
    {"uses_mla": True, "num_kv_heads": 1},
    {"chunk_size": 64},
    {"sliding_window": 7, "keeps_prompt": True},
    {"uses_mm_prefix": True},
    {"uses_row_causality": True},
    {"per_head_scales": True, "needs_lse": True},
    {"uses_relative_bias": True, "sliding_window": 7},
    {"uses_sparse": True},
    {"uses_sparse": True, "uses_mla": True, "num_kv_heads": 1},
    {"uses_sparse": True, "sliding_window": 7, "uses_sinks": True, "uses_mm_prefix": True},
    {"kind": AttentionKind.ENCODER_DECODER},
    {"kind": AttentionKind.ENCODER},
]
STORED = ("auto", "float32", "bfloat16", "fp8", "float8_e5m2", "int8_per_token_head")
ACCEPTED = [
    {"dtype": dtype, "kv_cache_dtype": stored, "head_size": head_size, "device": device, **feature}
    for dtype, stored, head_size, device, feature in itertools.product(
        ("float32", "bfloat16", "float16"),
        ("auto", "float32", "bfloat16", "fp8", "float8_e5m2", "int8_per_token_head"),
        (8, 256),
        (CPU, CUDA),
        FEATURES,
    )
]


def test_accepted() -> None:
    """R5.12, R5.16: every combination of these."""
    refused = [(changes, reason) for changes in ACCEPTED if (reason := ReferenceBackend().objection(need(**changes)))]
    assert not refused


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("feature", [{}, {"uses_sinks": True}, {"uses_mla": True, "num_kv_heads": 1}], ids=str)
def test_contexts_are_dealt_out_where_caches_keep_what_was_computed_with(dtype: str, feature: dict[str, Any]) -> None:
    """R5.12, I5.2: a step's own tokens are seen before they are stored, so that storing must not change them."""
    for stored in STORED:
        wanted = need(dtype=dtype, kv_cache_dtype=stored, dcp_size=4, needs_lse=True, **feature)
        reason = ReferenceBackend().objection(wanted)
        assert (reason is None) == (stored in ("auto", dtype)), f"{stored}: {reason}"
        assert reason is None or f"4 ranks do not go with a KV cache of {stored}" in reason


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"dtype": "float64"}, "dtype float64"),
        ({"kv_cache_dtype": "int8"}, "KV cache dtype int8"),
        ({"kv_cache_dtype": "acme_fp3"}, "KV cache dtype acme_fp3 is not one of auto, float32"),
        ({"uses_sparse": True, "kind": AttentionKind.ENCODER}, "(sparse attention) among those of a decoder"),
        ({"uses_sparse": True, "dcp_size": 2}, "2 ranks do not go with keys that an index selects"),
        ({"keeps_prompt": True, "sliding_window": 4, "chunk_size": 8}, "keeps_prompt) contradicts"),
        ({"dcp_size": 2, "sliding_window": 4, "uses_alibi": True}, "2 ranks do not go with a sliding window and ALiBi"),
        ({"dcp_size": 2, "chunk_size": 4}, "chunks"),
        ({"dcp_size": 2, "uses_mm_prefix": True}, "bidirectional ranges"),
        ({"dcp_size": 2, "kind": AttentionKind.ENCODER_ONLY}, "attention kind encoder_only"),
        ({"num_heads": 5}, "5 query heads"),
        ({"uses_mla": True}, "MLA) has one latent that all heads share, not 2"),
        ({"uses_mla": True, "num_kv_heads": 1, "kind": AttentionKind.ENCODER_ONLY}, "MLA) reads a cache"),
        ({"batch_invariant": True}, "batch-invariant"),
        ({"uses_alibi": True, "kind": AttentionKind.ENCODER_ONLY}, "ALiBi"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    answer = ReferenceBackend().objection(need(**changes))
    assert answer is not None
    assert reason in answer


def test_declarations() -> None:
    backend = ReferenceBackend()
    assert backend.block_sizes(need()).accepts(1)
    assert backend.block_sizes(need()).accepts(48)
    assert backend.kv_write_mode is KVWriteMode.SEPARATE
    spec = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32")
    builder = backend.create_builder(spec, ["a"], 4, 16, torch.device("cpu"))
    assert builder.graph_support is GraphSupport.NEVER
    assert builder.reorder_threshold is None


def test_the_factory_and_its_probe() -> None:
    declaration = declaration_of(create)
    assert declaration is not None
    assert declaration.kind == "attention_backend"
    assert declaration.probe is not None
    assert declaration.probe().status is ProbeStatus.AVAILABLE
    context = PluginContext(name="torch_reference", api_version=1, roles=frozenset())
    assert create(context, ReferenceOptions()).name == "torch_reference"


def test_an_unknown_cascade_policy_is_refused() -> None:
    """R5.82: replaceable by an option, whose value must mean something."""
    context = PluginContext(name="torch_reference", api_version=1, roles=frozenset())
    with pytest.raises(ConfigError, match="'sometimes'.*always, estimate, never"):
        create(context, ReferenceOptions(cascade="sometimes"))


def test_the_manifest_says_what_the_code_says() -> None:
    text = resources.files("hardpoint_attention").joinpath("hardpoint.json").read_text(encoding="utf-8")
    entry = json.loads(text)["plugins"]["attention_backend"]["torch_reference"]
    declaration = declaration_of(create)
    assert declaration is not None
    assert entry["options"] == declaration.options.model_json_schema()
    assert entry["capabilities"] == declaration.capabilities

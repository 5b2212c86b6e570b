"""Every refusal names what is not served."""

from __future__ import annotations

from typing import Any

import pytest
from numpy_attention import NumpyBackend

from hardpoint.interfaces import AttentionKind, AttentionNeed, DeviceDescription

CPU = DeviceDescription(device_type="cpu", name="cpu")


def need(**changes: Any) -> AttentionNeed:
    fields: dict[str, Any] = {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "device": CPU}
    return AttentionNeed(**{**fields, "dtype": "float32", "kv_cache_dtype": "float32", **changes})


def test_plain_decoders_are_served() -> None:
    assert NumpyBackend().refuse(need()) is None
    assert NumpyBackend().refuse(need(sliding_window=4)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": DeviceDescription(device_type="cuda", name="any")}, "not on cuda"),
        ({"dtype": "bfloat16"}, "not bfloat16"),
        ({"kv_cache_dtype": "fp8_e4m3"}, "a cache of fp8_e4m3"),
        ({"kind": AttentionKind.ENCODER}, "only decoders"),
        ({"num_kv_heads": 3}, "cannot be shared out"),
        ({"logits_soft_cap": 30.0, "uses_sinks": True}, "soft caps, sinks"),
    ],
)
def test_refusals_give_the_reason(changes: dict[str, Any], reason: str) -> None:
    assert reason in (NumpyBackend().refuse(need(**changes)) or "")

"""Descriptions of devices: what is understood, and what is said of everything else."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import msgspec
import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import DeviceDescription, LogicalDevice, Platform
from hardpoint.testing.doctor_attention import (
    AttentionDecision,
    CandidateAnswer,
    LayersNeed,
    WorkerAnswer,
    _lines,
    _settings,
)
from hardpoint.testing.doctor_device import described_on, parse_device
from hardpoint.testing.doctor_text import painter
from hardpoint.testing.fake_platform import FakePlatform, FakePlatformOptions

GIB = 1 << 30


@pytest.mark.parametrize(
    ("text", "platform", "capability", "memory", "features"),
    [
        ("cuda sm_90 80GiB", "cuda", (9, 0), 80 * GIB, {"sm_90"}),
        ("cuda  sm_100a  180GiB", "cuda", (10, 0), 180 * GIB, {"sm_100a"}),
        ("cuda sm89 24GB", "cuda", (8, 9), 24 * 10**9, {"sm89"}),
        ("cuda sm_120 0.5TiB", "cuda", (12, 0), 512 * GIB, {"sm_120"}),
        ("rocm gfx942 192GiB", "rocm", (9, 4), 192 * GIB, {"gfx942"}),
        ("rocm gfx90a 64gib", "rocm", (9, 0), 64 * GIB, {"gfx90a"}),
        ("rocm gfx1100 24GiB", "rocm", (11, 0), 24 * GIB, {"gfx1100"}),
        ("cpu avx2 avx512_bf16 1500MiB", "cpu", None, 1500 << 20, {"avx2", "avx512_bf16"}),
        ("cpu", "cpu", None, 0, set()),
        ("acme_npu v2.1", "acme_npu", None, 0, {"v2.1"}),
    ],
)
def test_what_a_text_stands_for(
    text: str, platform: str, capability: tuple[int, int] | None, memory: int, features: set[str]
) -> None:
    """R5.16: devices for decisions are made of words."""
    device = parse_device(text)
    assert device.platform == platform
    found = device.description
    assert (found.capability, found.memory_bytes, found.features) == (capability, memory, frozenset(features))
    assert found.name == " ".join(text.split())


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", r"names no platform; write PLATFORM \[ARCHITECTURE\]"),
        ("80GiB", "names no platform"),
        ("cuda sm_90 80", "'80' is neither a feature nor a size"),
        ("cuda sm_90 80XB", "'80XB' is no size of a memory; write 80GiB, 512MiB or 24GB"),
        ("cuda sm_90 0GiB", "'0GiB' is no size"),
        ("cuda sm_90 99999999999999999999999GiB", "9GiB' is no size"),
        (f"cuda sm_90 {'9' * 400}GiB", "9GiB' is no size"),
        ("cuda sm_90 0.0001KB", "'0.0001KB' is no size"),
        ("cuda sm_90 80GiB 40GiB", "has two sizes"),
        ("cuda sm_90 sm_80", "has two architectures"),
        ("cuda sm_9", "'sm_9' is no architecture; write sm_ followed by the compute capability without its dot"),
        (f"cuda sm_{'9' * 5000}", "9' is no architecture"),
        ("rocm gfx94", "'gfx94' is no architecture; .* or gfx followed by major, minor and stepping"),
        ("cuda sm_90 a/b", "'a/b' is neither a feature nor a size"),
    ],
)
def test_what_is_said_of_everything_else(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_device(text)


class ByMemory(FakePlatform):
    """Decides by what its devices are."""

    def __init__(self, memory: int = 1, count: int = 1) -> None:
        super().__init__(FakePlatformOptions(num_devices=count, memory_bytes=memory))

    def with_device(self, device: DeviceDescription, count: int) -> Platform:
        return ByMemory(device.memory_bytes, count)

    def attention_candidates(self) -> Sequence[str]:
        return ("large",) if self.options.memory_bytes > GIB else ("small",)


def test_a_platform_decides_by_the_described_device() -> None:
    here = ByMemory()
    made, device = described_on(here, parse_device("fake 2GiB").description, 3)
    assert (tuple(here.attention_candidates()), tuple(made.attention_candidates())) == (("small",), ("large",))
    assert made.describe(LogicalDevice(2)).name == "fake-2", "as many as ranks"
    assert (device.name, device.memory_bytes) == ("fake 2GiB", 2 * GIB)
    assert device.features == frozenset({"graphs"}), "the platform knows what else such devices have"


def test_other_platforms_decide_as_they_are() -> None:
    here = FakePlatform()
    made, device = described_on(here, parse_device("fake turbo 2GiB").description, 1)
    assert made is here
    assert (device.device_type, device.features) == (FakePlatform.device_type, frozenset({"turbo"}))


DECISION = AttentionDecision(
    model="m",
    architecture="A",
    platform="fake",
    worker="torch",
    device=DeviceDescription(device_type="cpu", name="fake 2GiB", capability=(1, 2), memory_bytes=2 * GIB),
    settings={"dtype": "bfloat16", "attention_backend": None, "batch_invariant": False},
    answer=WorkerAnswer(
        layers=(LayersNeed(("l0", "l2"), "4/2 heads of 16"), LayersNeed(("l1",), "4/2 heads of 16, window 8")),
        candidates=(
            CandidateAnswer("quick", "refuses", "no windows"),
            CandidateAnswer("plain", "chosen"),
            CandidateAnswer("slow", "would accept"),
        ),
        chosen="plain",
        block_size=64,
        kernel_block_size=16,
        notes=("a note",),
    ),
    problems=("a problem",),
)


def test_the_decision_as_text() -> None:
    """R5.3: every candidate, with its reason."""
    assert list(_lines(DECISION, painter(False), False)) == [
        "model   m  A: dtype bfloat16",
        "device  fake 2GiB  platform fake, worker torch, capability 1.2, 2 GiB",
        "layers",
        "    2  4/2 heads of 16",
        "    1  4/2 heads of 16, window 8",
        "candidates, the best first",
        "  quick  refuses: no windows",
        "  plain  chosen",
        "  slow   would accept",
        "decision  plain, KV cache blocks of 64 tokens, which kernels read as 16",
        "note: a note",
        "problem: a problem",
    ]
    assert "       l2" in list(_lines(DECISION, painter(False), True)), "verbose: the layers by name"
    unknown = msgspec.structs.replace(DECISION, answer=None, device=None)
    assert list(_lines(unknown, painter(False), False)) == ["model   m  A: dtype bfloat16", "problem: a problem"]


def test_the_decision_as_json() -> None:
    assert msgspec.json.decode(DECISION.to_json(), type=AttentionDecision) == DECISION


def test_flags_of_the_command_are_settings_of_a_start() -> None:
    given = argparse.Namespace(
        model="m",
        setting=["kv_cache_dtype=fp8", "batch-invariant", "plugin=attention_backend.flash_attn.max_splits=1"],
        use=["attention_backend=triton"],
        config="c.yaml",
        plugins="",
        pin=["a:b=c"],
        strict_plugins=True,
    )
    assert _settings(given) == [
        *("m", "--kv-cache-dtype", "fp8", "--batch-invariant"),
        *("--plugin", "attention_backend.flash_attn.max_splits=1", "--attention-backend", "triton"),
        *("--config", "c.yaml", "--plugins", "", "--pin", "a:b=c", "--strict-plugins"),
    ]

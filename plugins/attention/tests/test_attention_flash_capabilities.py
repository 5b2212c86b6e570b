"""FlashAttention's capability answers as a table over fabricated devices and installations (R5.10 to R5.16)."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable
from importlib import resources
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from flash_double import FlashDouble
from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import AttentionKind, AttentionNeed, BlockSizeRule
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import ProbeStatus, declaration_of
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_attention.flash import FlashOptions, InstalledKernels, create
from hardpoint_attention.flash.capabilities import block_sizes, is_head_256_path, refuse, resolve
from hardpoint_attention.flash.generations import load_generation
from hardpoint_attention.flash.installed import installed_kernels, probe
from hardpoint_attention.flash.plugin import facts_from, facts_of
from hardpoint_testing_torch import AttentionShape, make_problem

A100, L4, H100, B200, RTX50 = (
    DeviceDescription(device_type="cuda", name=name, capability=capability)
    for name, capability in (
        ("A100", (8, 0)),
        ("L4", (8, 9)),
        ("H100", (9, 0)),
        ("B200", (10, 0)),
        ("RTX 5090", (12, 0)),
    )
)
T4 = DeviceDescription(device_type="cuda", name="T4", capability=(7, 5))
CPU = DeviceDescription(device_type="cpu", name="cpu")
MI300 = DeviceDescription(device_type="rocm", name="MI300X", capability=(9, 4))


def installed(*generations: int) -> InstalledKernels:
    return InstalledKernels({generation: f"{generation}.0" for generation in generations}, {2: 256})


ALL = installed(2, 3, 4)


def need(device: DeviceDescription = H100, **changes: Any) -> AttentionNeed:
    given: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}
    return AttentionNeed(**{**given, "kv_cache_dtype": "auto", "device": device, **changes})


FP8 = {"kv_cache_dtype": "fp8"}
WINDOWED_ENCODER = {"kind": AttentionKind.ENCODER_ONLY, "sliding_window": 64}

REFUSED: list[tuple[str, AttentionNeed, InstalledKernels, str]] = [
    ("R5.10", need(dtype="float32"), ALL, "dtype float32"),
    ("R5.10", need(kv_cache_dtype="float32"), ALL, "KV cache dtype float32"),
    ("R5.10", need(kv_cache_dtype="int8_per_token_head"), ALL, "KV cache dtype int8_per_token_head"),
    ("R5.11", need(A100, **FP8), ALL, "generation 2 reads no 8-bit cache"),
    ("R5.11", need(H100, kv_cache_dtype="fp8_e5m2"), ALL, "float8_e4m3fn, not with float8_e5m2"),
    ("R5.12", need(num_heads=7), ALL, "7 query heads"),
    ("R5.12", need(uses_mla=True), ALL, "MLA"),
    ("R5.12", need(uses_sparse=True), ALL, "sparse"),
    ("R5.12", need(CPU), ALL, "needs a CUDA device"),
    ("R5.12", need(MI300), ALL, "needs a CUDA device"),
    ("R5.13", need(A100, uses_sinks=True), ALL, "sinks need compute capability 9.0"),
    ("R5.13", need(L4, uses_sinks=True), ALL, "sinks need compute capability 9.0"),
    ("R5.13", need(H100, uses_mm_prefix=True, **FP8), ALL, "left to the Triton backend"),
    ("R5.13", need(H100, **FP8), installed(2, 4), "generation 4 reads no 8-bit cache on this device"),
    ("R5.13", need(B200, **FP8), installed(2, 3), "generation 4 is not installed"),
    ("R5.13", need(H100, uses_mm_prefix=True), installed(2, 3), "generation 3 takes no masks for multimodal prefixes"),
    ("R5.14", need(head_size=100), ALL, "head size 100 is no multiple of 8"),
    ("R5.14", need(head_size=520), ALL, "head size 520 is above 512"),
    ("R5.14", need(head_size=264), installed(2, 3), "generation 3 has no heads of 264 entries"),
    ("R5.14", need(A100, head_size=264), ALL, "generation 2 has no heads of 264 entries"),
    ("R5.14", need(T4), ALL, "7.5 is below 8.0"),
    ("R5.14", need(A100, per_head_scales=True), ALL, "generation 2 takes no scales per head"),
    ("R5.15", need(H100, block_size=24), ALL, "blocks of 24 tokens"),
    ("R5.15", need(H100, block_size=32, **FP8), ALL, "(64)"),
    ("R5.15", need(A100, block_size=16), ALL, "any multiple of 256"),
    ("R5.15", need(B200, block_size=64, head_size=256), ALL, "(128)"),
    ("R5.24", need(uses_row_causality=True), ALL, "differs per row"),
    ("R5.55", need(H100, sliding_window=64, keeps_prompt=True), installed(2, 3), "prompts kept beyond a window"),
    ("R5.33", need(A100, batch_invariant=True), ALL, "cannot fix the number of splits"),
    ("R5.90", need(A100, dcp_size=2), ALL, "dealt out among ranks"),
    ("R5.90", need(H100, dcp_size=2, **FP8), ALL, "would round a step's own tokens"),
    ("R5.90", need(H100, dcp_size=2, sliding_window=64), ALL, "has no windows"),
    ("R5.90", need(H100, dcp_size=2, kind=AttentionKind.ENCODER_ONLY), ALL, "are a decoder's"),
    ("R5.12", need(H100, uses_alibi=True), installed(3, 4), "generation 3 takes no ALiBi slopes"),
    ("R5.12", need(H100, uses_alibi=True, kind=AttentionKind.ENCODER_ONLY), ALL, "ALiBi biases are causal"),
    ("R5.12", need(H100, kind=AttentionKind.ENCODER_DECODER, sliding_window=64), ALL, "queries of cross-attention"),
    ("R5.12", need(A100, kind=AttentionKind.ENCODER_DECODER, sliding_window=64), ALL, "queries of cross-attention"),
    (
        "R5.12",
        need(B200, kind=AttentionKind.ENCODER_ONLY, sliding_window=64, uses_mm_prefix=True),
        ALL,
        "are a decoder's",
    ),
    ("R5.61", need(B200, head_size=256, **WINDOWED_ENCODER), installed(4), "install flash-attn"),
    ("R5.61", need(B200, head_size=256, uses_sinks=True, **WINDOWED_ENCODER), ALL, "2, which has no attention sinks"),
    ("R5.12", need(B200, sliding_window=4, chunk_size=8), ALL, "a sliding window within chunks"),
    ("R5.12", need(B200, keeps_prompt=True, chunk_size=8), ALL, "contradicts attention in chunks"),
    ("R5.14", need(H100, head_size=72, **FP8), ALL, "heads of a multiple of 16 entries"),
    ("R5.14", need(B200, head_size=120, **FP8), ALL, "heads of a multiple of 16 entries"),
    ("R5.12", need(H100), installed(), "generation 3 is not installed (flash-attn-3)"),
]

RESOLVED: list[tuple[AttentionNeed, InstalledKernels, int]] = [
    (need(A100), ALL, 2),
    (need(H100, dcp_size=2, needs_lse=True), ALL, 3),
    (need(B200, dcp_size=4, uses_sinks=True), ALL, 4),
    (need(L4), ALL, 2),
    (need(RTX50), ALL, 2),
    (need(H100), ALL, 3),
    (need(H100), installed(2, 4), 4),
    (need(H100), installed(2), 2),
    (need(B200), ALL, 4),
    (need(B200), installed(2, 3), 2),
    (need(H100, head_size=512), ALL, 4),
    (need(H100, uses_alibi=True), ALL, 2),
    (need(B200, uses_alibi=True), ALL, 2),
    (need(H100, uses_mm_prefix=True), ALL, 4),
    (need(H100, sliding_window=9, keeps_prompt=True), ALL, 4),
    (need(H100, chunk_size=64), ALL, 3),
    (need(H100, uses_sinks=True), ALL, 3),
    (need(B200, uses_sinks=True), ALL, 4),
    (need(H100, **FP8), ALL, 3),
    (need(B200, **FP8), ALL, 4),
    (need(H100, per_head_scales=True, **FP8), ALL, 3),
    (need(H100, head_size=80, **FP8), ALL, 3),
    (need(H100, head_size=72), ALL, 3),
    (need(B200, head_size=256, **WINDOWED_ENCODER), installed(2, 4), 4),
    (need(B200, head_size=256, **WINDOWED_ENCODER, **FP8), installed(2, 4), 4),
    (need(B200, head_size=128, uses_sinks=True, **WINDOWED_ENCODER), installed(4), 4),
    (need(H100, batch_invariant=True), ALL, 3),
]


@pytest.mark.parametrize(("rule", "asked", "kernels", "reason"), REFUSED, ids=lambda value: str(value)[:60])
def test_refused_with_a_reason(rule: str, asked: AttentionNeed, kernels: InstalledKernels, reason: str) -> None:
    """R5.10 to R5.16: words for people, from descriptions alone."""
    answer = refuse(asked, kernels)
    assert answer is not None, f"{rule}: accepted"
    assert reason in answer


@pytest.mark.parametrize(("asked", "kernels", "generation"), RESOLVED, ids=lambda value: str(value)[:90])
def test_the_best_generation_that_can(asked: AttentionNeed, kernels: InstalledKernels, generation: int) -> None:
    """R5.2, R5.14: by device and by what is installed."""
    assert refuse(asked, kernels) is None
    assert resolve(asked, kernels).generation == generation


@pytest.mark.parametrize("kind", list(AttentionKind))
@pytest.mark.parametrize("device", [A100, H100, B200])
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_every_kind_of_attention_is_served(device: DeviceDescription, kind: AttentionKind, dtype: str) -> None:
    """R5.14, R5.11: without a KV dtype (auto) as well as with the computation's."""
    for stored in ("auto", dtype):
        assert refuse(need(device, kind=kind, dtype=dtype, kv_cache_dtype=stored), ALL) is None


@pytest.mark.parametrize(
    ("asked", "kernels", "rule"),
    [
        (need(H100), ALL, BlockSizeRule(multiple_of=16)),
        (need(B200), ALL, BlockSizeRule(multiple_of=16)),
        (need(A100), ALL, BlockSizeRule(multiple_of=256)),
        (need(A100), InstalledKernels({2: "a build with small pages"}, {}), BlockSizeRule(multiple_of=16)),
        (need(H100, **FP8), ALL, BlockSizeRule(exact=(64,))),
        (need(B200, **FP8), ALL, BlockSizeRule(multiple_of=16)),
        (need(B200, head_size=256), ALL, BlockSizeRule(exact=(128,))),
        (need(H100, head_size=256), ALL, BlockSizeRule(multiple_of=16)),
    ],
    ids=str,
)
def test_block_sizes(asked: AttentionNeed, kernels: InstalledKernels, rule: BlockSizeRule) -> None:
    """R5.15."""
    assert block_sizes(asked, kernels) == rule


def test_the_path_for_heads_of_256() -> None:
    """R5.60: of generation 4 on Blackwell alone."""
    assert is_head_256_path(need(B200, head_size=256), 4)
    assert not is_head_256_path(need(B200, head_size=256), 2)
    assert not is_head_256_path(need(B200, head_size=128), 4)
    assert not is_head_256_path(need(H100, head_size=256), 4)


def package(folder: Path, files: Iterable[str], versions: dict[str, str]) -> None:
    """Files of an installation, and the metadata that package installers leave."""
    for name in files:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("raise RuntimeError('a probe imports nothing')\n")
    for name, version in versions.items():
        record = folder / f"{name.replace('-', '_')}-{version}.dist-info"
        record.mkdir()
        (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


SECOND = ("flash_attn/__init__.py", "flash_attn/flash_attn_interface.py")


@pytest.mark.parametrize(
    ("files", "versions", "found"),
    [
        (SECOND, {"flash-attn": "2.8.3"}, {2: "2.8.3"}),
        (SECOND, {"flash-attn": "1.0.9"}, {}),
        (("flash_attn_interface.py",), {"flash-attn-3": "3.0.0"}, {3: "3.0.0"}),
        (("flash_attn/cute/interface.py",), {"flash-attn-4": "4.0.0b1"}, {4: "4.0.0b1"}),
        ((*SECOND, "flash_attn/cute/interface.py"), {"flash-attn": "2.8.3"}, {2: "2.8.3", 4: "4"}),
    ],
    ids=["two", "one", "three", "four", "two-and-four"],
)
def test_generations_are_found_without_importing_them(
    files: tuple[str, ...],
    versions: dict[str, str],
    found: dict[int, str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    package(tmp_path, files, versions)
    monkeypatch.syspath_prepend(tmp_path)
    assert installed_kernels().versions == found
    assert probe().status is (ProbeStatus.AVAILABLE if found else ProbeStatus.ABSENT)
    assert not {"flash_attn", "flash_attn_interface"} & sys.modules.keys()


def test_absent_packages_are_named() -> None:
    answer = probe()
    if answer.status is ProbeStatus.AVAILABLE:
        pytest.skip(f"installed here: {answer.reason}")
    assert answer.status is ProbeStatus.ABSENT
    assert "flash-attn-3 (generation 3)" in answer.reason
    with pytest.raises(ConfigError, match="install flash-attn-3"):
        load_generation(3)


def test_a_package_without_its_function_is_named() -> None:
    with FlashDouble().installed():
        del sys.modules["flash_attn"].__dict__["flash_attn_varlen_func"]
        with pytest.raises(ConfigError, match="install flash-attn for this device"):
            load_generation(2)


def test_the_workers_device_decides_about_generations() -> None:
    """R5.2: as torch describes it, since a worker is bound to it; without one no layer gets kernels."""
    found = SimpleNamespace(name="H200", major=9, minor=0, total_memory=1 << 37, multi_processor_count=132)
    facts = facts_from(found, is_hip=False)
    assert facts.description == DeviceDescription(
        device_type="cuda", name="H200", capability=(9, 0), memory_bytes=1 << 37
    )
    assert facts.num_processors == 132
    assert refuse(need(facts.description), ALL) is None
    assert "needs a CUDA device" in str(refuse(need(facts_from(found, is_hip=True).description), ALL))
    for nothing in (None, torch.device("cpu")):
        assert facts_of(nothing).description.capability is None
    context = WorkerContext(name="flash_attn", api_version=1, roles=frozenset(), device=torch.device("cpu"))
    made = create(context, FlashOptions())
    assert made.name == "flash_attn"
    with pytest.raises(ValueError, match=r"no FlashAttention kernels for this process's device \(cpu\)"):
        made.create_impl(make_problem(AttentionShape(), [(1, 1)]).params())


def test_the_manifest_says_what_the_code_says() -> None:
    text = resources.files("hardpoint_attention").joinpath("hardpoint.json").read_text(encoding="utf-8")
    entry = json.loads(text)["plugins"]["attention_backend"]["flash_attn"]
    declaration = declaration_of(create)
    assert declaration is not None
    assert entry["options"] == declaration.options.model_json_schema()
    assert entry["capabilities"] == declaration.capabilities

"""What each attention backend accepts where: a table that states it, and the backends, which have to agree.

``attention_capabilities.csv`` was written from the rules, one row per case, and is to be read by people. Its columns:

- ``device`` as for ``hardpoint plugins doctor --device``.
- ``kernels``: installed generations of FlashAttention; ``interpreted`` for Triton; ``-``: does not matter.
- ``layer``: what is out of the ordinary; ``-``: a plain decoder layer of 8 query over 2 key/value heads.
- ``block_size``: tokens of the manager's blocks; ``-``: not settled.
- ``because``: a part of the reason for a refusal.
"""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionKind, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.testing.doctor_device import parse_device
from hardpoint_attention.flash.backend import FlashBackend, FlashSurroundings
from hardpoint_attention.flash.capabilities import InstalledKernels
from hardpoint_attention.flash.installed import PAGE_MULTIPLES
from hardpoint_attention.flash.options import FlashOptions
from hardpoint_attention.flashinfer.backend import FlashInferBackend, FlashInferOptions
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_attention.triton import backend as triton_backend

TABLE = Path(__file__).parent / "attention_capabilities.csv"
DEVICE_TYPES = {"cpu": "cpu", "cuda": "cuda", "rocm": "cuda"}
"""The framework calls devices of ROCm by CUDA's name; their features tell them apart."""


@dataclass(frozen=True, slots=True)
class Row:
    number: int
    backend: str
    device: str
    kernels: str
    dtype: str
    kv_dtype: str
    head_size: int
    layer: str
    block_size: int | None
    accepts: bool
    because: str

    @property
    def where(self) -> str:
        return f"{TABLE.name}:{self.number}"

    def need(self) -> AttentionNeed:
        described = parse_device(self.device)
        device = described.description
        found = DeviceDescription(
            device_type=DEVICE_TYPES[described.platform],
            name=device.name,
            capability=device.capability,
            memory_bytes=device.memory_bytes,
            features=device.features | {described.platform},
        )
        plain = AttentionNeed(8, 2, self.head_size, self.dtype, self.kv_dtype, found, self.block_size)
        return replace(plain, **{key: value for word in self.layer.split() for key, value in _asked(word).items()})


def _asked(word: str) -> dict[str, Any]:
    name, _, value = word.partition("=")
    match name:
        case "-":
            return {}
        case "kind":
            return {"kind": AttentionKind(value)}
        case "heads":
            heads, kv_heads = value.split("/")
            return {"num_heads": int(heads), "num_kv_heads": int(kv_heads)}
        case "window":
            return {"sliding_window": int(value)}
        case "chunk":
            return {"chunk_size": int(value)}
        case "softcap":
            return {"logits_soft_cap": float(value)}
        case "dcp":
            return {"dcp_size": int(value)}
        case "invariant":
            return {"batch_invariant": True}
        case "lse":
            return {"needs_lse": True}
        case "per_head_scales" | "keeps_prompt":
            return {name: True}
        case "mla" | "alibi" | "sinks" | "mm_prefix" | "row_causality" | "sparse" | "relative_bias":
            return {f"uses_{name}": True}
    raise ValueError(f"the layer word {word!r} is none of the table's")


def read_table() -> list[Row]:
    with TABLE.open(encoding="utf-8", newline="") as file:
        return [
            Row(
                number,
                entry["backend"],
                entry["device"],
                entry["kernels"],
                entry["dtype"],
                entry["kv_dtype"],
                int(entry["head_size"]),
                entry["layer"],
                None if entry["block_size"] == "-" else int(entry["block_size"]),
                {"yes": True, "no": False}[entry["accepts"]],
                entry["because"],
            )
            for number, entry in enumerate(csv.DictReader(file), start=2)
        ]


ROWS = read_table()


def _flash(row: Row) -> AttentionBackend:
    generations = [] if row.kernels == "none" else [int(number) for number in row.kernels.split("+")]
    installed = InstalledKernels({number: f"{number}.0" for number in generations}, PAGE_MULTIPLES)
    return FlashBackend(FlashSurroundings(row.need().device, installed), FlashOptions())


def _cpu_paged(row: Row) -> AttentionBackend:
    del row
    module = pytest.importorskip("hardpoint_cpu.attention_backend")
    kernels = pytest.importorskip("hardpoint_cpu.kernels")

    class Compiled:
        """Kernels that are there: whether a compiler is belongs to no rule."""

        def library(self) -> object:
            return self

        wait = library

        def report(self) -> object:
            return kernels.KernelReport

    backend: AttentionBackend = module.CpuPagedBackend(Compiled())
    return backend


MAKERS: dict[str, Callable[[Row], AttentionBackend]] = {
    "flash_attn": _flash,
    "flashinfer": lambda row: FlashInferBackend(FlashInferOptions()),
    "triton": lambda row: triton_backend.TritonBackend(fixed=row.need().batch_invariant),
    "cpu_paged": _cpu_paged,
    "torch_reference": lambda row: ReferenceBackend(),
}


def answer(row: Row, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """What the selection would be told, blocks included."""
    monkeypatch.setenv(triton_backend.INTERPRETER_VARIABLE, "1" if row.kernels == "interpreted" else "0")
    need = row.need()
    backend = MAKERS[row.backend](row)
    reason = backend.objection(need)
    if reason is None and need.block_size is not None:
        rule = backend.block_sizes(need)
        if not any(rule.accepts(size) for size in range(1, need.block_size + 1) if need.block_size % size == 0):
            return f"blocks of {need.block_size} tokens suit none of {rule}"
    return reason


@pytest.mark.parametrize("backend", MAKERS)
def test_backends_agree_with_the_table(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5.10, R5.11, R5.12, R5.13, R5.14, R5.15, R5.16: for every row the outcome, and a reason that tells why."""
    wrong = []
    for row in (row for row in ROWS if row.backend == backend):
        reason = answer(row, monkeypatch)
        if row.accepts != (reason is None) or row.because.lower() not in (reason or "").lower():
            wrong.append(f"{row.where}: {row} got {reason!r}")
    assert not wrong, "\n".join(wrong)


def test_the_table_is_what_it_says() -> None:
    """R5.16: at least 300 cases, none twice, and each refusal with its reason."""
    assert len(ROWS) >= 300
    cases = Counter(replace(row, number=0, accepts=True, because="") for row in ROWS)
    assert [row for row, count in cases.items() if count > 1] == []
    assert [row.where for row in ROWS if bool(row.because) == row.accepts] == []
    assert {row.backend for row in ROWS} == set(MAKERS)
    for backend in MAKERS:
        assert {row.accepts for row in ROWS if row.backend == backend} == {True, False}


def test_the_table_has_every_refusal_of_the_specification() -> None:
    """R5.13: sinks before 9.0, fp8 with multimodal prefixes on 9.0, fp8 and prefixes without their generation."""

    def refused(architecture: str, **wanted: str) -> list[Row]:
        return [
            row
            for row in ROWS
            if row.backend == "flash_attn"
            and f" {architecture} " in row.device
            and not row.accepts
            and all(wanted[name] == getattr(row, name) for name in wanted)
        ]

    assert refused("sm_80", layer="sinks")
    assert refused("sm_89", layer="sinks")
    assert refused("sm_90", layer="mm_prefix", kv_dtype="fp8")
    assert refused("sm_90", layer="-", kv_dtype="fp8", kernels="2")
    assert refused("sm_100", layer="-", kv_dtype="fp8", kernels="2")
    assert refused("sm_90", layer="mm_prefix", kernels="3")


def test_what_a_prefix_over_an_8_bit_cache_goes_to() -> None:
    """R5.13: what FlashAttention refuses on 9.0, Triton computes."""
    (row,) = [
        row
        for row in ROWS
        if (row.backend, row.kv_dtype, row.layer) == ("triton", "fp8", "mm_prefix") and "sm_90" in row.device
    ]
    assert row.accepts


def test_answers_are_pure(monkeypatch: pytest.MonkeyPatch) -> None:
    """R5.16: neither a device nor a kernel package is touched, and the same question has the same answer."""

    def touched(*_: object, **__: object) -> None:
        raise AssertionError("a capability answer touched the device")

    monkeypatch.setattr(torch.cuda, "_lazy_init", touched)
    rows = ROWS[::7]
    assert [answer(row, monkeypatch) for row in rows] == [answer(row, monkeypatch) for row in rows]

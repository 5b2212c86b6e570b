"""What ``cpu_paged`` accepts, where its kernels come from, and changing over to them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionKind, AttentionNeed, KVWriteMode
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import NoOptions, PluginContext, ProbeStatus, declaration_of
from hardpoint_cpu.attention_backend import CpuPagedBackend, CpuPagedMetadata, create
from hardpoint_cpu.kernels import KernelReport, KernelState
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_cpu.platform import CpuOptions, CpuPlatform
from hardpoint_testing_torch import AttentionShape, dense_attention, make_problem, run_backend


class Kernels:
    """Kernels whose state the test sets."""

    def __init__(self, made: NativeLibrary | None = None, state: KernelState = KernelState.READY) -> None:
        self.made, self.state, self.waits = made, state, 0

    def library(self) -> NativeLibrary | None:
        return self.made

    def wait(self) -> NativeLibrary | None:
        self.waits += 1
        return self.made

    def report(self) -> KernelReport:
        return KernelReport("generic", self.state, reason="no compiler anywhere")


def need(**changes: Any) -> AttentionNeed:
    given: dict[str, Any] = {
        "num_heads": 8,
        "num_kv_heads": 2,
        "head_size": 64,
        "dtype": "float32",
        "kv_cache_dtype": "float32",
        "device": DeviceDescription(device_type="cpu", name="cpu"),
    }
    return AttentionNeed(**{**given, **changes})


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_size": 8},
        {"head_size": 256},
        {"kv_cache_dtype": "auto"},
        {"kv_cache_dtype": "bfloat16"},
        {"kv_cache_dtype": "float16"},
        {"block_size": 7},
        {"sliding_window": 7, "logits_soft_cap": 30.0, "uses_sinks": True, "uses_alibi": True},
        {"kind": AttentionKind.ENCODER_ONLY},
        {"batch_invariant": True},
    ],
    ids=str,
)
def test_accepted(changes: dict[str, Any]) -> None:
    """R5.12."""
    assert CpuPagedBackend(Kernels()).refuse(need(**changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"device": DeviceDescription(device_type="cuda", name="gpu")}, "not on cuda"),
        ({"dtype": "bfloat16"}, "not bfloat16"),
        ({"kv_cache_dtype": "float8_e4m3fn"}, "KV cache dtype float8_e4m3fn"),
        ({"kind": AttentionKind.ENCODER_DECODER}, "encoder_decoder"),
        ({"uses_mla": True, "num_kv_heads": 1}, "MLA"),
        ({"chunk_size": 32}, "it has no chunked local attention"),
        ({"num_heads": 5}, "5 query heads"),
        ({"head_size": 12}, "head size 12"),
        ({"head_size": 264}, "head size 264"),
        ({"uses_alibi": True, "kind": AttentionKind.ENCODER}, "ALiBi"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_with_a_reason(changes: dict[str, Any], reason: str) -> None:
    """R5.12."""
    answer = CpuPagedBackend(Kernels()).refuse(need(**changes))
    assert answer is not None
    assert reason in answer


def test_without_kernels_it_refuses_so_that_another_is_chosen_visibly() -> None:
    """R5.3."""
    answer = CpuPagedBackend(Kernels(state=KernelState.UNAVAILABLE)).refuse(need())
    assert answer == "there are no compiled kernels: no compiler anywhere"


def test_what_must_not_change_waits_for_kernels() -> None:
    kernels = Kernels(state=KernelState.COMPILING)
    backend = CpuPagedBackend(kernels)
    assert backend.refuse(need()) is None
    assert kernels.waits == 0
    assert backend.refuse(need(batch_invariant=True)) is None
    assert kernels.waits == 1


def test_kernels_take_over_on_the_same_cache(best_native: NativeLibrary) -> None:
    """Plain torch computes the first step, kernels the next one, without anything being made anew."""
    problem = make_problem(AttentionShape(sliding_window=9, uses_sinks=True), [(20, 1), (0, 9), (4, 3)])
    kernels = Kernels(state=KernelState.COMPILING)
    impl = CpuPagedBackend(kernels).create_impl(problem.params())
    builder = CpuPagedBackend(kernels).create_builder(problem.spec(), [], 4, 64, torch.device("cpu"))
    cache, metadata, common = problem.kv_cache(), builder.build(problem.common()), problem.common()
    impl.write_kv(problem.key, problem.value, cache, common.slot_mapping)
    outputs = []
    for made in (None, best_native):
        kernels.made = made
        output = torch.full_like(problem.query, torch.nan)
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
        outputs.append(output)
    expected, _ = dense_attention(problem)
    for output in outputs:
        torch.testing.assert_close(output.double(), expected, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_kernels", [True, False])
def test_the_cache_may_be_narrower_than_the_computation(
    best_native: NativeLibrary, dtype: torch.dtype, has_kernels: bool
) -> None:
    problem = make_problem(AttentionShape(), [(9, 1), (3, 20), (0, 30)])
    output = run_backend(
        CpuPagedBackend(Kernels(best_native if has_kernels else None)), problem, problem.kv_cache().to(dtype)
    )
    torch.testing.assert_close(output.double(), dense_attention(problem)[0], rtol=3e-2, atol=3e-2)


def test_the_layers_window_wins_over_the_groups(best_native: NativeLibrary) -> None:
    """R5.45, P5.10: one metadata object serves a windowed and a global layer."""
    windowed = make_problem(AttentionShape(sliding_window=5), [(30, 1), (0, 25), (12, 4)])
    plain = replace(windowed, shape=replace(windowed.shape, sliding_window=None))
    for problem in (windowed, plain):
        output = run_backend(CpuPagedBackend(Kernels(best_native)), problem)
        torch.testing.assert_close(output.double(), dense_attention(problem)[0], rtol=2e-5, atol=2e-5)


def test_rows_that_differ_in_causality_are_no_metadata() -> None:
    """R5.24: the need is refused at start, and should a step bring them all the same, none is computed wrongly."""
    problem = make_problem(AttentionShape(uses_row_causality=True), [(9, 1), (3, 20)])
    backend = CpuPagedBackend(Kernels())
    assert "uses_row_causality" in (backend.objection(problem.shape.need()) or "")
    builder = backend.create_builder(problem.spec(), [], 4, 64, torch.device("cpu"))
    with pytest.raises(TypeError, match="uses_row_causality"):
        builder.build(problem.common())


def test_metadata_names_the_addresses_that_whole_steps_need() -> None:
    problem = make_problem(AttentionShape(), [(9, 1), (3, 20)])
    common = problem.common()
    builder = CpuPagedBackend(Kernels()).create_builder(problem.spec(), [], 4, 64, torch.device("cpu"))
    metadata: CpuPagedMetadata = builder.build(common)
    struct = metadata.rows.struct
    assert (struct.rows, struct.causal) == (2, 1)
    assert struct.query_start == common.query_start_loc.data_ptr()
    assert struct.seq_lens == common.seq_lens.data_ptr()
    assert struct.block_table == common.block_table.data_ptr()
    assert struct.table_stride == common.block_table.stride(0)
    assert metadata.rows.address != metadata.fresh.address


def test_the_factory_takes_the_platforms_kernels_and_its_probe_answers() -> None:
    declaration = declaration_of(create)
    assert declaration is not None
    assert declaration.probe is not None
    assert declaration.probe().status in (ProbeStatus.AVAILABLE, ProbeStatus.ABSENT)
    platform = CpuPlatform(CpuOptions(kernels="off"))
    context = PluginContext(name="cpu_paged", api_version=1, roles=frozenset(), platform=platform)
    backend = create(context, NoOptions())
    assert backend.kv_write_mode is KVWriteMode.SEPARATE
    assert "kernels is off" in (backend.refuse(need()) or "")
    elsewhere = create(PluginContext(name="cpu_paged", api_version=1, roles=frozenset()), NoOptions())
    assert elsewhere.block_sizes(need()).accepts(1)

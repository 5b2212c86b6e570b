"""What FlashInfer's wrappers are planned and run with, as recorded by a double, and what the backend refuses."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from flashinfer_double import FlashInferDouble
from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import AttentionKind, AttentionNeed, GraphSupport
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import ProbeStatus, declaration_of
from hardpoint_attention.flashinfer import FlashInferBackend, FlashInferOptions, create
from hardpoint_attention.flashinfer.backend import probe
from hardpoint_attention.flashinfer.impl import FlashInferImpl
from hardpoint_attention.flashinfer.metadata import FlashInferBuilder
from hardpoint_attention.flashinfer.plans import load_package
from hardpoint_attention.flashinfer.steps import last_page_lens, page_counts
from hardpoint_testing_torch import AttentionProblem, AttentionShape, dense_attention, make_problem

SHAPE = AttentionShape(dtype=torch.bfloat16, block_size=16, head_size=64)
DECODES_FIRST = [(17, 1), (5, 1), (0, 9), (3, 7)]


@pytest.fixture
def double() -> Iterator[FlashInferDouble]:
    with FlashInferDouble().installed() as installed:
        yield installed


def backend(**changes: Any) -> FlashInferBackend:
    options = FlashInferOptions(workspace_bytes=64, max_pages=64)
    return FlashInferBackend(options, **changes)


def builder_of(made: FlashInferBackend, *names: str) -> FlashInferBuilder:
    built = made.create_builder(make_problem(SHAPE, [(1, 1)]).spec(), names, 8, 64, torch.device("cpu"))
    assert isinstance(built, FlashInferBuilder)
    return built


def run(made: FlashInferBackend, problem: AttentionProblem, **changes: Any) -> torch.Tensor:
    impl, cache, output = made.create_impl(problem.params("a")), problem.kv_cache(), problem.empty_output()
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    metadata = builder_of(made, "a").build(replace(problem.common(), **changes))
    impl.forward(problem.query, problem.key, problem.value, cache, metadata, output)
    torch.testing.assert_close(output.double(), dense_attention(problem)[0], rtol=2e-2, atol=2e-2)
    return output


@pytest.mark.parametrize(
    ("lengths", "pages", "last"), [([0, 1, 15, 16, 17, 32], [0, 1, 1, 1, 2, 2], [0, 1, 15, 16, 1, 16])]
)
def test_pages_of_rows(lengths: list[int], pages: list[int], last: list[int]) -> None:
    """A full last page counts as full, not as empty."""
    assert page_counts(np.array(lengths), 16).tolist() == pages
    assert last_page_lens(np.array(lengths), 16).tolist() == last


def test_decodes_and_longer_rows_have_a_wrapper_each(double: FlashInferDouble) -> None:
    """Planned while the step is built, with offsets on the host; the page ids never leave the device."""
    problem = make_problem(SHAPE, DECODES_FIRST)
    run(backend(), problem)
    (decode,), (prefill,) = double.named("decode.plan"), double.named("prefill.plan")
    assert decode["indptr"].tolist() == [0, 2, 3]
    assert decode["last_page_len"].tolist() == [2, 6]
    assert decode["indices"].tolist() == [*problem.block_table[0, :2].tolist(), int(problem.block_table[1, 0])]
    assert prefill["qo_indptr"].tolist() == [0, 9, 16]
    assert prefill["paged_kv_indptr"].tolist() == [0, 1, 2]
    assert (prefill["causal"], prefill["window_left"], prefill["page_size"]) == (True, -1, 16)
    assert [call["q"].shape[0] for call in double.named("decode.run", "prefill.run")] == [2, 16]


def test_a_step_is_planned_once_for_all_layers_that_agree(double: FlashInferDouble) -> None:
    """P5.7: planning takes host time and is no part of any layer's forward."""
    made, problem = backend(), make_problem(SHAPE, [(17, 1), (5, 1)])
    params = problem.params()
    impls = [
        made.create_impl(replace(params, layer_name=name, sliding_window=window))
        for name, window in (("a", None), ("b", None), ("c", 7))
    ]
    builder, cache = builder_of(made, "a", "b", "c"), problem.kv_cache()
    impls[0].write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    for _ in range(2):
        double.calls.clear()
        metadata = builder.build(problem.common())
        assert [call["window_left"] for call in double.named("decode.plan")] == [-1, 6]
        for impl in impls:
            impl.forward(problem.query, problem.key, problem.value, cache, metadata, problem.empty_output())
        assert len(double.named("decode.plan", "prefill.plan")) == 2
        assert len(double.named("decode.run")) == 3
    assert len(double.created) == 2


def test_layers_that_come_later_are_planned_at_their_first_call(double: FlashInferDouble) -> None:
    made, problem = backend(), make_problem(SHAPE, [(17, 1)])
    metadata = builder_of(made, "a").build(problem.common())
    assert double.calls == []
    impl, cache = made.create_impl(problem.params("a")), problem.kv_cache()
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    for _ in range(2):
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, problem.empty_output())
    assert len(double.named("decode.plan")) == 1


def test_the_cache_is_passed_by_strides_alone(double: FlashInferDouble) -> None:
    """R5.41: heads before tokens, as the cache is; keys and values beside each other."""
    made, problem = backend(), make_problem(SHAPE, [(17, 1)])
    impl, cache = made.create_impl(problem.params("a")), problem.kv_cache()
    metadata = builder_of(made, "a").build(problem.common())
    for _ in range(2):
        impl.forward(problem.query, problem.key, problem.value, cache, metadata, problem.empty_output())
    first, second = (call["paged_kv_cache"] for call in double.named("decode.run"))
    assert first is second
    for part, offset in zip(first, (0, 64), strict=True):
        assert part.shape == (problem.num_blocks, 2, 16, 64)
        assert part.data_ptr() == cache.data_ptr() + offset * cache.element_size()
    with pytest.raises(ValueError, match="side by side"):
        impl.forward(problem.query, problem.key, problem.value, cache[..., :64], metadata, problem.empty_output())


def test_captured_decodes_keep_their_wrapper_and_its_buffers(double: FlashInferDouble) -> None:
    """R5.38, P5.9: one wrapper for each number of rows; padded rows read the null block."""
    made, problem = backend(), make_problem(SHAPE, [(17, 1), (5, 1), (40, 1)])
    impl, builder = made.create_impl(problem.params("a")), builder_of(made, "a")
    assert builder.graph_support is GraphSupport.DECODE_ONLY
    cache = problem.kv_cache()
    impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    metadata = builder.build(replace(problem.padded(1, num_rows=1).common(), for_graph=True))
    (wrapper,) = double.created
    assert wrapper.buffers["use_cuda_graph"]
    kept = [wrapper.buffers[f"paged_kv_{name}_buffer"] for name in ("indptr", "indices", "last_page_len")]
    assert [len(buffer) for buffer in kept] == [5, 64, 4]
    assert kept[0].tolist() == [0, 2, 3, 6, 7]
    assert kept[2].tolist() == [2, 6, 9, 1]
    again = builder.build(replace(problem.padded(1, num_rows=1).common(), for_graph=True))
    assert again.step is metadata.step
    assert double.created == [wrapper]


@pytest.mark.parametrize("shape", [SHAPE, replace(SHAPE, num_heads=8, num_kv_heads=2)])
def test_large_groups_decode_on_matrix_units(double: FlashInferDouble, shape: AttentionShape) -> None:
    problem = make_problem(shape, [(17, 1)])
    run(backend(), problem)
    assert double.created[0].buffers["use_tensor_cores"] is (shape.num_heads // shape.num_kv_heads >= 4)


def test_batch_invariance_splits_no_keys_and_knows_no_decodes(double: FlashInferDouble) -> None:
    """Every row runs on the same kernel, whatever its neighbors are."""
    run(backend(batch_invariant=True), make_problem(SHAPE, DECODES_FIRST))
    assert double.named("decode.plan") == []
    (plan,) = double.named("prefill.plan")
    assert plan["disable_split_kv"] is True


def test_bounds_of_lengths_are_not_planned_with(double: FlashInferDouble) -> None:
    problem = make_problem(SHAPE, [(17, 1), (5, 1)])
    bounds = problem.common().seq_lens_cpu + 30
    run(backend(), problem, seq_lens_cpu=bounds, seq_lens_is_exact=False)
    assert double.named("decode.plan")[0]["last_page_len"].tolist() == [2, 6]


def test_too_many_pages_are_told() -> None:
    made = FlashInferBackend(FlashInferOptions(workspace_bytes=64, max_pages=2))
    with pytest.raises(ValueError, match="3 pages do not fit the 2 reserved; raise the option max_pages"):
        builder_of(made, "a").build(make_problem(SHAPE, [(40, 1)]).common())


def test_what_cannot_be_computed_is_told(double: FlashInferDouble) -> None:
    """R5.24, and windows that look back only."""
    problem = make_problem(replace(SHAPE, sliding_window=4), [(17, 1)])
    with pytest.raises(TypeError, match="uses_row_causality"):
        builder_of(backend(), "a").build(replace(problem.common(), causal=torch.tensor([True])))
    with pytest.raises(TypeError, match="windows look back only"):
        run(backend(), problem, causal=False)


H100 = DeviceDescription(device_type="cuda", name="H100", capability=(9, 0))
A100 = DeviceDescription(device_type="cuda", name="A100", capability=(8, 0))
T4 = DeviceDescription(device_type="cuda", name="T4", capability=(7, 5))
CPU = DeviceDescription(device_type="cpu", name="cpu")


def need(device: DeviceDescription = H100, **changes: Any) -> AttentionNeed:
    given: dict[str, Any] = {"num_heads": 8, "num_kv_heads": 2, "head_size": 128, "dtype": "bfloat16"}
    return AttentionNeed(**{**given, "kv_cache_dtype": "auto", "device": device, **changes})


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (need(CPU), "needs a CUDA device"),
        (need(T4), "7.5 is below 8.0"),
        (need(dtype="float32"), "dtype float32"),
        (need(kv_cache_dtype="float16"), "KV cache dtype float16"),
        (need(A100, kv_cache_dtype="fp8"), "needs compute capability 8.9"),
        (need(num_heads=7), "7 query heads"),
        (need(head_size=80), "head size 80"),
        (need(block_size=24), "blocks of 24 tokens"),
        (need(uses_mla=True), "MLA"),
        (need(uses_sparse=True), "sparse"),
        (need(uses_alibi=True), "ALiBi"),
        (need(chunk_size=8), "chunked"),
        (need(keeps_prompt=True, sliding_window=4), "keeps no prompts"),
        (need(uses_mm_prefix=True), "multimodal"),
        (need(uses_row_causality=True), "one for all rows"),
        (need(kind=AttentionKind.ENCODER_ONLY, sliding_window=4), "look back only"),
        (need(dcp_size=2), "dealt out among ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_refused_with_a_reason(asked: AttentionNeed, reason: str) -> None:
    """R5.12, R5.16."""
    answer = backend().refuse(asked)
    assert answer is not None
    assert reason in answer


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"device": A100},
        {"kv_cache_dtype": "fp8"},
        {"kv_cache_dtype": "float8_e5m2"},
        {"sliding_window": 9, "logits_soft_cap": 5.0, "uses_sinks": True},
        {"block_size": 128},
        {"kind": AttentionKind.ENCODER_DECODER},
        {"batch_invariant": True},
        {"per_head_scales": True, "kv_cache_dtype": "fp8", "needs_lse": True},
    ],
    ids=str,
)
def test_accepted(changes: dict[str, Any]) -> None:
    """R5.16."""
    assert backend().refuse(need(**changes)) is None
    assert backend().block_sizes(need()).exact == (16, 32, 64)


def test_an_absent_package_is_a_reason() -> None:
    """R5.5: also for those who name the backend."""
    assert backend(is_installed=False).refuse(need()) == "FlashInfer is not installed; install flashinfer-python"


def test_the_package_is_looked_for_and_never_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if probe().status is ProbeStatus.AVAILABLE:
        pytest.skip("FlashInfer is installed here")
    assert probe().status is ProbeStatus.ABSENT
    assert "install flashinfer-python" in probe().reason
    with pytest.raises(ConfigError, match="install flashinfer-python"):
        load_package()
    (tmp_path / "flashinfer").mkdir()
    (tmp_path / "flashinfer" / "__init__.py").write_text("raise RuntimeError('a probe imports nothing')\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert probe().status is ProbeStatus.AVAILABLE


def test_the_manifest_says_what_the_code_says() -> None:
    text = resources.files("hardpoint_attention").joinpath("hardpoint.json").read_text(encoding="utf-8")
    entry = json.loads(text)["plugins"]["attention_backend"]["flashinfer"]
    declaration = declaration_of(create)
    assert declaration is not None
    assert entry["options"] == declaration.options.model_json_schema()
    assert entry["capabilities"] == declaration.capabilities
    assert isinstance(backend().create_impl(make_problem(SHAPE, [(1, 1)]).params()), FlashInferImpl)

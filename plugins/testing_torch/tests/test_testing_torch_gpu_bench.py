"""The benchmark for graphics processors, as far as a processor can try it: arithmetic, page, and a tiny run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.custom_op import CustomOperator, CustomOps
from hardpoint_testing_torch import make_problem
from hardpoint_testing_torch.attention_shape import AttentionShape
from hardpoint_testing_torch.gpu_bench.__main__ import describe, main, measure, write_page
from hardpoint_testing_torch.gpu_bench.attention import largest_error, needed_bytes, needed_flops, plain_seconds
from hardpoint_testing_torch.gpu_bench.generation import measure_generation
from hardpoint_testing_torch.gpu_bench.measure import measure_roof, num_bytes, seconds_per_call
from hardpoint_testing_torch.gpu_bench.operator_problems import PROBLEMS, OperatorProblem
from hardpoint_testing_torch.gpu_bench.operators import measure_operators, operator_error
from hardpoint_testing_torch.gpu_bench.records import Generation, KernelRow, Machine, Result, Roof, Scale, Skipped
from hardpoint_testing_torch.gpu_bench.report import page, summary
from hardpoint_testing_torch.plain_attention import PlainAttentionBackend
from tiny_llama import write_tiny_llama

CPU = torch.device("cpu")
ROOF = Roof(bytes_per_s=1e12, flops_per_s=1e15)


def row(**changes: Any) -> KernelRow:
    given: dict[str, Any] = {
        "group": "attention",
        "name": "fast",
        "case": "decode",
        "error": 1e-3,
        "tolerance": 2e-2,
        "seconds": 1e-3,
        "plain_seconds": 4e-3,
        "bytes": 5e8,
        "flops": 1e9,
    }
    return KernelRow(**{**given, **changes})


def result(**changes: Any) -> Result:
    machine = Machine(device="Some Device", architecture="sm_90", torch="2.13", dtype="bfloat16", roof=ROOF)
    given: dict[str, Any] = {
        "machine": machine,
        "kernels": [row()],
        "generation": [Generation(setting="plain", num_requests=4, tokens_per_s=1234.5, agrees=True)],
        "skipped": [],
    }
    return Result(**{**given, **changes})


def test_the_roof_is_the_tighter_of_two() -> None:
    assert row().roof_fraction(ROOF) == pytest.approx(0.5)
    assert row().is_memory_bound(ROOF)
    busy = row(flops=9e11)
    assert busy.roof_fraction(ROOF) == pytest.approx(0.9)
    assert not busy.is_memory_bound(ROOF)


def test_the_page_tells_right_from_wrong() -> None:
    text = page(result(kernels=[row(), row(name="bad", error=float("inf"))]))
    assert "| fast | decode | 1.0e-03 (2e-02) | 1,000.0 | 4,000.0 | 4.00 | 50% | memory |" in text
    assert "inf (2e-02) **wrong**" in text
    assert "| plain | 4 | 1,234 | yes |" in text
    assert "1,000 GB/s" in text
    assert "1,000.0 TFLOP/s" in text


def test_reasons_are_told_once() -> None:
    skipped = [Skipped(name=f"case {number}", reason="not\n here | now") for number in range(3)]
    assert "| case 0 and 2 more | not here / now |" in page(result(skipped=skipped))


def test_without_a_result_the_page_claims_nothing() -> None:
    assert "**Not yet run on a graphics processor.**" in page(None)


def test_the_summary_names_what_is_wrong() -> None:
    apart = Generation(setting="graphs", num_requests=8, tokens_per_s=1, agrees=False)
    found = summary(result(kernels=[row(error=1.0)], generation=[apart]))
    assert found == "1 kernel cases, 1 of generation, 0 skipped; wrong: fast (decode), graphs x 8"


def test_a_result_is_kept_and_read_again(tmp_path: Path) -> None:
    kept, document = tmp_path / "result.json", tmp_path / "page.md"
    kept.write_bytes(msgspec.json.encode(result()))
    write_page(kept, document)
    assert document.read_text(encoding="utf-8") == page(result())
    assert main(["--write-only", "--output", str(tmp_path / "none.json"), "--document", str(document)]) == 0
    assert document.read_text(encoding="utf-8") == page(None)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is a device")
def test_without_a_device_it_says_where_to_look(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    assert "no graphics processor that torch can use; see `hardpoint plugins doctor" in capsys.readouterr().err


def test_what_a_problem_cannot_do_without() -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=8, dtype=torch.float16)
    problem = make_problem(shape, [(10, 1), (0, 3)])
    keys = 11 + 3
    assert needed_bytes(problem) == 2 * (2 * 4 * 4 * 8 + keys * 2 * 2 * 8)
    pairs = 11 + (1 + 2 + 3)
    assert needed_flops(problem) == 2 * pairs * 4 * 16
    windowed = make_problem(AttentionShape(num_heads=4, num_kv_heads=2, head_size=8, sliding_window=5), [(10, 1)])
    assert needed_flops(windowed) == 2 * 5 * 4 * 16


def test_an_answer_that_is_no_number_is_infinitely_wrong() -> None:
    problem = make_problem(AttentionShape(), [(5, 1), (0, 3)])
    assert largest_error(PlainAttentionBackend(), problem, CPU) < 2e-5
    assert largest_error(_nothing(), problem, CPU) == float("inf")


def _nothing() -> AttentionBackend:
    """A backend that computes nothing: its output stays what it was."""

    class Nothing(PlainAttentionBackend):
        def create_impl(self, params: Any) -> Any:
            made = super().create_impl(params)
            made.forward = lambda query, key, value, kv_cache, metadata, output: output  # type: ignore[method-assign]
            return made

    return Nothing()


def test_time_and_roof_are_positive() -> None:
    calls: list[int] = []
    assert seconds_per_call(lambda: calls.append(1), CPU, 1e-4) > 0
    assert len(calls) >= 5
    roof = measure_roof(CPU, torch.float32, Scale.tiny())
    assert min(roof.bytes_per_s, roof.flops_per_s) > 0
    assert num_bytes(torch.zeros(3), None, 5, torch.zeros(2, dtype=torch.int8)) == 14
    problem = make_problem(AttentionShape(), [(5, 1), (2, 3)])
    assert plain_seconds(problem, CPU, Scale.tiny()) > 0


def doubled(x: torch.Tensor) -> None:
    x.mul_(2)


def test_operators_are_held_to_what_they_should_compute() -> None:
    """Results and arguments written to; of what nobody knows, or nothing here can run, it says so."""

    def operator(name: str, run: Callable[..., Any], device: str = "cpu") -> CustomOperator:
        return CustomOperator(name, {device: run}, run, lambda device: [(torch.ones(2, 3), torch.tensor([1]))])

    known = operator("zero_blocks", PROBLEMS["zero_blocks"].plain)
    wrong = operator("zero_blocks", lambda cache, blocks: None)
    unknown, absent = operator("double", doubled), operator("copy_blocks", doubled, "cuda")
    ops = CustomOps((known, wrong, unknown, absent))
    rows = list(measure_operators("made up", CPU, torch.float32, Scale.tiny(), ops))
    assert [row.is_right for row in rows if isinstance(row, KernelRow)] == [True, False]
    assert [(row.name, row.reason) for row in rows if isinstance(row, Skipped)] == [
        ("double", "no plain computation of the same is known"),
        ("copy_blocks", "it has no implementation for cpu"),
    ]
    (missing,) = measure_operators("no_such_plugin", CPU, torch.float32, Scale.tiny())
    assert isinstance(missing, Skipped)
    assert operator_error(lambda x: x.clone(), OperatorProblem(torch.zeros_like, _none), (torch.ones(1),)) == 1.0


def _none(*arguments: Any) -> tuple[Any, ...]:
    return ()


@pytest.mark.slow
def test_all_of_tritons_operators_are_measured() -> None:
    """On samples they agree with what is computed here in another way, for whole batches at once."""
    pytest.importorskip("triton")
    rows = list(measure_operators("triton_ops", CPU, torch.float32, Scale.tiny()))
    assert {row.name for row in rows if isinstance(row, KernelRow) and row.is_right} == set(PROBLEMS)
    assert {row.name for row in rows if isinstance(row, KernelRow) and row.flops} == {"fused_moe"}


@pytest.mark.slow
def test_a_tiny_run_on_the_processor_is_right() -> None:
    """Everything but the device: each backend and kernel is measured or says why not."""
    found = measure(CPU, torch.float32, Scale.tiny(), None, ("flash_attn", "no_such_backend", "torch_reference"))
    names = {one.name for one in found.kernels} | {one.name.partition(":")[0] for one in found.skipped}
    assert {"torch_reference", "flash_attn", "no_such_backend", "triton_rms_norm"} <= names
    assert [one.name for one in found.kernels if not one.is_right] == []
    assert describe(CPU).device_type == "cpu"


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_generation_is_compared_with_the_plain_attention(tmp_path: Path) -> None:
    model = str(write_tiny_llama(tmp_path / "tiny"))
    settings: dict[str, Any] = {
        "torch_reference": {"attention_backend": "torch_reference"},
        "chosen": {},
        "no such": {"attention_backend": "no_such_backend"},
    }
    rows, skipped = measure_generation(model, Scale.tiny(), settings, platform="cpu", num_kv_blocks=64)
    assert [(one.setting, one.num_requests, one.agrees) for one in rows] == [
        (name, size, True) for name in ("torch_reference", "chosen") for size in (1, 2)
    ]
    assert all(one.tokens_per_s > 0 for one in rows)
    assert [one.name for one in skipped] == ["generation with no such"]

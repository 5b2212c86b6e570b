"""The suite for kernel overrides passes correct kernels at every seam, and every mutant fails it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.interfaces.kernel_override import KernelCase, KernelOverride
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch.kernel_override_suite import KernelOverrideSuite
from hardpoint_testing_torch.kernel_problems import kernel_problems
from hardpoint_torch_runtime.ops import SEAMS

DTYPES = frozenset({"float32", "bfloat16", "float16"})
Kernel = Callable[..., Any]


def describe(seam: str, kernel: Kernel, **changes: Any) -> KernelOverride:
    settings: dict[str, Any] = {"device_types": frozenset({"cpu"}), "dtypes": DTYPES}
    return KernelOverride(seam, kernel, **{**settings, **changes})


def suite_of(override: KernelOverride) -> type[KernelOverrideSuite]:
    class Suite(KernelOverrideSuite):
        def create_override(self, ctx: WorkerContext) -> KernelOverride:
            return override

    return Suite


@pytest.mark.parametrize("name", SEAMS)
def test_the_plain_kernels_pass(name: str) -> None:
    outcome = run_suite(suite_of(describe(name, SEAMS[name].reference)))
    assert outcome.failed == {}
    assert "test_it_computes_what_the_plain_kernel_does" in outcome.passed


# Kernels of our own that are right: written differently, one of them batch-invariant.


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    size = gate_up.shape[-1] // 2
    gate = gate_up[..., :size].float()
    return (gate / (1 + torch.exp(-gate)) * gate_up[..., size:]).to(gate_up.dtype)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    exact = x.float()
    return (exact * torch.rsqrt(exact.square().mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    residual.copy_(residual + x)
    return rms_norm(residual, weight, eps), residual


class TestSiluAndMul(KernelOverrideSuite):
    def create_override(self, ctx: WorkerContext) -> KernelOverride:
        return describe("silu_and_mul", silu_and_mul, is_batch_invariant=True)


class TestAddRmsNorm(KernelOverrideSuite):
    def create_override(self, ctx: WorkerContext) -> KernelOverride:
        return describe("add_rms_norm", add_rms_norm, dtypes=frozenset({"float32", "bfloat16"}))


# Mutants.


def ignores_dtype(gate_up: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(gate_up.float())


def swaps_the_halves(gate_up: torch.Tensor) -> torch.Tensor:
    return silu_and_mul(torch.cat(gate_up.chunk(2, dim=-1)[::-1], dim=-1))


def crashes_on_empty_input(gate_up: torch.Tensor) -> torch.Tensor:
    if not gate_up.numel():
        raise IndexError("list index out of range")
    return silu_and_mul(gate_up)


def only_two_dimensions(gate_up: torch.Tensor) -> torch.Tensor:
    rows, size = gate_up.shape
    return silu_and_mul(gate_up).view(rows, size // 2)


def overwrites_its_input(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return gate.copy_(torch.nn.functional.silu(gate)).mul(up)


def returns_a_view(gate_up: torch.Tensor) -> torch.Tensor:
    return gate_up[..., : gate_up.shape[-1] // 2].copy_(silu_and_mul(gate_up))


class KeepsState:
    """A buffer of the largest call so far is handed out again, uncleared."""

    buffer = torch.zeros(0, 0)

    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        result = silu_and_mul(gate_up)
        if result.dim() == 2 and self.buffer.shape == result.shape and self.buffer.dtype == result.dtype:
            return self.buffer
        if result.numel():
            self.buffer = result + 1
        return result


class CouplesRows:
    def __call__(self, gate_up: torch.Tensor) -> torch.Tensor:
        result = silu_and_mul(gate_up)
        return result + result.sum() * 1e-9 if len(result) > 1 else result


def norm_in_low_precision(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    total = torch.zeros_like(x[..., :1])
    for column in range(x.shape[-1]):
        total += x[..., column : column + 1] ** 2
    return x / (total / x.shape[-1] + eps * 10_000).sqrt() * weight


def norm_of_contiguous_rows(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    flat = torch.as_strided(x, x.shape, torch.empty(x.shape).stride())
    return rms_norm(flat, weight, eps)


def forgets_the_residual(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    total = residual + x
    return rms_norm(total, weight, eps), total


def rotates_everything(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> torch.Tensor:
    half = heads.shape[-1] // 2
    wide = [torch.nn.functional.pad(factor, (0, heads.shape[-1] - rotary_size)) for factor in (cos, sin)]
    swapped = torch.cat((heads[..., half:], heads[..., :half]), dim=-1)
    return heads.copy_(heads * wide[0] + swapped * wide[1])


def drops_the_bias(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return torch.nn.functional.linear(x, weight)


def cuts_ties(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    if top_k is not None:
        order = logits.argsort(dim=-1, descending=True, stable=True)
        for row, count in enumerate(top_k.tolist()):
            if count:
                logits[row, order[row, count:]] = -torch.inf
    plain: torch.Tensor = SEAMS["top_k_top_p"].reference(logits, None, top_p)
    return plain


def patches_the_framework(gate_up: torch.Tensor) -> torch.Tensor:
    torch.nn.functional.silu = silu_and_mul  # type: ignore[assignment]
    return silu_and_mul(gate_up)


MUTANTS = {
    "ignores dtype": describe("silu_and_mul", ignores_dtype),
    "wrong numerics": describe("silu_and_mul", swaps_the_halves),
    "crashes on empty input": describe("silu_and_mul", crashes_on_empty_input),
    "expects two dimensions": describe("silu_and_mul", only_two_dimensions),
    "overwrites its input": describe("silu_and_mul", overwrites_its_input),
    "returns a view of its input": describe("silu_and_mul", returns_a_view),
    "keeps state": describe("silu_and_mul", KeepsState()),
    "couples rows": describe("silu_and_mul", CouplesRows(), is_batch_invariant=True),
    "low precision": describe("rms_norm", norm_in_low_precision),
    "expects contiguous rows": describe("rms_norm", norm_of_contiguous_rows),
    "forgets the residual": describe("add_rms_norm", forgets_the_residual),
    "rotates everything": describe("rotary_embedding", rotates_everything),
    "drops the bias": describe("linear", drops_the_bias),
    "cuts ties": describe("top_k_top_p", cuts_ties),
    "unknown seam": describe("silu", silu_and_mul),
    "other parameters": describe("silu_and_mul", rms_norm),
    "no device": describe("silu_and_mul", silu_and_mul, device_types=frozenset()),
    "misspelt dtype": describe("silu_and_mul", silu_and_mul, dtypes=frozenset({"fp32", "float32"})),
    "never applies": describe("silu_and_mul", silu_and_mul, dtypes=frozenset({"float64"})),
    "refuses without a reason": describe("silu_and_mul", silu_and_mul, refuse=lambda case: ""),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_fails(name: str) -> None:
    assert run_suite(suite_of(MUTANTS[name]), first_failure=True).failed


def test_a_patch_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No path patching: a run-time comparison before and after."""
    monkeypatch.setattr(torch.nn.functional, "silu", torch.nn.functional.silu)
    failed = run_suite(suite_of(describe("silu_and_mul", patches_the_framework)), only="patches_nothing").failed
    assert "torch.nn.functional.silu" in failed["test_creating_and_calling_it_patches_nothing"]


def test_changing_ones_mind_is_noticed() -> None:
    class Moody:
        calls: ClassVar[int] = 0

        def __call__(self, case: KernelCase) -> str | None:
            Moody.calls += 1
            return "not today" if Moody.calls % 2 else None

    assert run_suite(suite_of(describe("silu_and_mul", silu_and_mul, refuse=Moody())), first_failure=True).failed


def test_refused_cases_are_skipped_with_their_reason() -> None:
    outcome = run_suite(suite_of(describe("silu_and_mul", silu_and_mul, dtypes=frozenset({"bfloat16"}))))
    assert outcome.failed == {}
    assert "it computes bfloat16, not float" in outcome.skipped["test_it_computes_what_the_plain_kernel_does"]


@pytest.mark.parametrize("name", SEAMS)
def test_problems_cover_no_tokens_one_and_many(name: str) -> None:
    problems = kernel_problems(name, torch.float32, torch.device("cpu"))
    least = {1} if name == "top_k_top_p" else {0, 1}
    assert least < {len(problem.arguments[0]) for problem in problems}
    assert len({problem.title for problem in problems}) == len(problems)
    again = kernel_problems(name, torch.float32, torch.device("cpu"))
    for problem, other in zip(problems, again, strict=True):
        for one, two in zip(problem.copies(), other.arguments, strict=True):
            assert torch.equal(one, two) and one.stride() == two.stride() if torch.is_tensor(one) else one == two

"""What the rules of attention backends share: the backend under test, and how its answers are compared."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.interfaces.attention import AttentionBackend, AttentionNeed, KVWriteMode
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.plugin import ProbeStatus
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.attention_oracle import dense_attention
from hardpoint_testing_torch.attention_problems import LAYER, AttentionProblem, make_problem, run_backend
from hardpoint_testing_torch.attention_shape import AttentionShape

__all__ = ["LONG", "MIXED", "AttentionRules", "edge_rows", "variant"]

MIXED = [(17, 1), (5, 1), (0, 9), (12, 1), (3, 7), (30, 1)]
"""Three decodes, a first chunk, a later chunk and one more decode; contexts end inside, before and at block ends."""

LONG = [(0, 70), (40, 33), (64, 1), (63, 1), (65, 1), (0, 1)]


def edge_rows(block_size: int) -> list[tuple[int, int]]:
    """Contexts and queries that end right before, at and right behind the end of a block, and single tokens."""
    around = (block_size - 1, block_size, block_size + 1)
    rows = [(context, 1) for context in (0, *around)] + [(0, query) for query in around]
    rows += [(context, query) for context in around for query in (2, block_size)]
    return [row for row in rows if row[1] > 0]


def variant(shape: AttentionShape, **changes: Any) -> AttentionShape:
    """``shape`` with ``changes``."""
    return replace(shape, **changes)


class AttentionRules(PluginSuite):
    """Set ``plugin`` to the name of an installed backend, or override the fixture ``backend``.

    Tolerances are relative to outputs of order one. ``stored_tolerance``: larger ones, by the name of what keys and
    values are stored as, for kernels that compute in a quantized cache's own dtype. ``latent_sizes`` are sizes of keys
    and of the values in them, for backends with latents (MLA). Kernels that run elsewhere than on the CPU name torch's
    ``device`` and the ``description`` that they are asked about.
    """

    kind: ClassVar[str] = "attention_backend"
    tolerance: ClassVar[Mapping[torch.dtype, float]] = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 2e-3}
    stored_tolerance: ClassVar[Mapping[str, float]] = {"int8_per_token_head": 1e-3}
    head_sizes: ClassVar[tuple[int, ...]] = (64, 80, 128)
    latent_sizes: ClassVar[tuple[tuple[int, int], ...]] = ((24, 16), (576, 512))
    device: ClassVar[str] = "cpu"
    description: ClassVar[DeviceDescription] = DeviceDescription(device_type="cpu", name="test")

    def create_backend(self, ctx: WorkerContext) -> AttentionBackend:
        """The backend under test, as its factory makes it."""
        made: AttentionBackend = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def backend(self) -> AttentionBackend:
        if self.plugin is not None:
            declared = self.runtime().load_factory(self.kind, self.plugin).declaration
            answer = declared.probe() if declared.probe is not None else None
            if answer is not None and answer.status is not ProbeStatus.AVAILABLE:
                pytest.skip(f"{self.plugin} is {answer.status} here: {answer.reason}")
        return self.create_backend(self.context(WorkerContext, rank=0, device=torch.device(self.device)))

    @pytest.fixture
    def base(self, backend: AttentionBackend) -> AttentionShape:
        """Smallest shape used where nothing else is asked; override for backends with stricter shapes."""
        return AttentionShape()

    def problem(
        self,
        shape: AttentionShape,
        rows: Sequence[tuple[int, int]],
        seed: int = 0,
        *,
        encoder_rows: Sequence[tuple[int, int]] | None = None,
    ) -> AttentionProblem:
        """As :func:`make_problem` makes it, on the device under test."""
        return make_problem(shape, rows, seed, encoder_rows=encoder_rows).to(self.device)

    def need(self, shape: AttentionShape, **changes: Any) -> AttentionNeed:
        """``shape`` as a question about the device under test, with ``changes``."""
        return replace(shape.need(self.description), **changes)

    def require(self, backend: AttentionBackend, shape: AttentionShape) -> None:
        """Skip the test, with the backend's own words, where it does not serve ``shape``."""
        reason = self.reason(backend, self.need(shape))
        if reason is not None:
            pytest.skip(f"{backend.name}: {reason}")

    def accepted(self, backend: AttentionBackend, shapes: list[AttentionShape]) -> list[AttentionShape]:
        """Those of ``shapes`` that the backend serves; skips the test where it serves none."""
        served = [shape for shape in shapes if self.reason(backend, self.need(shape)) is None]
        if not served:
            why = self.reason(backend, self.need(shapes[0])) if shapes else "no sizes are given"
            pytest.skip(f"{backend.name}: {why}")
        return served

    def latents(self, backend: AttentionBackend, base: AttentionShape) -> list[AttentionShape]:
        """The shapes of ``latent_sizes`` that the backend accepts; skips the test where there is none."""
        sizes = self.latent_sizes
        return self.accepted(
            backend, [variant(base, num_kv_heads=1, head_size=size, latent_values=part) for size, part in sizes]
        )

    def reason(self, backend: AttentionBackend, need: AttentionNeed) -> str | None:
        """The backend's answer, which must be None or words for people."""
        answer = backend.objection(need)
        assert answer is None or (isinstance(answer, str) and answer.strip()), f"objection() answers {answer!r}"
        return answer

    def tolerance_of(self, shape: AttentionShape) -> float:
        return max(self.tolerance[shape.dtype], self.stored_tolerance.get(shape.stored_as, 0.0))

    def check(self, backend: AttentionBackend, *problems: AttentionProblem) -> None:
        """The backend's outputs equal the dense float64 answers."""
        for problem in problems:
            self.require(backend, problem.shape)
            self.compare(problem, run_backend(backend, problem))

    def compare(self, problem: AttentionProblem, output: torch.Tensor, lse: torch.Tensor | None = None) -> None:
        """``output`` [T, H, V], and ``lse`` [T, H] where given, against the dense answers."""
        expected, expected_lse = dense_attention(problem)
        tolerance = self.tolerance_of(problem.shape)
        given = f"of {problem.shape} and the rows {problem.rows}"
        assert_near(output.double().cpu(), expected, tolerance, f"the output {given}")
        if lse is not None:
            assert_near(lse.double().cpu(), expected_lse, tolerance, f"the log-sum-exp {given}")

    def write(self, backend: AttentionBackend, problem: AttentionProblem, cache: torch.Tensor) -> None:
        """The step's keys and values into ``cache``, where that is not part of ``forward``."""
        if backend.kv_write_mode is KVWriteMode.SEPARATE:
            impl = backend.create_impl(problem.params())
            impl.write_kv(problem.key, problem.value, cache, problem.slot_mapping())

    def builder(self, backend: AttentionBackend, problem: AttentionProblem, rows: int = 64, tokens: int = 512) -> Any:
        """A metadata builder with room for ``rows`` and ``tokens``."""
        return backend.create_builder(problem.spec(), [LAYER], rows, tokens, problem.query.device)


def assert_near(actual: torch.Tensor, expected: torch.Tensor, tolerance: float, what: str) -> None:
    """Raises ``AssertionError`` saying what differs."""
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{what}: {text}")

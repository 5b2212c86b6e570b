"""The scaling study and profiles: which sizes are run, and where sampled time is put."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from hardpoint.config import AppConfig
from hardpoint_bench.profile import GROUPS, OTHER, kernel_share, shares
from hardpoint_bench.scaling import Scaling, thread_counts
from hardpoint_bench.sides import Program, Side
from hardpoint_bench.suite_report import scaling_table
from scripted_sides import OUR_FACTS, told_to, write_side

APP = AppConfig.model_validate({"engines": {"tiny": {"model": {"name": "tiny"}}}})
BUSY = """
import time

def sums_up(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        sum(range(100))

def sleeps(seconds):
    time.sleep(seconds)

class Engine:
    facts = {}

    def run(self, prompts, output_len):
        sums_up(0.15)
        sleeps(0.3)
        return {
            "seconds": 0.4, "ttft_s": 0.1, "decode_tokens_per_s": None, "num_output_tokens": output_len,
            "num_prompt_tokens": len(prompts[0]), "num_cached_tokens": 0,
        }

    def close(self):
        pass

def load(job, phases):
    return Engine()
"""


def test_time_goes_to_the_innermost_frame_that_has_a_group() -> None:
    main = "__main__:<module>;hardpoint.engine.llm:generate;hardpoint.engine.core:step"
    run = f"{main};hardpoint_executors.uniproc:execute;hardpoint_torch_runtime.runner.runner:execute"
    found = shares(
        {
            main: 1.0,
            f"{main};hardpoint_scheduling.fcfs:schedule;heapq:heappush": 2.0,
            f"{run};hardpoint_torch_runtime.layers.linear:forward;torch.nn.functional:linear": 8.0,
            f"{run};hardpoint_torch_runtime.layers.norm:forward": 1.0,
            f"{run};hardpoint_torch_runtime.sampling.sampler:sample": 1.0,
            f"{run};hardpoint_cpu.native.stack:run": 5.0,
            run: 1.0,
            "__main__:<module>;runpy:run": 1.0,
        }
    )
    assert {name: round(share * 20) for name, share in found.items() if share} == {
        "native kernels": 5, "linear layers": 8, "other layers": 1, "sampling": 1, "runner": 1, "scheduler": 2,
        "engine": 1, OTHER: 1,
    }  # fmt: skip
    assert kernel_share(found) == pytest.approx(14 / 20)
    assert shares({}) == {}


def test_a_name_that_only_begins_alike_is_another_module() -> None:
    assert shares({"hardpointer.core:run": 1.0})[OTHER] == 1.0


@pytest.mark.slow
def test_modules_of_groups_exist() -> None:
    prefixes = [prefix for group in GROUPS for prefix in group.prefixes]
    assert [prefix for prefix in prefixes if importlib.util.find_spec(prefix) is None] == []


def test_threads_double() -> None:
    assert [thread_counts(most) for most in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


@pytest.mark.slow
def test_samples_cover_calls_that_no_sample_interrupts(tmp_path: Path) -> None:
    """Shares within wide bounds: a busy machine makes both parts longer, not shorter."""
    (tmp_path / "busy.py").write_text(BUSY, encoding="utf-8")
    with Side(Program("busy", tmp_path / "busy.py"), {}) as side:
        sampled = side.run([[1, 2]], 1, sample_every_s=0.002)
        plain = side.run([[1, 2]], 1)
    by_leaf: dict[str, float] = {}
    for stack, seconds in sampled.stacks.items():
        for frame in stack.split(";"):
            by_leaf[frame.partition(":")[2]] = by_leaf.get(frame.partition(":")[2], 0.0) + seconds
    assert by_leaf["sleeps"] >= 0.25
    assert by_leaf["sums_up"] >= 0.1
    assert by_leaf["run"] >= by_leaf["sleeps"] + by_leaf["sums_up"] - 1e-6
    assert plain.stacks == {}


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    folder = tmp_path_factory.mktemp("scaling")
    ours = write_side(folder, "hardpoint", {**OUR_FACTS, "max_model_len": 600}, 2.0)
    return folder, Scaling(APP, 2, 0, 3, shrink=8, ours=ours, tell=lambda text: None).run()


@pytest.mark.slow
def test_sizes_are_run_in_turn_and_every_run_has_its_own_ids(study: tuple[Path, dict[str, Any]]) -> None:
    folder, found = study
    runs = [line for line in told_to(folder) if not line[0].startswith("load ")]
    assert [len(line[1]) for line in runs[:6]] == [1, 2, 4, 8, 16, 32]
    assert [row["num_requests"] for row in found["batch"]] == [1, 2, 4, 8, 16, 32]
    assert [row["prompt_length"] for row in found["context"]] == [16, 32, 64, 128, 256, 512, 568]
    assert [row["threads"] for row in found["threads"]] == [1, 2, 3]
    firsts = [tuple(line[1][0]) for line in runs[:18]]
    assert len(set(firsts)) == len(firsts)
    loads = [
        line[1]["config"]["engines"]["tiny"]["scheduler"] for line in told_to(folder) if line[0] == "load hardpoint"
    ]
    assert {one["max_num_seqs"] for one in loads} == {32}


@pytest.mark.slow
def test_figures_are_medians_and_steps_their_inverse(study: tuple[Path, dict[str, Any]]) -> None:
    _, found = study
    row = found["batch"][1]
    assert row["output_tokens_per_s"] == {"median": 32.0, "low": 32.0, "high": 32.0}
    assert row["step_s"]["median"] == 0.25
    assert list(found["profiles"]) == ["decode, batch 1", "decode, batch 32", "prefill of 1,024 tokens"]
    text = scaling_table(found)
    assert "decode, batch 32" in text
    assert text.splitlines()[0] == OUR_FACTS["precision"]

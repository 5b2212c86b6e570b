"""What a decode step takes outside kernels: which runs are made, and what their samples come to."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from hardpoint.config import AppConfig
from hardpoint_bench.overhead_command import TARGETS, Overhead, overhead_table
from hardpoint_bench.sides import Program

APP = AppConfig.model_validate({"engines": {"tiny": {"model": {"name": "tiny"}}}})
SIDE = """
import json, time, types
from pathlib import Path

LOG = Path(__file__).with_suffix(".log")

def told(line):
    with LOG.open("a") as log:
        log.write(json.dumps(line) + "\\n")

def spend(seconds):
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        pass

def within(module, function):
    # As if it was a function of ``module``.
    return types.FunctionType(function.__code__, {"__name__": module, "spend": spend})

kernel = within("hardpoint_cpu.native.stack", lambda seconds: spend(seconds))
sampling = within("hardpoint_torch_runtime.sampling.sampler", lambda seconds: spend(seconds))

class Engine:
    facts = {"vocab_size": 5000, "precision": "float32 all over"}

    def run(self, prompts, output_len):
        told(["run", len(prompts), len(prompts[0]), output_len, prompts[0][:4]])
        started = time.perf_counter()
        kernel(0.06)
        sampling(0.03)
        return {
            "seconds": time.perf_counter() - started, "ttft_s": 0.01, "decode_tokens_per_s": None,
            "num_output_tokens": output_len * len(prompts), "num_prompt_tokens": sum(map(len, prompts)),
            "num_cached_tokens": 0,
        }

    def close(self):
        pass

def load(job, phases):
    told(["load", job["config"]["engines"]["tiny"]["scheduler"]["max_num_seqs"]])
    return Engine()
"""


@pytest.mark.slow
def test_steps_are_shared_out_between_kernels_and_the_rest(tmp_path: Path) -> None:
    side = tmp_path / "scripted.py"
    side.write_text(SIDE, encoding="utf-8")
    ours = Program("scripted", side)
    found = Overhead(APP, 2, 0, 3, shrink=8, ours=ours, tell=lambda text: None).run()
    log: list[Any] = [json.loads(line) for line in side.with_suffix(".log").read_text(encoding="utf-8").splitlines()]
    assert log[0] == ["load", 32]
    # Unmeasured once, so that prompts are cached and all steps of the others are decodes.
    assert [line[1:4] for line in log[1:]] == [[1, 128, 16]] * 3 + [[32, 128, 16]] * 3
    assert len({tuple(line[4]) for line in log[1:4]}) == 1
    assert [row["batch"] for row in found["batches"]] == list(TARGETS)
    for row in found["batches"]:
        # Wide bounds: a busy machine may take either part's time away.
        assert 0.05 < row["outside_share"]["median"] < 0.95
        total = row["inside_us"]["median"] + row["outside_us"]["median"]
        assert total == pytest.approx(row["step_us"]["median"], rel=0.5)
        assert row["parts_us"]["sampling"]["median"] > 0
        assert "native kernels" not in row["parts_us"]
        assert row["most_outside"] == TARGETS[row["batch"]]
    lines = overhead_table(found).splitlines()
    assert lines[0] == "float32 all over, 3 threads"
    assert lines[1].split() == ["batch", "1", "batch", "32"]
    assert any(line.split() == ["at", "most", "15%", "5%"] for line in lines)

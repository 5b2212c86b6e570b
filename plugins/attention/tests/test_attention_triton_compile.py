"""What real arguments compile to, on a device that is not there: in a child process that does not interpret kernels."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SCRIPT = """
import json
import sys
import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction


class Absent:
    "Answers for a device; nothing is run."
    get_current_target = lambda self: GPUTarget("cuda", int(sys.argv[1]), 32)
    get_current_device = lambda self: 0
    get_current_stream = lambda self, device=None: 0
    set_current_device = lambda self, device: None
    get_active_torch_device = lambda self: torch.device("cpu")


driver.set_active(Absent())
launch = JITFunction.run
JITFunction.run = lambda self, *args, grid, warmup, **settings: launch(self, *args, grid=grid, warmup=True, **settings)

from hardpoint.interfaces.attention import AttentionKind
from hardpoint_attention.triton import TritonBackend, impl
from hardpoint_attention.triton.configs import TABLES, Phase, SizeClass, Target
from hardpoint_attention.triton.device import DeviceFacts
from hardpoint_attention.triton.kernels.attention import attend
from hardpoint_attention.triton.kernels.cache_write import write_states
from hardpoint_attention.triton.planning import LaunchPlan
from hardpoint_testing_torch import AttentionShape, make_problem, run_backend
from hardpoint_torch_runtime.float8_support import converts_e4m3

target = Target("sm_" + sys.argv[1])
impl.device_facts = lambda device: DeviceFacts(target, 100, converts_e4m3(divmod(int(sys.argv[1]), 10), is_hip=False))
TILES = TABLES[target][SizeClass.UP_TO_64, 2, Phase.DECODE]
backend = TritonBackend(plan=lambda question: LaunchPlan(TILES, 1))


def compiled(*steps, **shape):
    "How many variants of the two kernels the steps of a layer take."
    before = [len(kernel.device_caches[0][0]) for kernel in (attend, write_states)]
    layer = AttentionShape(head_size=64, **{"dtype": torch.bfloat16, "block_size": 16, **shape})
    for rows in steps:
        problem = make_problem(layer, rows)
        table = torch.zeros(len(rows), 16, dtype=torch.int32)
        table[:, : problem.block_table.shape[1]] = problem.block_table
        object.__setattr__(problem, "block_table", table)
        run_backend(backend, problem)
    after = [len(kernel.device_caches[0][0]) for kernel in (attend, write_states)]
    return [new - old for new, old in zip(after, before)]


steps = [[(9, 1)], [(1, 1), (15, 1)], [(20, 1)] * 16, [(3, 4), (0, 17), (16, 1)], [(0, 33)]]
features = {
    "masks": dict(uses_row_causality=True, chunk_size=8, uses_mm_prefix=True),
    "scores": dict(logits_soft_cap=3.0, uses_sinks=True, uses_alibi=True, sliding_window=5),
    "prompt": dict(sliding_window=4, keeps_prompt=True),
    "fp8": dict(kv_cache_dtype="fp8"),
    "fp8 by head": dict(kv_cache_dtype="fp8", per_head_scales=True),
    "fp8_e5m2": dict(kv_cache_dtype="fp8_e5m2"),
    "int8": dict(kv_cache_dtype="int8_per_token_head"),
    "encoder": dict(kind=AttentionKind.ENCODER_ONLY, causal=False),
    "across": dict(kind=AttentionKind.ENCODER_DECODER),
    "float32": dict(dtype=torch.float32),
}
answers = {"plain": compiled(*steps)}
for name, feature in features.items():
    answers[name] = compiled([(0, 3)] if name == "encoder" else [(5, 1)], **feature)
print(json.dumps(answers))
"""


@pytest.mark.parametrize("capability", ["80", "90"])
def test_steps_of_any_size_run_the_same_compiled_kernel(tmp_path: Path, capability: str) -> None:
    """P5.5, R5.53: numbers of rows, tokens and keys are no part of what a kernel is compiled for, and every feature's
    arguments compile as they are passed: on 8.0 an 8-bit cache by its codes, on 9.0 by its type."""
    pytest.importorskip("triton")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("TRITON_")}
    environment |= {"TRITON_CACHE_DIR": str(tmp_path), "TRITON_DEFAULT_FP_FUSION": "1"}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, capability],
        env=environment,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    answers = json.loads(done.stdout.strip().splitlines()[-1])
    assert answers.pop("plain") == [1, 1]
    assert {name: counts[0] for name, counts in answers.items()} == dict.fromkeys(answers, 1)

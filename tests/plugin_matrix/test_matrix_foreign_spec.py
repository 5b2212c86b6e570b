"""A KV cache spec of a stranger, with a manager of its own, from layout to scheduler; nothing of ours knows it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from workspace import ROOT, read_toml

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

EXAMPLE = ROOT / "examples_plugins/recent_tokens"

SCRIPT = """
import dataclasses
import sys
from hardpoint.interfaces import FullAttentionSpec, KVPlanRequest, SchedulerLimits
from hardpoint.testing.kv_layout_suite import KVLayoutSuite, check_memory
from hardpoint.testing.scheduler_loop import make_request, scheduler_context
from hardpoint.testing.scheduler_suite import SchedulerSuite
from recent_tokens import RecentTokensManager, RecentTokensSpec

class Layouts(KVLayoutSuite):
    plugin = sys.argv[1]

class Schedulers(SchedulerSuite):
    plugin = "fcfs"

usual = dict(block_size=4, num_kv_heads=1, head_size=1, dtype="int8")
layers = {f"l{i}": RecentTokensSpec(**usual, window=8) for i in range(2)}
layers["full"] = FullAttentionSpec(**usual)
plan = Layouts().create_layout().plan(KVPlanRequest(layers, 0, 64, 16, num_blocks=64))
check_memory(plan, layers)
print(sorted({group.spec.kind for group in plan.groups}))
limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
context = dataclasses.replace(scheduler_context(limits, 64), kv_cache=plan)
scheduler = Schedulers().create_scheduler(context)
scheduler.add(make_request("a", list(range(3, 33)), 4))
step = scheduler.schedule()
kinds = {type(group.manager) for group in scheduler._state.kv._groups}
print(RecentTokensManager in kinds, len(kinds), all(len(blocks) for blocks in step.new_rows[0].block_ids))
"""


@pytest.mark.parametrize("layout", ["layer_outermost", "block_outermost"])
def test_a_package_out_of_tree_brings_spec_and_manager(layout: str, tmp_path: Path) -> None:
    """R1.66: found by its entry point alone; both layouts plan it, and the scheduler uses its manager."""
    project = read_toml(EXAMPLE / "pyproject.toml")["project"]
    metadata = tmp_path / "hardpoint_example_recent_tokens-1.0.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 1.0.0\n")
    lines = [
        f"[{group}]\n" + "".join(f"{name} = {target}\n" for name, target in entries.items())
        for group, entries in project["entry-points"].items()
    ]
    (metadata / "entry_points.txt").write_text("\n".join(lines))
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join((str(tmp_path), str(EXAMPLE / "src")))}
    run = subprocess.run(
        [sys.executable, "-c", SCRIPT, layout], env=environ, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines() == ["['full_attention', 'recent_tokens']", "True 2 True"]

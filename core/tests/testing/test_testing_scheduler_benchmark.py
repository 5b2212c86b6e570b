"""The benchmark shows what a scheduler costs, and makes work that grows too fast visible on any machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces import Scheduler, SchedulerContext, SchedulerOutput
from hardpoint.testing import FakeScheduler
from hardpoint.testing.scheduler_benchmark import Benchmark, StepCost, count_lines, main, measure, measure_installed
from hardpoint.testing.scheduler_loop import BLOCK_SIZE
from hardpoint.testing.scheduler_suite import SchedulerSuite
from hardpoint.testing.suite_runner import run_suite

PLUGIN = """
from hardpoint.interfaces import NoOptions, SchedulerContext, plugin
from hardpoint.testing import FakeScheduler

@plugin("scheduler")
def create(ctx: SchedulerContext, options: NoOptions) -> FakeScheduler:
    return FakeScheduler(ctx.limits, num_blocks=ctx.kv_cache.num_blocks, block_size=4)
"""


def make_plain(ctx: SchedulerContext) -> Scheduler:
    return FakeScheduler(ctx.limits, num_blocks=ctx.kv_cache.num_blocks, block_size=BLOCK_SIZE)


class LooksAtEveryPair(FakeScheduler):
    """Compares each running request with each other one, as a naive priority queue does."""

    def schedule(self) -> SchedulerOutput:
        behind = 0
        for one in self.running:
            for other in self.running:
                behind += one.computed < other.computed
        return super().schedule()


def make_quadratic(ctx: SchedulerContext) -> Scheduler:
    return LooksAtEveryPair(ctx.limits, num_blocks=ctx.kv_cache.num_blocks, block_size=BLOCK_SIZE)


def test_proportional_work_is_not_steep() -> None:
    benchmark = measure(make_plain, counts=(8, 32), num_steps=4, rounds=1)
    assert [cost.num_requests for cost in benchmark.costs] == [8, 32]
    assert 0.5 < benchmark.growth < 1.2
    assert not benchmark.is_steep
    for cost in benchmark.costs:
        assert cost.lines == cost.reference_lines, "the same code executes the same lines"
        assert cost.microseconds > 0
        assert cost.ratio > 0


def test_quadratic_work_is_visible_in_the_lines() -> None:
    """L12.21: counted, not timed: the same on a busy machine."""
    benchmark = measure(make_quadratic, counts=(8, 32), num_steps=4, rounds=1)
    assert benchmark.growth > 1.5
    assert benchmark.is_steep
    assert "MORE than in proportion" in benchmark.summary
    small, large = benchmark.costs
    assert large.lines - large.reference_lines > 10 * (small.lines - small.reference_lines)


def test_counting_is_exact_and_restores_the_tracer() -> None:
    def work(times: int) -> None:
        for _ in range(times):
            pass

    before = sys.gettrace()
    figures = []
    for times in (10, 20):
        with count_lines() as counted:
            work(times)
        figures.append(counted[0])
    assert figures[1] - figures[0] == 20
    assert sys.gettrace() is before


def test_one_count_has_no_growth() -> None:
    cost = StepCost(num_requests=8, microseconds=3.0, lines=10, reference_microseconds=0.0, reference_lines=10)
    assert Benchmark((cost,)).growth == 1.0
    assert cost.ratio == 3_000.0, "a reference too fast to measure is no division by zero"


def test_a_scheduler_that_runs_too_few_is_not_compared() -> None:
    class Stingy(FakeScheduler):
        def _admit(self) -> None:
            """Nobody gets in."""

    def make(ctx: SchedulerContext) -> Scheduler:
        return Stingy(ctx.limits, num_blocks=ctx.kv_cache.num_blocks, block_size=BLOCK_SIZE)

    with pytest.raises(ValueError, match="not all of 4 requests run"):
        measure(make, counts=(4,), num_steps=2, rounds=1)


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "acme_scheduler-1.0.dist-info"
    folder.mkdir()
    headers = "Metadata-Version: 2.3\nName: acme-scheduler\nVersion: 1.0\nRequires-Dist: hardpoint-core<1\n"
    (folder / "METADATA").write_text(headers)
    (folder / "entry_points.txt").write_text("[hardpoint.scheduler.v1]\nacme = acme_scheduler:create\n")
    (tmp_path / "acme_scheduler.py").write_text(PLUGIN)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    yield tmp_path
    sys.modules.pop("acme_scheduler", None)


def test_an_installed_scheduler_is_measured_by_name(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["acme", "--running", "4", "2", "--steps", "2"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "acme"
    assert [line.split()[0] for line in lines[1:4]] == ["running", "2", "4"]
    assert lines[4].startswith("cost of a step by running requests")
    assert main(["acme", "--running", "2", "--steps", "2", "--json"]) == 0
    document = json.loads(capsys.readouterr().out)
    assert (document["scheduler"], document["costs"][0]["num_requests"]) == ("acme", 2)


def test_the_module_is_a_command(site: Path) -> None:
    arguments = ["-m", "hardpoint.testing.scheduler_benchmark", "acme", "--running", "2", "--steps", "1"]
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "us/step" in done.stdout


def test_unknown_names_and_senseless_numbers_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(PluginNotFoundError, match="no scheduler plugin 'nobodys'"):
        measure_installed("nobodys")
    for arguments in (["x", "--running", "0"], ["x", "--steps", "0"]):
        with pytest.raises(SystemExit):
            main(arguments)
        assert "at least 1" in capsys.readouterr().err


def test_the_kit_reports_figures_without_judging_them() -> None:
    """L12.21."""

    class Suite(SchedulerSuite):
        def create_scheduler(self, ctx: SchedulerContext) -> Scheduler:
            return make_quadratic(ctx)

    outcome = run_suite(Suite, only="cost_of_a_step")
    assert outcome.passed == {"test_cost_of_a_step"}
    (figure,) = outcome.figures
    assert "MORE than in proportion" in figure

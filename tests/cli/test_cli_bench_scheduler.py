"""``hardpoint bench scheduler``: installed schedulers measured and replayed from the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_support import CommandLine, run_process

FIGURES = [
    "step_us_median", "step_us_p99", "us_per_running_request", "prefix_hit_rate", "preemptions", "blocks_leaked",
]  # fmt: skip
SMALL = ("--running", 6, "--steps", 40, "--prompt-len", 20, "--no-ipc", "--json")


def measured(hardpoint: CommandLine, *options: object) -> dict[str, Any]:
    (report,) = hardpoint("bench", "scheduler", *options).json_lines()
    return report


def write(path: Path, *lines: dict[str, Any]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def test_the_steady_state_is_measured_and_checked(hardpoint: CommandLine) -> None:
    report = measured(hardpoint, *SMALL, "--waiting", 4, "--shared-prefix", 16)
    assert list(report)[:6] == FIGURES
    assert 0 < report["step_us_median"] <= report["step_us_p99"]
    assert report["us_per_running_request"] == pytest.approx(report["step_us_median"] / 6, abs=0.01)
    assert report["tokens"] == report["rows"] == 6 * 40
    assert (report["running"], report["waiting"], report["steps"]) == (6, 4, 40)
    assert (report["preemptions"], report["blocks_leaked"]) == (0, 0)
    # Five of six prompts find 16 of their 20 tokens.
    assert report["prefix_hit_rate"] == pytest.approx(5 * 16 / (6 * 20), abs=1e-4)
    assert report["every_request_every_step"] is True
    assert report["hashes_checked"] == 6
    assert report["scheduler"].startswith("scheduler:fcfs (")


@pytest.mark.slow
def test_boundaries_fall_together_unless_spread(hardpoint: CommandLine) -> None:
    together = measured(hardpoint, *SMALL)
    assert (together["aligned_boundaries"], together["boundary_rows_max"]) == (True, 6)
    apart = measured(hardpoint, *SMALL, "--spread-boundaries")
    assert (apart["aligned_boundaries"], apart["boundary_rows_max"]) == (False, 1)


@pytest.mark.parametrize("scheduler", ["fcfs", pytest.param("priority", marks=pytest.mark.slow)])
def test_steps_ahead(hardpoint: CommandLine, scheduler: str) -> None:
    for flag in ("--async", "--async-scheduling"):
        report = measured(hardpoint, *SMALL, flag, "--scheduler", scheduler)
        assert report["max_inflight_steps"] == 2
        assert report["tokens"] == 6 * 40
        assert report["hashes_checked"] == 6


def test_too_few_blocks_make_the_scheduler_preempt(hardpoint: CommandLine) -> None:
    report = measured(hardpoint, *SMALL, "--blocks", 12)
    assert report["blocks"] == 12
    assert report["every_request_every_step"] is False
    assert report["preemptions"] > 0
    assert report["blocks_leaked"] == 0
    assert 0 < report["tokens"] < 6 * 40


@pytest.mark.slow
def test_any_scheduler_with_options(hardpoint: CommandLine) -> None:
    options = ("--scheduler", "policy", "--plugin", "scheduler.policy.policy=fair_share")
    assert measured(hardpoint, *SMALL, *options)["scheduler"].startswith("scheduler:policy (")
    done = hardpoint("bench", "scheduler", *SMALL, "--plugin", "scheduler.policy.polcy=x", "--scheduler", "policy")
    assert "unknown option plugins.scheduler.policy.polcy" in done.complaint()


@pytest.mark.slow
def test_settings_count_as_in_a_server(hardpoint: CommandLine, tmp_path: Path) -> None:
    settings = tmp_path / "server.yaml"
    text = "model: smollm2\ncache: {block_size: 8, prefix_caching: false}\n"
    text += "scheduler: {max_num_seqs: 5, chunked_prefill: false, long_prefill_threshold: 16}\n"
    settings.write_text(text, encoding="utf-8")
    report = measured(hardpoint, *SMALL[2:], "--config", settings)
    assert (report["block_size"], report["running"]) == (8, 5)
    assert (report["prefix_hit_rate"], report["hashes_checked"]) == (0.0, 0)


@pytest.mark.slow
def test_as_many_run_as_the_settings_allow(hardpoint: CommandLine) -> None:
    report = measured(hardpoint, *SMALL[2:], "--max-num-seqs", 8, "--max-num-active-seqs", 3)
    assert (report["running"], report["tokens"]) == (3, 3 * 40)


@pytest.mark.slow
def test_hashes_that_nobody_shares_need_no_warning(
    hardpoint: CommandLine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PYTHONHASHSEED", "random")
    done = hardpoint("bench", "scheduler", *SMALL, "--hash-algorithm", "xxhash")
    assert done.json_lines()[0]["hashes_checked"] == 6
    assert "cannot be shared" not in done.err + caplog.text
    assert os.environ["PYTHONHASHSEED"] == "random"


@pytest.mark.slow
def test_runs_can_be_repeated(hardpoint: CommandLine) -> None:
    report = measured(hardpoint, *SMALL, "--repeats", 2)
    assert len(report["step_us_median_of_runs"]) == 2
    assert min(report["step_us_median_of_runs"]) == report["step_us_median"]


@pytest.mark.slow
def test_figures_for_people(hardpoint: CommandLine) -> None:
    done = hardpoint("bench", "scheduler", *SMALL[:-1])
    assert done.status == 0
    assert [line.split()[0] for line in done.out.splitlines()[:6]] == FIGURES


def test_the_help_explains_both_forms(hardpoint: CommandLine) -> None:
    text = " ".join(hardpoint("bench", "--help").out.split())
    assert "`hardpoint bench [MODEL]`" in text
    assert "`hardpoint bench scheduler`" in text
    for flag in ("--workload", "--running", "--trace", "--plot"):
        assert flag in text


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (("--running", "0"), "--running 0 must be at least 1"),
        (("--blocks", "1"), "--blocks 1 must be at least 2"),
        (("--blocks", "3"), "can never run"),
        (("--shared-prefix", "200"), "--shared-prefix 200 is longer than --prompt-len 128"),
        (("--max-num-seqs", "3", "--running", "4"), "--max-num-seqs 3 is not --running 4"),
        (("--max-num-active-seqs", "4", "--running", "8"), "--max-num-active-seqs 4 is not --running 8; give one"),
        (("--max-model-len", "200"), "--max-model-len 200 ends requests before the last of --steps 512"),
        (("--max-num-batched-tokens", "100"), "has no room for a token of each of --running 256"),
        (("--scheduler", "fcsf"), "no scheduler plugin 'fcsf' (did you mean 'fcfs'?)"),
        (("--workload", "single"), "--workload is for a model"),
        (("--repeats", "0"), "--repeats 0 must be at least 1"),
        (("--rate", "3"), "--rate: only with --trace FILE or --requests N"),
        (("--plot", "x.png"), "--plot: only with --trace FILE or --requests N"),
        (("--requests", "3", "--steps", "4"), "--steps: only without a trace"),
        (("--requests", "3", "--no-ipc"), "--no-ipc: only without a trace"),
        (("--requests", "3", "--repeats", "4"), "leave out --repeats"),
        (("--requests", "3", "--rate", "0"), "--rate 0.0"),
        (("--requests", "0"), "--requests 0 must be at least 1"),
        (("--running", "9" * 20), f"--running {'9' * 20} must be at least 1 and at most 1,000,000"),
        (("--max-num-seqs", "4000000000"), "--max-num-seqs 4000000000 must be at least 1 and at most 1,000,000"),
        (("--requests", "3", "--tenants", "9" * 11), f"--tenants {'9' * 11} must be at least 1 and at most 1,000,000"),
        (("--requests", "3", "--generate-trace", "/dev/full"), "'/dev/full' cannot be written: No space left"),
        (("--requests", "3", "--step-cost", "1"), "--step-cost '1' must be"),
        (("--requests", "3", "--plot", "x.pdf"), "must end with .png or .svg"),
        (("--requests", "3", "--running", "0"), "--running 0 must be at least 1"),
        (("--requests", "3", "--running", "4", "--max-num-seqs", "5"), "say different things"),
        (("--requests", "3", "--compare", "fcfs"), "--compare fcfs: it takes part already"),
        (("--requests", "3", "--compare", "nobody"), "no scheduler plugin 'nobody'"),
        (("--requests", "3", "--hash-block", "16"), "--hash-block: only for --trace"),
        (("--requests", "3", "--trace", "x"), "--requests: the --trace says it already"),
        (("--trace", "/nowhere/x.jsonl"), "--trace '/nowhere/x.jsonl' cannot be read: No such file"),
        (("--trace", "x", "--speed", "0"), "--speed 0.0 must be at least 1e-06 and at most 1,000,000"),
        (("--trace", "x", "--hash-block", "0"), "--hash-block 0 must be at least 1"),
        (("--trace", "-", "--compare", "priority"), "--trace - can be read only once"),
        (("--generate-trace", "/nowhere/x.jsonl", "--requests", "3"), "--generate-trace '/nowhere/x.jsonl' cannot be"),
        (("--generate-trace", "x"), "--generate-trace needs --requests N"),
        (("--generate-trace", "x", "--requests", "3", "--plot", "y.png"), "--plot: --generate-trace only writes"),
    ],
)
def test_what_makes_no_run_is_explained(hardpoint: CommandLine, options: tuple[str, ...], fault: str) -> None:
    done = hardpoint("bench", "scheduler", *options)
    assert done.status == 1
    assert fault in done.complaint()


def test_flags_of_a_scheduler_are_not_for_models(hardpoint: CommandLine) -> None:
    done = hardpoint("bench", "--running", 3, "--trace", "x")
    assert "--running, --trace: only for `hardpoint bench scheduler`" in done.complaint()
    assert "--no-ipc: only for" in hardpoint("bench", "smollm2", "--no-ipc").complaint()


@pytest.mark.slow
def test_a_trace_is_replayed(hardpoint: CommandLine, tmp_path: Path) -> None:
    """Two requests with a common prefix of two hash blocks, the second after the first."""
    line = {"input_length": 40, "output_length": 5, "extra": 1}
    trace = write(
        tmp_path / "t.jsonl",
        line | {"timestamp": 0, "hash_ids": [0, 1, 2]},
        line | {"timestamp": 5000, "hash_ids": [0, 1, 3]},
    )
    report = measured(hardpoint, "--trace", trace, "--hash-block", 16, "--step-cost", "10000,0,0", "--json")
    assert list(report)[:6] == FIGURES
    assert (report["requests"], report["completed"], report["tokens"]) == (2, 2, 10)
    assert report["prefix_hit_rate"] == pytest.approx(32 / 80)
    assert report["ttft_ms"]["max"] == pytest.approx(10.0)
    assert report["tpot_ms"]["mean"] == pytest.approx(10.0)
    assert report["simulated_s"] == pytest.approx(5.05)
    assert report["ignored_keys"] == ["extra"]
    faster = measured(hardpoint, "--trace", trace, "--hash-block", 16, "--speed", 2, "--timestamp-unit", "s", "--json")
    assert faster["simulated_s"] == pytest.approx(2500, abs=1)


def test_requests_without_a_tenant_have_a_line_with_a_name(hardpoint: CommandLine, tmp_path: Path) -> None:
    line = {"arrival_s": 0, "input_length": 4, "output_length": 1}
    trace = write(tmp_path / "t.jsonl", line, line | {"tenant": "x"})
    shown = hardpoint("bench", "scheduler", "--trace", trace).out.split()
    assert "tenants.(none).completed" in shown
    assert "tenants.x.completed" in shown


@pytest.mark.slow
def test_steps_without_boundaries_have_no_such_figure(hardpoint: CommandLine) -> None:
    options = ("--running", 2, "--steps", 2, "--prompt-len", 18, "--no-ipc")
    assert measured(hardpoint, *options, "--json")["boundary_step_us_median"] is None
    assert "boundary_step" not in hardpoint("bench", "scheduler", *options).out


def test_a_faulty_line_is_named(hardpoint: CommandLine, tmp_path: Path) -> None:
    good = {"arrival_s": 0, "input_length": 4, "output_length": 1}
    trace = write(tmp_path / "t.jsonl", good, good | {"output_length": -1})
    said = hardpoint("bench", "scheduler", "--trace", trace).complaint()
    assert f"{trace}:2: Expected `int` >= 1 - at `$.output_length`" in said


@pytest.mark.slow
def test_traces_come_from_standard_input_and_go_to_standard_output() -> None:
    made = run_process("bench", "scheduler", "--generate-trace", "-", "--requests", 20, "--rate", 50, "--tenants", 2)
    assert made.status == 0, made.err
    assert len(made.json_lines()) == 20
    done = run_process("bench", "scheduler", "--trace", "-", "--json", stdin=made.out)
    (report,) = done.json_lines()
    assert report["completed"] == 20
    assert len(report["tenants"]) == 2


@pytest.mark.slow
def test_a_written_trace_replays_like_the_made_up_one(hardpoint: CommandLine, tmp_path: Path) -> None:
    mix = ("--requests", 60, "--rate", 80, "--shared-prefix", 32, "--prefixes", 2, "--length-spread", 0.5)
    path = tmp_path / "t.jsonl"
    assert hardpoint("bench", "scheduler", "--generate-trace", path, *mix).status == 0
    written = measured(hardpoint, "--trace", path, "--json")
    direct = measured(hardpoint, *mix, "--json")
    for key in ("ttft_ms", "queue_ms", "prefix_hit_rate", "tokens", "blocks_in_use_max", "steps", "simulated_s"):
        assert written[key] == direct[key], key
    assert direct["prefix_hit_rate"] > 0.1


@pytest.mark.slow
def test_schedulers_are_compared(hardpoint: CommandLine) -> None:
    """Under load, the favored priority waits less and the small tenant too, where the scheduler heeds them."""
    load = ("--requests", 150, "--rate", 300, "--running", 8, "--tenants", 2, "--priorities", 2)
    fair = "policy:policy=fair_share"
    reports = measured(hardpoint, *load, "--compare", "priority", "--compare", fair, "--json")["schedulers"]
    assert list(reports) == ["fcfs", "priority", fair]
    assert {report["completed"] for report in reports.values()} == {150}
    assert {report["blocks_leaked"] for report in reports.values()} == {0}
    favored = {name: report["priorities"]["0"]["ttft_ms"]["mean"] for name, report in reports.items()}
    assert favored["priority"] < 0.75 * favored["fcfs"]
    small = {name: report["tenants"]["tenant-1"]["ttft_ms"]["mean"] for name, report in reports.items()}
    assert small[fair] < 0.75 * small["fcfs"]
    done = hardpoint("bench", "scheduler", *load, "--compare", "priority")
    assert done.out.splitlines()[0].split() == ["fcfs", "priority"]


@pytest.mark.slow
def test_weightings_of_a_policy_are_compared(hardpoint: CommandLine) -> None:
    """The big tenant's requests come sooner once its weight says so."""
    load = ("--requests", 60, "--rate", 300, "--running", 4, "--tenants", 2, "--output-len", 16, "--json")
    base = ("--scheduler", "policy", "--plugin", "scheduler.policy.policy=fair_share")
    weighted = 'policy:scheduling_policy.fair_share.weights={"tenant-0": 8, "tenant-1": 1}'
    reports = measured(hardpoint, *load, *base, "--compare", weighted)["schedulers"]
    assert list(reports) == ["policy", weighted]
    waits = [report["tenants"]["tenant-0"]["ttft_ms"]["mean"] for report in reports.values()]
    assert waits[1] < 0.8 * waits[0]


@pytest.mark.slow
@pytest.mark.parametrize("form", [("--requests", 30, "--rate", 1e6, "--running", 8), SMALL])
def test_a_bug_of_a_policy_is_told_with_its_place(
    hardpoint: CommandLine, monkeypatch: pytest.MonkeyPatch, form: tuple[object, ...]
) -> None:
    def victim(self: object, running: object) -> None:
        raise ValueError("no such tenant")

    monkeypatch.setattr("hardpoint_scheduling.schedulers.policies.fair_share.FairSharePolicy.victim", victim)
    policy = ("--scheduler", "policy", "--plugin", "scheduler.policy.policy=fair_share", "--blocks", 24)
    said = hardpoint("bench", "scheduler", *form, *policy).complaint()
    assert "SchedulerFault: scheduler:policy (" in said
    assert "raised ValueError: no such tenant (" in said
    assert "test_cli_bench_scheduler.py:" in said
    assert "in victim); HARDPOINT_TRACEBACK=1" in said


def test_a_full_queue_rejects_as_a_server_does(hardpoint: CommandLine) -> None:
    report = measured(hardpoint, "--requests", 50, "--rate", 1e6, "--running", 4, "--max-waiting", 10, "--json")
    assert report["rejected"] == 50 - 4 - 10
    assert report["completed"] == 14


@pytest.mark.slow
def test_a_replay_is_drawn(hardpoint: CommandLine, tmp_path: Path) -> None:
    for name in ("p.png", "p.svg"):
        report = measured(hardpoint, "--requests", 40, "--rate", 100, "--plot", tmp_path / name, "--json")
        assert report["completed"] == 40
        assert (tmp_path / name).stat().st_size > 5_000


@pytest.mark.slow
def test_encoding_and_other_processes_are_a_further_figure(hardpoint: CommandLine) -> None:
    report = measured(hardpoint, "--running", 6, "--steps", 40, "--json")
    assert report["step_with_ipc_us_median"] > report["step_us_median"]


@pytest.mark.slow
def test_a_long_cached_prompt_is_found(hardpoint: CommandLine) -> None:
    report = measured(hardpoint, *SMALL, "--lookup", 100_000)
    assert report["lookup_cached_tokens"] == 99_984
    assert report["lookup_ms"] > 0
    assert report["lookup_first_ms"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("tokens", [2, 15, 16, 17, 160, 161])
def test_cached_prompts_of_any_length_are_found(hardpoint: CommandLine, tokens: int) -> None:
    report = measured(hardpoint, "--running", 2, "--steps", 2, "--no-ipc", "--json", "--blocks", 40, "--lookup", tokens)
    assert report["lookup_cached_tokens"] == (tokens - 1) // 16 * 16


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_million_requests_leak_nothing_and_need_no_more_memory() -> None:
    """Short prompts that share prefixes, short answers; the load is just below what the simulated device takes."""

    def peak_mib(count: int) -> float:
        options = f"--requests {count} --rate 2500 --prompt-len 32 --shared-prefix 16 --prefixes 50 --output-len 4"
        options += " --length-spread 0.4 --step-cost 5000,10,20 --tenants 4 --json"
        command = [sys.executable, "-m", "hardpoint.cli", "bench", "scheduler", *options.split()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=1500, env=os.environ, check=False)
        assert done.returncode == 0, done.stderr
        report = json.loads(done.stdout)
        assert report["completed"] + report["rejected"] == report["requests"] == count
        assert report["blocks_leaked"] == 0
        assert report["rejected"] == 0
        assert report["prefix_hit_rate"] > 0.3
        return float(report["peak_rss_mib"])

    few, many = peak_mib(20_000), peak_mib(1_000_000)
    assert many < few + 64

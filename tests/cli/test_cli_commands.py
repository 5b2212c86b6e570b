"""The frame of the command line: help, versions, unknown commands, exit statuses, and the benchmark command."""

from __future__ import annotations

import json
import math
from importlib.metadata import version
from pathlib import Path

import pytest

from cli_support import CommandLine, run_process

COMMANDS = ["bench", "chat", "generate", "models", "plugins", "serve"]


@pytest.mark.parametrize("flag", ["--version", "-V"])
def test_the_version_is_that_of_the_distribution(hardpoint: CommandLine, flag: str) -> None:
    assert hardpoint(flag).out == f"hardpoint {version('hardpoint-core')}\n"


@pytest.mark.slow
@pytest.mark.parametrize(("level", "told"), [(None, False), ("DEBUG", True)])
def test_the_story_before_a_result_is_told_when_asked_for(tiny: Path, level: str | None, told: bool) -> None:
    flags = ["--log-level", level] if level else []
    done = run_process("generate", tiny, "--prompt", "hello", "--max-tokens", 2, *flags)
    assert done.status == 0
    assert ("hardpoint.launch: plugin platform:cpu" in done.err) is told


@pytest.mark.slow
def test_ranks_that_cannot_share_the_model_are_refused(hardpoint: CommandLine, tiny: Path) -> None:
    """The model's two key/value heads and four query heads have no third."""
    done = hardpoint("generate", tiny, "--prompt", "hello", "--tensor-parallel-size", 3)
    assert done.status == 1
    assert "cannot be split over tensor_parallel_size=3; set --tensor-parallel-size to a divisor: 1, 2" in done.err


@pytest.mark.parametrize("flag", ["--help", "-h"])
def test_help_lists_every_command_and_where_it_comes_from(hardpoint: CommandLine, flag: str) -> None:
    done = hardpoint(flag)
    assert done.status == 0
    listed = [line.split()[0] for line in done.out.partition("commands:\n")[2].partition("\n\n")[0].splitlines()]
    assert sorted(listed) == COMMANDS
    assert "(hardpoint-terminal)" in done.out


def test_without_a_command_help_is_shown_and_the_status_says_usage(hardpoint: CommandLine) -> None:
    done = hardpoint()
    assert done.status == 2
    assert done.out == hardpoint("--help").out


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(hardpoint: CommandLine, command: str) -> None:
    done = hardpoint(command, "--help")
    assert done.status == 0
    assert done.out.startswith(f"usage: hardpoint {command}")


@pytest.mark.parametrize("command", ["bench", "chat", "generate", "serve"])
def test_every_setting_is_a_flag_with_help(hardpoint: CommandLine, command: str) -> None:
    text = hardpoint(command, "--help").out
    for flag in ("--max-model-len", "--dtype", "--kv-cache-memory", "--scheduler", "--platform", "--log-level"):
        assert flag in text
    assert ("--api-key" in text) == (command == "serve")


def test_an_unknown_command_names_the_nearest_and_what_would_provide_it(hardpoint: CommandLine) -> None:
    done = hardpoint("generat", "smollm2")
    assert done.status == 2
    line = done.complaint()
    assert "unknown command 'generat' (did you mean 'generate'?)" in line
    assert "hardpoint.cli_command.v1:generat" in line
    assert all(command in line for command in COMMANDS)


@pytest.mark.parametrize(
    "arguments", [("plugins",), ("plugins", "lost"), ("plugins", "list", "--colour"), ("serve", "smollm2", "--port")]
)
def test_misuse_ends_with_the_usage_and_status_two(hardpoint: CommandLine, arguments: tuple[str, ...]) -> None:
    done = hardpoint(*arguments)
    assert done.status == 2
    assert done.err.startswith("usage: hardpoint ")
    assert done.out == ""


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--port", "99999"], "server.port"),
        (["--port", "many"], "server.port"),
        (["--endpoints", "opanai"], "did you mean 'openai'"),
        (["--host", "0.0.0.0"], "--allow-anonymous"),
        (["--api-key-file", "/nowhere/keys"], "/nowhere/keys"),
    ],
)
def test_a_server_that_cannot_be_is_one_line(
    hardpoint: CommandLine, tiny: Path, options: list[str], fault: str
) -> None:
    done = hardpoint("serve", tiny, *options)
    assert fault in done.complaint()
    assert done.seconds < 10


def test_plugins_doctor_finds_nothing_wrong_here(hardpoint: CommandLine) -> None:
    report = json.loads(hardpoint("plugins", "doctor", "--json").out)
    assert report["problems"] == []
    assert report["refused"] == []


def test_a_traceback_can_be_asked_for(hardpoint: CommandLine, monkeypatch: pytest.MonkeyPatch) -> None:
    from hardpoint.errors import ModelNotFoundError

    monkeypatch.setenv("HARDPOINT_TRACEBACK", "1")
    with pytest.raises(ModelNotFoundError):
        hardpoint("generate", "/nowhere", "--prompt", "x")


def test_bench_measures_a_workload_and_prints_one_object(hardpoint: CommandLine, tiny: Path) -> None:
    done = hardpoint("bench", tiny, "--workload", "single", "--repeats", 1, "--json")
    (document,) = done.json_lines()
    assert list(document) == ["model", "load_s", "workloads"]
    assert document["model"] == str(tiny)
    assert list(document["workloads"]) == ["single"]
    row = document["workloads"]["single"]
    assert set(row) == {
        "wall_s", "ttft_s", "output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens", "decode_tokens_per_s",
    }  # fmt: skip
    for figure in row.values():
        assert list(figure) == ["median", "low", "high"]
        assert figure["low"] == figure["median"] == figure["high"]
    assert row["cached_tokens"]["median"] == 0
    tokens, seconds = row["output_tokens_per_s"]["median"], row["wall_s"]["median"]
    assert math.isclose(tokens * seconds, 128, rel_tol=1e-6)


def test_bench_prints_a_table_for_people(hardpoint: CommandLine, tiny: Path) -> None:
    done = hardpoint("bench", tiny, "--workload", "single", "--repeats", 1)
    assert done.status == 0
    assert done.out.startswith(f"{tiny}, loaded in ")
    assert "decode_tokens_per_s" in done.out


@pytest.mark.parametrize(
    ("options", "status", "fault"),
    [
        (["--repeats", "0"], 1, "--repeats 0 must be at least 1"),
        (["--workload", "doubles"], 2, "invalid choice: 'doubles'"),
        # The tiny model has room for 512 tokens.
        (["--workload", "prefill", "--repeats", "1"], 1, "1024 tokens; the context length is 512"),
    ],
)
def test_a_benchmark_that_cannot_be_run_is_explained(
    hardpoint: CommandLine, tiny: Path, options: list[str], status: int, fault: str
) -> None:
    done = hardpoint("bench", tiny, *options)
    assert done.status == status
    assert fault in done.err
    assert "Traceback" not in done.err

"""Where settings come from: the command line, then the environment, then the file; mistakes are explained."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cli_support import CommandLine
from hardpoint import LLM
from hardpoint.errors import ConfigError

ONE_TOKEN = ["--prompt", "Hello", "--max-tokens", "1", "--json"]
TOO_LONG = "max_model_len {} is more than the 512 tokens"


@pytest.fixture
def settings(tmp_path: Path) -> Path:
    return tmp_path / "settings.yaml"


def used_length(hardpoint: CommandLine, *arguments: object) -> str:
    """Lengths beyond the model's are refused by value, which shows the value that counted."""
    return hardpoint("generate", *arguments, *ONE_TOKEN).complaint()


def test_the_command_line_wins_over_environment_and_file(
    hardpoint: CommandLine, tiny: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.write_text(f"model:\n  name: {tiny}\n  max_model_len: 1001\n")
    assert TOO_LONG.format(1001) in used_length(hardpoint, "--config", settings)
    monkeypatch.setenv("HARDPOINT_MAX_MODEL_LEN", "1002")
    assert TOO_LONG.format(1002) in used_length(hardpoint, "--config", settings)
    assert TOO_LONG.format(1003) in used_length(hardpoint, "--config", settings, "--max-model-len", 1003)
    monkeypatch.setenv("HARDPOINT_MAX_MODEL_LEN", "256")
    assert hardpoint("generate", "--config", settings, *ONE_TOKEN).json_lines()


def test_the_file_can_be_named_by_the_environment(
    hardpoint: CommandLine, tiny: Path, settings: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings.write_text(f"model: {tiny}\nscheduler:\n  max_num_seqs: 2\n")
    monkeypatch.setenv("HARDPOINT_CONFIG", str(settings))
    assert len(hardpoint("generate", *ONE_TOKEN, "--prompt", "b", "--prompt", "c").json_lines()) == 3


def test_the_model_on_the_command_line_wins_over_the_file(hardpoint: CommandLine, tiny: Path, settings: Path) -> None:
    settings.write_text("model: /nowhere/model\n")
    assert "'/nowhere/model' does not exist" in hardpoint("generate", "--config", settings, *ONE_TOKEN).complaint()
    assert hardpoint("generate", tiny, "--config", settings, *ONE_TOKEN).json_lines()


def test_without_a_model_the_message_says_where_to_name_one(hardpoint: CommandLine) -> None:
    line = hardpoint("generate", *ONE_TOKEN).complaint()
    assert "no model is named" in line
    assert "model.name" in line


@pytest.mark.parametrize(
    ("text", "faults"),
    [
        ("model:\n  name: {tiny}\n  max_model_length: 64\n", ["max_model_length", "did you mean 'max_model_len'"]),
        ("model: {tiny}\nschedular:\n  max_num_seqs: 2\n", ["schedular", "did you mean 'scheduler'"]),
        ("model: {tiny}\ncache:\n  blocksize: 8\n", ["blocksize", "did you mean 'block_size'"]),
        ("model: {tiny}\nserver:\n  prot: 1\n", ["prot", "did you mean 'port'"]),
        ("model: {tiny}\nzzz: 1\n", ["zzz"]),
        ("model: {tiny}\nport: 8123\n", ["'port'", "did you mean 'server.port'"]),
        ("model: {tiny}\nmax_num_seqs: 8\n", ["did you mean 'scheduler.max_num_seqs'"]),
        ("model: {tiny}\ncache:\n  block_size: -4\n", ["block_size", "-4"]),
        ("model: {tiny}\ncache: 5\n", ["cache", "5"]),
        ("model: {tiny}\nplugins:\n  shceduler: {{fcfs: {{x: 1}}}}\n", ["shceduler", "did you mean 'scheduler'"]),
        ("model: {tiny}\nplugins:\n  scheduler: {{fcfss: {{x: 1}}}}\n", ["fcfss", "did you mean 'fcfs'"]),
        ("model: {tiny}\nplugins:\n  scheduler: {{fcfs: {{no_such_option: 1}}}}\n", ["no_such_option"]),
        ("[1, 2]\n", ["no mapping of sections"]),
        ("model: [\n", ["cannot be read"]),
        ("engines: {{}}\n", ["exactly one engine"]),
        ("engines: {{a: 5}}\n", ["a", "5"]),
        ("model: 5\n", ["model", "5"]),
    ],
)
def test_a_mistake_in_the_file_is_named(
    hardpoint: CommandLine, tiny: Path, settings: Path, text: str, faults: list[str]
) -> None:
    settings.write_text(text.format(tiny=tiny))
    line = hardpoint("generate", "--config", settings, *ONE_TOKEN).complaint()
    assert [fault for fault in faults if fault not in line] == [], line


@pytest.mark.parametrize(
    ("text", "option", "fault"),
    [
        ("cache: 5", ["--block-size", "8"], "'cache' must be a section"),
        ("model: [a]", [], "'model' must be a section"),
        ("plugins: 5", ["--plugin", "scheduler.fcfs.x=1"], "'plugins' must be a section"),
        ("plugins: {scheduler: 5}", ["--plugin", "scheduler.fcfs.x=1"], "'scheduler' must be a section"),
        ("plugin_policy: no", ["--strict-plugins"], "'plugin_policy' must be a section"),
    ],
)
def test_flags_do_not_merge_into_what_is_no_section(
    hardpoint: CommandLine, tiny: Path, settings: Path, text: str, option: list[str], fault: str
) -> None:
    settings.write_text(text)
    assert fault in hardpoint("generate", tiny, "--config", settings, *ONE_TOKEN, *option).complaint()


@pytest.mark.parametrize(
    ("given", "fault"),
    [
        ({"max_num_seqz": 2}, "did you mean 'max_num_seqs'"),
        ({"max_num_seqs": "few"}, "scheduler.max_num_seqs: .*'few' is not a count"),
        ({"dtype": "float99"}, "model.dtype: .*float99"),
    ],
)
def test_python_names_the_same_mistakes(tiny: Path, given: dict[str, Any], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        LLM(str(tiny), **given)


def test_a_missing_file_is_named(hardpoint: CommandLine, settings: Path) -> None:
    assert f"{str(settings)!r} cannot be read" in hardpoint("generate", "--config", settings, *ONE_TOKEN).complaint()


@pytest.mark.parametrize(
    ("variable", "value", "fault"),
    [
        ("HARDPOINT_PREFIX_CACHING", "perhaps", "neither yes nor no"),
        ("HARDPOINT_MAX_NUM_SEQS", "few", "max_num_seqs"),
        ("HARDPOINT_DTYPE", "float99", "dtype"),
        ("HARDPOINT_SCHEDULER", "fifo", "no scheduler plugin 'fifo'"),
    ],
)
def test_a_mistake_in_the_environment_is_named(
    hardpoint: CommandLine, tiny: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, fault: str
) -> None:
    monkeypatch.setenv(variable, value)
    line = hardpoint("generate", tiny, *ONE_TOKEN).complaint()
    assert fault in line
    assert value in line


def test_switches_can_be_set_in_the_environment(
    hardpoint: CommandLine, tiny: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HARDPOINT_PREFIX_CACHING", "no")
    assert hardpoint("generate", tiny, *ONE_TOKEN).json_lines()


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--plugin", "scheduler.fcfs=1"], "not of the form kind.name.key=value"),
        (["--plugin", "scheduler.fcfs.x"], "not of the form kind.name.key=value"),
        (["--plugin", "scheduler.fcfs.x=["], "--plugin"),
        (["--plugin", "scheduler.fcfs.no_such_option=[1, {a: b}]"], "no_such_option"),
        (["--plugin", "shceduler.fcfs.x=1"], "did you mean 'scheduler'"),
        (["--plugin", "scheduler.fcfs.no_such_option=1"], "no_such_option"),
        (["--pin", "scheduler"], "not of the form kind:name=distribution"),
        (["--pin", "scheduler:fcfs=nobody"], "nobody"),
        (["--plugins", "no-such-plugin"], "'no-such-plugin'"),
        (["--scheduler", "fcsf"], "did you mean 'fcfs'"),
        (["--executor", "uniprocc"], "did you mean 'uniproc'"),
        (["--attention-backend", "flash"], "hardpoint.attention_backend.v1:flash"),
        (["--platform", "tpu"], "hardpoint.platform.v1:tpu"),
        (["--quantization", "fp3"], "hardpoint.quantization.v1:fp3"),
        (["--loader", "gguff"], "did you mean 'gguf'"),
        (["--chat-renderer", "morse"], "hardpoint.chat_renderer.v1:morse"),
        (["--kv-layout", "sideways"], "hardpoint.kv_layout.v1:sideways"),
        (["--kv-cache-memory", "lots"], "'lots' is not a size"),
        (["--max-num-seqs", "few"], "'few' is not a count"),
        (["--block-size", "0"], "block_size"),
    ],
)
def test_a_mistake_in_a_setting_is_one_line(hardpoint: CommandLine, tiny: Path, options: list[str], fault: str) -> None:
    assert fault in hardpoint("generate", tiny, *ONE_TOKEN, *options).complaint()


def test_sizes_may_carry_units(hardpoint: CommandLine, tiny: Path) -> None:
    done = hardpoint("generate", tiny, *ONE_TOKEN, "--kv-cache-memory", "16MiB", "--max-num-batched-tokens", "1k")
    assert done.json_lines()

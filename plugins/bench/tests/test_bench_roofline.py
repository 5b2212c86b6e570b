"""Limits of a machine and targets: arithmetic that can be done by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardpoint_bench.roofline import Geometry, Machine, Stored, limits_of
from hardpoint_bench.stored import stored_in_class, stored_in_file, weights_of
from hardpoint_bench.targets import TARGETS, Target, best_ratio, verdicts
from hardpoint_bench.workloads import BY_COMMAND, Workload
from tiny_llama import CONFIG, write_tiny_gguf

SMOLLM2 = Geometry(576, 30, 9, 3, 64, 1536, 49152, tied=True)
ZEN3 = Machine(memory_read=35e9, fp32=163e9, int8=255e9)
"""The machine that the targets were set on."""


def test_sizes_come_from_a_configuration() -> None:
    found = Geometry.of(CONFIG)
    assert found == Geometry(32, 2, 4, 2, 8, 64, CONFIG["vocab_size"], tied=True)
    assert Geometry.of({**CONFIG, "num_key_value_heads": None, "head_dim": None}) == replace(found, kv_heads=4)
    assert Geometry.of({**CONFIG, "num_experts": 8}) is None, "its operations are others"
    assert Geometry.of({"hidden_size": 4}) is None


def test_weights_and_operations_are_counted() -> None:
    assert SMOLLM2.layer_weights + SMOLLM2.head_weights == pytest.approx(134.5e6, rel=1e-3)
    assert SMOLLM2.kv_bytes == 2 * 30 * 3 * 64 * 4
    assert SMOLLM2.attention_ops(1, 0) == 4 * 30 * 576
    assert SMOLLM2.attention_ops(2, 0) == 4 * 30 * 576 * 3, "the second position sees two"
    split = SMOLLM2.attention_ops(5, 0) + SMOLLM2.attention_ops(3, 5)
    assert split == SMOLLM2.attention_ops(8, 0)


def test_limits_are_those_that_the_targets_were_set_from() -> None:
    stored = Stored.at(SMOLLM2, 4)
    found = {name: limits_of(one, SMOLLM2, stored, ZEN3, "fp32").figures for name, one in BY_COMMAND.items()}
    assert found["latency"]["decode_tokens_per_s"] == pytest.approx(65, rel=0.03)
    assert found["prefill"]["prompt_tokens_per_s"] == pytest.approx(658, rel=0.01)
    # Attention counts here as well.
    assert 320 < found["throughput"]["output_tokens_per_s"] < 337
    assert found["prefix"]["wall_s"] == pytest.approx(2.5, rel=0.1)
    in_8_bits = limits_of(BY_COMMAND["latency"], SMOLLM2, Stored.at(SMOLLM2, 1), ZEN3, "int8")
    assert in_8_bits.figures["decode_tokens_per_s"] == pytest.approx(260, rel=0.1)


def test_a_step_takes_the_longer_of_reading_and_computing() -> None:
    stored, fast = Stored.at(SMOLLM2, 4), replace(ZEN3, fp32=1e18, int8=1e18)
    one, many = Workload("a", "", 1, 0, 1, 2), Workload("a", "", 32, 0, 1, 2)
    reads = limits_of(one, SMOLLM2, stored, fast, "fp32").decode_s
    assert reads == pytest.approx((stored.layers + stored.head + SMOLLM2.kv_bytes) / 35e9)
    assert limits_of(many, SMOLLM2, stored, fast, "fp32").decode_s < 1.1 * reads
    weights = SMOLLM2.layer_weights + SMOLLM2.head_weights
    computes = limits_of(many, SMOLLM2, stored, ZEN3, "fp32").decode_s
    assert computes == pytest.approx(32 * (2 * weights + SMOLLM2.attention_ops(1, 1)) / 163e9)


def test_shared_tokens_are_computed_once() -> None:
    apart, shared = Workload("a", "", 8, 0, 100, 1), Workload("a", "", 8, 90, 10, 1)
    stored = Stored.at(SMOLLM2, 4)
    slow = limits_of(apart, SMOLLM2, stored, ZEN3, "fp32").prefill_s
    assert limits_of(shared, SMOLLM2, stored, ZEN3, "fp32").prefill_s < slow / 4
    assert "decode_tokens_per_s" not in limits_of(apart, SMOLLM2, stored, ZEN3, "fp32").figures


def test_the_machine_is_what_it_was_at_its_best() -> None:
    rates = [{"memory_read": 1.0, "fp32": 5.0, "int8": 2.0}, {"memory_read": 3.0, "fp32": 4.0, "int8": 2.0}]
    assert Machine.best_of(rates) == Machine(3.0, 5.0, 2.0)


def test_packed_weights_are_read_in_the_file(tmp_path: Path) -> None:
    path = write_tiny_gguf(tmp_path / "tiny.gguf")
    geometry = Geometry.of(CONFIG)
    assert geometry is not None
    in_file = stored_in_file(path, tied=True)
    assert in_file == Stored.at(geometry, 4)
    assert stored_in_class("4bit", geometry, path) == in_file
    assert stored_in_class("4bit", geometry, tmp_path) is None, "a folder has nothing packed"
    assert stored_in_class("int8", geometry, tmp_path) == Stored.at(geometry, 1)
    assert weights_of(path) == "F32"
    assert weights_of(tmp_path / "hf-w8a8") == "int8 weights per channel"
    assert weights_of(tmp_path / "mine") is None
    assert Stored(10, 2, tied=False).bytes_in_use == 14


def report(**changes: Any) -> dict[str, Any]:
    def figure(value: float) -> dict[str, float]:
        return {"median": value, "low": value, "high": value}

    figures = {"decode_tokens_per_s": 60.0, "prompt_tokens_per_s": 500.0, "wall_s": 3.0, "start_s": 2.0}
    figures |= {"peak_memory_mib": 1000.0, "output_tokens_per_s": 200.0}
    ratios = {"vllm": {name: figure(2.0) for name in figures}, "llama.cpp": {name: figure(1.3) for name in figures}}
    return {
        "figures": {name: figure(value) for name, value in figures.items()},
        "ratios": ratios,
        "fractions": {"prompt_tokens_per_s": 0.95},
        **changes,
    }


def result(**changes: Any) -> dict[str, Any]:
    workloads = {name: report() for name in BY_COMMAND}
    return {"classes": {"fp32": {"workloads": workloads, "faults": {}, "weight_bytes": 2**29, **changes}}}


def test_targets_are_held_against_the_best_peer() -> None:
    found = {(one.target.workload, one.target.against): one for one in verdicts(result())}
    assert len(found) == 7
    decode = found["latency", "peers"]
    assert (decode.reached, decode.rival, decode.is_met) == (1.3, "llama.cpp", True)
    assert best_ratio(report(), "wall_s") == ("llama.cpp", 1.3)
    assert found["prefix", "vllm"].reached == 2.0
    assert found["prefill", "limit"].is_met
    assert found["startup", "weights"].reached == pytest.approx(1000 / 512)
    assert found["startup", "nothing"].is_met


def test_what_was_not_measured_is_neither_met_nor_missed() -> None:
    alone = result(workloads={"latency": report(ratios={}, fractions={})}, weight_bytes=None)
    found = verdicts(alone)
    assert [one.is_met for one in found] == [None] * 7
    assert found[0].why == "no peer took part"
    assert found[1].why == "this workload was not run"
    startup = verdicts(result(faults={"hardpoint": "ConfigError: no"}, workloads={}))[0]
    assert startup.why == "ConfigError: no"
    without = result(workloads={"prefix": report(ratios={"transformers": {}})})
    (prefix,) = [one for one in verdicts(without) if one.target.workload == "prefix"]
    assert (prefix.is_met, prefix.why) == (None, "vllm took no part")


@pytest.mark.parametrize(
    ("target", "text"),
    [
        (Target("fp32", "latency", "x", "peers", 1.2), "x ≥ 1.2 × the best peer"),
        (Target("fp32", "prefix", "x", "vllm", 1.25), "x ≥ 1.25 × vllm"),
        (Target("fp32", "prefill", "x", "limit", 0.9), "x ≥ 90% of the limit"),
        (Target("fp32", "startup", "x", "nothing", 2.5), "x ≤ 2.5"),
        (Target("fp32", "startup", "x", "weights", 2.5), "x ≤ 2.5 × weights"),
    ],
)
def test_targets_read_as_sentences(target: Target, text: str) -> None:
    assert target.text == text


def test_there_is_a_target_for_every_workload_of_every_class() -> None:
    found = {(target.precision, target.workload) for target in TARGETS}
    assert found == {(precision, workload) for precision in ("fp32", "int8", "4bit") for workload in BY_COMMAND}

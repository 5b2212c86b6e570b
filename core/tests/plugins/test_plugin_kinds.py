"""The kinds table agrees with the architecture's."""

from __future__ import annotations

import pytest

from hardpoint.errors import PluginNotFoundError
from hardpoint.plugins.kinds import KINDS, Cardinality, Trust, kind_spec
from hardpoint.roles import ProcessRole

WORKER_KINDS = {
    *("worker", "attention_backend", "custom_op", "kernel_override"),
    *("communicator", "compiler", "graph_backend", "memory"),
}
EVERYWHERE = frozenset(ProcessRole)


def test_the_documented_kinds_are_all_there() -> None:
    documented = {
        *WORKER_KINDS,
        *("platform", "hooks", "executor", "scheduler", "scheduling_policy", "kv_layout", "kv_cache_spec"),
        *("kv_connector", "hash", "model", "quantization", "weight_loader", "model_source", "logits_processor"),
        *("speculator", "structured_output", "eplb_policy", "reasoning_parser", "tokenizer", "tool_parser"),
        *("chat_renderer", "io_processor", "stat_logger", "endpoint", "cli_command", "conformance"),
    }
    assert set(KINDS) == documented


def test_process_policy_per_kind() -> None:
    """R12.2: each kind has a fixed set of processes."""
    assert KINDS["platform"].roles == KINDS["hooks"].roles == EVERYWHERE
    assert all(KINDS[kind].roles == {ProcessRole.WORKER} for kind in WORKER_KINDS)
    assert KINDS["scheduler"].roles == KINDS["executor"].roles == {ProcessRole.ENGINE}
    assert KINDS["tokenizer"].roles == {ProcessRole.API, ProcessRole.ENGINE}
    for kind in ("stat_logger", "endpoint", "io_processor", "tool_parser", "chat_renderer"):
        assert KINDS[kind].roles == {ProcessRole.API}
    assert KINDS["cli_command"].roles == KINDS["conformance"].roles == {ProcessRole.LAUNCHER}


def test_only_endpoints_are_denied_by_default() -> None:
    """R12.48"""
    assert [spec.name for spec in KINDS.values() if spec.trust is Trust.ALLOW_LIST] == ["endpoint"]


def test_cardinality_and_group() -> None:
    assert KINDS["platform"].cardinality is Cardinality.EXACTLY_ONE
    assert {spec.name for spec in KINDS.values() if spec.cardinality is Cardinality.ONE} == {"executor", "scheduler"}
    many = {spec.name for spec in KINDS.values() if spec.cardinality is Cardinality.MANY}
    assert many == {"hooks", "stat_logger", "endpoint"}
    assert KINDS["attention_backend"].group == "hardpoint.attention_backend.v1"


def test_unknown_kind_is_an_error_with_the_nearest_name() -> None:
    with pytest.raises(PluginNotFoundError, match=r"'schedular' .did you mean 'scheduler'"):
        kind_spec("schedular")


def test_the_table_cannot_be_changed() -> None:
    with pytest.raises(TypeError):
        KINDS["mine"] = KINDS["hooks"]  # type: ignore[index]

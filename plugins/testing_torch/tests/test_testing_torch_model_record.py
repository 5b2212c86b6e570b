"""What came of comparisons is kept in a file that is read back as it was written."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from hardpoint.errors import PluginError
from hardpoint.testing.model_facts import Claim, ModelFacts, facts_text, parse_cell, read_facts
from hardpoint_testing_torch import ModeResult, ParityReport
from hardpoint_testing_torch.model_record import record


def report(name: str, *results: ModeResult, architecture: str = "GhostForCausalLM") -> ParityReport:
    return ParityReport(architecture, name, results)


def test_configurations_are_added_and_those_of_one_name_replaced(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    record(path, report("plain", ModeResult("prefill", 3e-6), ModeResult("tp2", note="one head")))
    record(path, report("odd", ModeResult("prefill", 2e-3), ModeResult("prefix", note="no cache")))
    record(path, report("plain", ModeResult("prefill", 0.5), architecture="OddModel"))
    found = read_facts(path).architectures
    assert list(found) == ["GhostForCausalLM", "OddModel"]
    ghost = found["GhostForCausalLM"]
    assert [(one.configuration, one.modes) for one in ghost.comparisons] == [
        ("plain", {"prefill": "ok 1e-5", "tp2": "not run"}),
        ("odd", {"prefill": "over limit 1e-2", "prefix": "not run"}),
    ]
    assert ghost.not_run == {"one head": ("tp2",), "no cache": ("prefix",)}
    assert (ghost.is_verified, ghost.worst(), ghost.passed) == (False, -2, ())
    record(path, report("odd", ModeResult("prefill", 2e-5), ModeResult("bfloat16", 2e-2, 3e-2)))
    ghost = read_facts(path).architectures["GhostForCausalLM"]
    assert ghost.not_run == {"one head": ("tp2",)}, "a reason without its mode is gone"
    assert (ghost.is_verified, ghost.worst(), ghost.worst(low_precision=True)) == (True, -4, -1)
    assert ghost.passed == ("prefill", "bfloat16")


def test_what_else_is_known_stays(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    claim = Claim("haunts", "tests/ghost.py::test_haunts", "Ghost-1B")
    path.write_text(facts_text({"GhostForCausalLM": ModelFacts(claims=(claim,))}))
    record(path, report("plain", ModeResult("prefill", 1e-6)))
    assert read_facts(path).architectures["GhostForCausalLM"].claims == (claim,)
    assert facts_text(read_facts(path).architectures) == path.read_text()


@pytest.mark.parametrize("error", [0.0, math.inf, math.nan, 1e-300, 4e12])
def test_odd_errors_are_cells_too(error: float, tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    record(path, report("plain", ModeResult("prefill", error)))
    (one,) = read_facts(path).architectures["GhostForCausalLM"].comparisons
    assert parse_cell(one.modes["prefill"])[0] == ("ok" if error < 1 else "over limit")


def test_a_damaged_file_is_named_and_left_alone(tmp_path: Path) -> None:
    path = tmp_path / "models.json"
    path.write_text("{")
    with pytest.raises(PluginError, match=r"models\.json is not valid"):
        record(path, report("plain", ModeResult("prefill", 1e-6)))
    assert path.read_text() == "{"

"""``hardpoint plugins doctor --model``: the choice of an attention backend on devices that are not there."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from cli_support import CommandLine
from tiny_llama import write_tiny_llama

pytestmark = pytest.mark.slow


@pytest.fixture(autouse=True)
def compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are compiled where a start happens, whatever the tests of kernels do here."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)


def decision(hardpoint: CommandLine, *arguments: object) -> dict[str, Any]:
    done = hardpoint("plugins", "doctor", *arguments, "--json")
    assert done.status in (0, 1), done.err
    answer: dict[str, Any] = json.loads(done.out)
    return {**answer, "status": done.status}


def test_this_host_without_torch_in_the_launcher(hardpoint: CommandLine, tiny: Path) -> None:
    """R5.5: what a start would decide, before it; no weight is read."""
    before = "torch" in sys.modules
    found = decision(hardpoint, "--model", tiny)
    assert ("torch" in sys.modules) == before
    assert (found["status"], found["platform"], found["problems"]) == (0, "cpu", [])
    assert [row["name"] for row in found["answer"]["candidates"]] == ["cpu_paged", "torch_reference"]
    assert sum(len(row["layers"]) for row in found["answer"]["layers"]) > 0


@pytest.mark.parametrize(
    ("device", "platform", "chosen", "refusals"),
    [
        ("cuda sm_75 16GiB", "cuda", "torch_reference", {"triton": "need compute capability 8.0"}),
        ("cuda sm_90 80GiB", "cuda", "triton", {"flash_attn": "not installed"}),
    ],
)
def test_a_device_that_is_not_there(
    hardpoint: CommandLine, tiny: Path, device: str, platform: str, chosen: str, refusals: dict[str, str]
) -> None:
    """R5.3, R5.16: each candidate of the platform's order for such a device, refusals with their reasons."""
    found = decision(hardpoint, "--model", tiny, "--device", device)
    assert (found["platform"], found["device"]["name"], found["status"]) == (platform, device, 0)
    answers = {row["name"]: row for row in found["answer"]["candidates"]}
    assert found["answer"]["chosen"] == chosen
    assert answers[chosen]["outcome"] == "chosen"
    for name, reason in refusals.items():
        assert answers[name]["outcome"] == "refuses"
        assert reason in answers[name]["reason"]


def test_a_named_backend_that_refuses(hardpoint: CommandLine, tiny: Path) -> None:
    """R5.4: the reason, and an exit status that scripts see."""
    done = hardpoint("plugins", "doctor", "--model", tiny, "--device", "cpu 24GB", "--use", "attention_backend=triton")
    assert done.status == 1
    assert "platform cpu, worker torch, 22.4 GiB\n" in done.out
    assert "triton  refuses: Triton has no compiler for the CPU" in done.out
    assert "problem: no attention backend can serve" in done.out


def test_a_model_that_nothing_runs_has_no_decision(hardpoint: CommandLine, tmp_path: Path) -> None:
    folder = write_tiny_llama(tmp_path / "ghost", architectures=["GhostForCausalLM"], model_type="ghost")
    found = decision(hardpoint, "--model", folder)
    assert (found["status"], found["answer"]) == (1, None)
    (problem,) = found["problems"]
    assert f"nothing installed runs the architecture 'GhostForCausalLM' of {str(folder)!r}" in problem


def test_flags_that_make_no_sense_together(hardpoint: CommandLine, tiny: Path) -> None:
    assert "no --model is given, so --device" in hardpoint("plugins", "doctor", "--device", "cpu").complaint()
    said = hardpoint("plugins", "doctor", "--model", tiny, "--probe").complaint()
    assert "--model shows one decision, so --probe would have no effect" in said
    said = hardpoint("plugins", "doctor", "--model", tiny, "--device", "cpu", "--setting", "platform=cuda").complaint()
    assert "--device is of platform 'cpu', but the settings name 'cuda'" in said
    said = hardpoint("plugins", "doctor", "--model", tiny, "--device", "abacus").complaint()
    assert "no platform plugin 'abacus'" in said
    said = hardpoint("plugins", "doctor", "--model", tiny, "--device", "cuda 80GiB").complaint()
    assert "'cuda 80GiB' names no architecture of this platform; write it as in 'cuda sm_90 80GiB'" in said


@pytest.mark.parametrize("setting", ["", "=", "--=1"])
def test_a_setting_without_a_name_is_refused(hardpoint: CommandLine, tiny: Path, setting: str) -> None:
    said = hardpoint("plugins", "doctor", "--model", tiny, f"--setting={setting}").complaint()
    assert "names no setting" in said

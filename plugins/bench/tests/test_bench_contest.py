"""Workloads on a model, with engines that are scripted: who gets which ids in which order, and what is reported."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from hardpoint.config import AppConfig
from hardpoint.errors import ConfigError
from hardpoint_bench.bounds import BOUNDS
from hardpoint_bench.contest import Contest
from hardpoint_bench.flags import MODEL, Values, every_flag
from hardpoint_bench.machine import describe_machine
from hardpoint_bench.model_command import sized
from hardpoint_bench.model_report import ratios, report_of, table
from hardpoint_bench.peers import PEERS, ChosenPeer, choose_peers
from hardpoint_bench.workloads import BY_COMMAND, WORKLOADS, Workload
from scripted_sides import OUR_FACTS, told_to, write_side

CONFIG = AppConfig.model_validate({"engines": {"tiny": {"model": {"name": "tiny"}}}})
WORKLOAD = Workload("prefix", "small", 3, 4, 2, 5)
SETTINGS = {"prompt_len": 6, "shared_prefix": 4, "output_len": 5, "batch": 3, "repeats": 2, "id_seed": 0}
FACTS = OUR_FACTS


class Duel:
    """Ours and one peer, both scripted, with a log of what they were told."""

    def __init__(self, folder: Path, *, peers: int = 1, **contest: Any) -> None:
        self._folder = folder
        rival = {"version": "1.2", "vocab_size": 30, "max_model_len": None, "precision": "float32", "threads": 2}
        chosen = [ChosenPeer(write_side(folder, "rival", rival, 3.0))][:peers]
        ours = write_side(folder, "hardpoint", FACTS, 1.5)
        given = {
            "seed": 0,
            "threads": None,
            "workload": WORKLOAD,
            "tell": lambda text: None,
            "settle_s": 0.0,
            **contest,
        }
        self.contest = Contest(config=CONFIG, peers=chosen, ours=ours, **given)

    def told(self) -> list[list[Any]]:
        return told_to(self._folder)

    def runs(self) -> list[tuple[str, list[list[int]]]]:
        return [(line[0], line[1]) for line in self.told() if not line[0].startswith("load ")]

    def report(self, *, starts: bool = False) -> dict[str, Any]:
        return report_of(self.contest, "tiny", SETTINGS, starts=starts)


@pytest.fixture(scope="module")
def duel(tmp_path_factory: pytest.TempPathFactory) -> Duel:
    duel = Duel(tmp_path_factory.mktemp("duel"))
    duel.contest.run(2)
    return duel


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> Duel:
    duel = Duel(tmp_path_factory.mktemp("starts"), workload=Workload("startup", "small", 1, 0, 6, 1))
    duel.contest.run_starts(1)
    return duel


def test_sides_take_turns_and_the_order_turns_too(duel: Duel) -> None:
    assert [name for name, _ in duel.runs()] == ["hardpoint", "rival", "rival", "hardpoint", "hardpoint", "rival"]
    assert [line[0] for line in duel.told() if line[0].startswith("load ")] == ["load hardpoint", "load rival"]


def test_both_sides_get_the_same_ids_and_every_repeat_others(duel: Duel) -> None:
    by_side: dict[str, list[list[list[int]]]] = {}
    for name, prompts in duel.runs():
        by_side.setdefault(name, []).append(prompts)
    assert by_side["hardpoint"] == by_side["rival"]
    first, second, third = by_side["hardpoint"]
    assert first != second != third != first
    for prompts in by_side["hardpoint"]:
        assert [len(prompt) for prompt in prompts] == [6, 6, 6]
        assert len({tuple(prompt[:4]) for prompt in prompts}) == 1, "the shared part"
        assert len({tuple(prompt[4:]) for prompt in prompts}) == 3
        assert max(map(max, prompts)) < 30, "ids are in both vocabularies"


def test_peers_load_what_we_loaded_as_we_did(duel: Duel) -> None:
    ours, peer = (line[1] for line in duel.told() if line[0].startswith("load "))
    assert AppConfig.model_validate(ours["config"]) == CONFIG
    del peer["started"]
    assert peer == {
        "model": "/models/tiny", "dtype": "float32", "threads": 2, "batch": 3, "max_len": 11, "workload": "prefix",
        "precision": None, "weights": None,
    }  # fmt: skip


def test_the_unmeasured_run_is_in_no_figure(duel: Duel) -> None:
    assert [len(entrant.results) for entrant in duel.contest.entrants] == [2, 2]


def test_the_report_has_one_form(duel: Duel) -> None:
    report = json.loads(json.dumps(duel.report()))
    assert list(report) == ["workload", "model", "settings", "machine", "figures", "phases", "peers", "ratios"]
    assert report["settings"] == {
        **SETTINGS,
        **{name: FACTS[name] for name in ("dtype", "quantization", "precision", "notes", "ranks")},
    }
    assert list(report["machine"]) == ["cpu", "flags", "cores", "memory_gib", "system", "python", "torch", "threads"]
    figures = [
        "wall_s", "ttft_s", "output_tokens_per_s", "prompt_tokens_per_s", "cached_tokens", "decode_tokens_per_s",
        "peak_memory_mib",
    ]  # fmt: skip
    assert list(report["figures"]) == figures
    assert all(list(figure) == ["median", "low", "high"] for figure in report["figures"].values())
    assert report["figures"]["output_tokens_per_s"] == {"median": 10.0, "low": 10.0, "high": 10.0}
    assert report["phases"] == {}
    rival = report["peers"]["rival"]
    assert list(rival) == ["python", "version", "precision", "threads", "model", "figures", "phases"]
    assert list(rival["figures"]) == figures
    assert rival["model"] == "/models/tiny"
    assert rival["figures"]["output_tokens_per_s"]["median"] == 5.0


def test_ratios_above_one_mean_that_we_are_ahead(duel: Duel) -> None:
    found = duel.report()["ratios"]["rival"]
    for name in ("wall_s", "ttft_s", "output_tokens_per_s", "prompt_tokens_per_s", "decode_tokens_per_s"):
        assert found[name] == {"median": 2.0, "low": 2.0, "high": 2.0}
    assert "peak_memory_mib" in found
    assert "cached_tokens" not in found


def test_ratios_are_of_runs_that_belong_together() -> None:
    """A machine that gets slower halfway slows both sides: the ratio stays."""
    ours, theirs = [{"wall_s": 1.0}, {"wall_s": 10.0}], [{"wall_s": 3.0, "more": 1.0}, {"wall_s": 30.0, "more": 1.0}]
    assert ratios(ours, theirs) == {"wall_s": {"median": 3.0, "low": 3.0, "high": 3.0}}
    assert ratios([{"peak_memory_mib": 2.0}], [{"peak_memory_mib": 0.0}]) == {}


def test_the_table_names_sides_machine_and_ratio(duel: Duel) -> None:
    report = duel.report()
    report["figures"]["peak_memory_mib"] = {"median": 1092.4, "low": 1091.0, "high": 1092.6}
    text = table(report)
    lines = text.splitlines()
    assert lines[0] == "tiny, prefix: 3 x (6 -> 5) tokens, 4 shared"
    assert "2 threads" in lines[1]
    assert lines[2:5] == [
        "hardpoint: float32 weights, activations and KV cache", "hardpoint: lowered by script", "rival: float32",
    ]  # fmt: skip
    assert lines[7].split() == ["hardpoint", "rival", "x", "rival"]
    (wall,) = [line for line in lines if line.startswith("wall_s")]
    assert wall.split("  ")[0] == "wall_s"
    assert "1.5 [1.5-1.5]" in wall
    assert wall.endswith("2 [2-2]")
    assert "1,092 [1,091-1,093]" in text
    assert "(s)" not in text


@pytest.mark.slow
def test_a_start_is_a_new_process_each_time_and_a_table_of_phases(starts: Duel) -> None:
    assert [line[0].partition(" ")[2] for line in starts.told() if line[0].startswith("load ")] == [
        "hardpoint", "rival", "rival", "hardpoint",
    ]  # fmt: skip
    assert [name for name, _ in starts.runs()] == ["hardpoint", "rival", "rival", "hardpoint"]
    report = starts.report(starts=True)
    assert list(report["figures"]) == ["start_s", "peak_memory_mib"]
    assert list(report["phases"]) == ["interpreter", "imports", "weights", "first_token"]
    total = sum(figure["median"] for figure in report["phases"].values())
    assert report["figures"]["start_s"]["median"] == pytest.approx(total)
    assert list(report["ratios"]["rival"]) == ["start_s", "peak_memory_mib"]
    assert "first_token (s)" in table(report)


def test_prompts_that_do_not_fit_are_refused_before_any_run(tmp_path: Path) -> None:
    duel = Duel(tmp_path, peers=0, workload=Workload("latency", "long", 1, 0, 60, 5))
    with pytest.raises(ConfigError, match=r"--prompt-len 60 and --output-len 5 need 65 tokens; .* hardpoint is 64"):
        duel.contest.run(1)
    assert duel.runs() == []


def test_workloads_are_those_that_the_figures_of_peers_were_taken_with() -> None:
    shapes = {name: (one.num_requests, one.prompt_length, one.shared, one.output) for name, one in BY_COMMAND.items()}
    assert shapes == {
        "latency": (1, 128, 0, 128),
        "throughput": (32, 128, 0, 128),
        "prefill": (1, 1024, 0, 1),
        "prefix": (16, 800, 768, 16),
        "startup": (1, 128, 0, 1),
    }
    assert {name: one.name for name, one in BY_COMMAND.items()} == {name: name for name in BY_COMMAND}
    assert not set(BY_COMMAND) & set(WORKLOADS) - {"prefill", "prefix"}


def test_sizes_can_be_set() -> None:
    given = Values({"prompt-len": 9, "shared-prefix": 4, "output-len": 3, "batch": 2})
    found = sized(BY_COMMAND["prefix"], given)
    assert (found.num_requests, found.prompt_length, found.shared, found.own, found.output) == (2, 9, 4, 5, 3)
    assert sized(BY_COMMAND["latency"], Values({"shared-prefix": 128})).own == 0
    assert sized(BY_COMMAND["startup"], Values({"prompt-len": 7})).prompt_length == 7


@pytest.mark.parametrize(
    ("name", "given", "fault"),
    [
        ("prefix", {"prompt-len": 100}, "--shared-prefix 768 is longer than --prompt-len 100"),
        ("latency", {"shared-prefix": 129}, "--shared-prefix 129 is longer than --prompt-len 128"),
        ("startup", {"output-len": 2}, "--output-len: a start ends with its first token"),
    ],
)
def test_sizes_that_contradict_are_refused(name: str, given: dict[str, int], fault: str) -> None:
    with pytest.raises(ConfigError, match=fault):
        sized(BY_COMMAND[name], Values(given))


def test_every_number_has_bounds() -> None:
    assert {flag.name for flag in MODEL if flag.kind is int} <= set(BOUNDS)
    assert {flag.name for flag in MODEL} <= set(every_flag())


def test_peers_get_their_own_interpreters_and_models(tmp_path: Path) -> None:
    odd = tmp_path / "b=c.gguf"
    odd.touch()
    found = choose_peers(["llama.cpp", "transformers"], ["llama.cpp=/a/python"], [f"llama.cpp={odd}"])
    assert [(peer.program.name, peer.model) for peer in found] == [("llama.cpp", str(odd)), ("transformers", None)]
    assert [peer.program.python == "/a/python" for peer in found] == [True, False]
    assert found[1] == ChosenPeer(PEERS["transformers"])
    (alone,) = choose_peers(["transformers"], ["/b/python"], [str(odd)])
    assert (alone.program.python, alone.model) == ("/b/python", str(odd))
    assert all(program.adapter.is_file() for program in PEERS.values())


@pytest.mark.parametrize(
    ("names", "pythons", "models", "fault"),
    [
        (["exllama"], [], [], r"--compare 'exllama': no such peer; there are: transformers, llama\.cpp"),
        (["transformers", "transformers"], [], [], "--compare transformers: it takes part already"),
        (["transformers", "llama.cpp"], ["/p"], [], r"--peer-python '/p': say whose it is, as NAME=PATH"),
        ([], [], ["/m"], r"--peer-model '/m': say whose it is, as NAME=PATH \(--compare: none\)"),
        (["transformers"], ["llama.cpp=/p"], [], r"--peer-python 'llama.cpp=/p': llama.cpp takes no part"),
        (["transformers"], [], ["/nowhere"], "--peer-model '/nowhere': no such file or folder"),
        (["transformers"], ["/p", "/q"], [], "--peer-python: transformers has two, '/p' and '/q'"),
    ],
)
def test_peers_that_make_no_sense_are_refused(
    names: Sequence[str], pythons: Sequence[str], models: Sequence[str], fault: str
) -> None:
    with pytest.raises(ConfigError, match=fault):
        choose_peers(names, pythons, models)


def test_the_machine_is_described() -> None:
    machine = describe_machine()
    assert machine["cpu"]
    assert machine["cores"] >= 1
    assert machine["memory_gib"] > 0

"""The suite: who takes part in which class with which model, what a failure costs, and that a result can go on."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hardpoint.config import AppConfig
from hardpoint.errors import ConfigError
from hardpoint_bench.classes import CLASSES, EXPORTS, VARIANTS, chosen_classes, variant_of
from hardpoint_bench.convert_command import commands
from hardpoint_bench.documents import check_same, check_writable, read_result, write_text
from hardpoint_bench.inventory import Inventory
from hardpoint_bench.peers import PEERS
from hardpoint_bench.suite import Suite, in_class, shrunk
from hardpoint_bench.suite_report import suite_table
from hardpoint_bench.workloads import BY_COMMAND, Workload
from scripted_sides import OUR_FACTS, told_to, write_side
from tiny_llama import CONFIG, write_tiny_gguf

APP = AppConfig.model_validate({"engines": {"tiny": {"model": {"name": "tiny"}}}})
WORKLOADS = (
    Workload("latency", "", 1, 0, 6, 3),
    Workload("prefix", "", 2, 4, 3, 3),
    Workload("startup", "", 1, 0, 6, 1),
)
RIVAL = {"version": "1.2", "vocab_size": 30, "max_model_len": None, "precision": "int8 (q8_1)", "threads": 2}
PEAKS = {"memory_read": 1e9, "fp32": 1e11, "int8": 2e11}


class Scene:
    """A suite of scripted sides: ours, and as peers llama.cpp, which fails with prompts of 7 tokens, and OpenVINO."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        model = write_tiny_gguf(folder / "tiny.gguf")
        facts = {**OUR_FACTS, "model_path": str(model), "sizes": dict(CONFIG)}
        (folder / "models" / "fp32.gguf").mkdir(parents=True)
        write_tiny_gguf(folder / "models" / "q8_0.gguf")
        programs = {
            "llama.cpp": write_side(folder, "llama.cpp", RIVAL, 4.0, fails_in=7),
            "openvino-genai": write_side(folder, "openvino-genai", RIVAL, 3.0),
        }
        self.kept: list[dict[str, Any]] = []
        self.suite = Suite(
            config=APP,
            inventory=Inventory(programs, {"vllm": "install it"}, folder),
            workloads=WORKLOADS,
            repeats=2,
            seed=0,
            threads=2,
            shrink=1,
            peaks=lambda threads: PEAKS,
            keep=lambda found: self.kept.append(json.loads(json.dumps(found))),
            ours=write_side(folder, "hardpoint", facts, 1.5),
            settle_s=0.0,
            tell=lambda text: None,
        )


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Scene:
    scene = Scene(tmp_path_factory.mktemp("suite"))
    scene.suite.run(chosen_classes("int8,4bit"))
    return scene


SCRIPTED = pytest.mark.slow


@SCRIPTED
def test_every_side_loads_what_its_class_asks_for(scene: Scene) -> None:
    loads = [line for line in told_to(scene.folder) if line[0].startswith("load ")]
    ours = [
        job["config"]["engines"]["tiny"]["model"]["quantization"] for name, job in loads if name == "load hardpoint"
    ]
    assert ours[:2] == ["int8", "int8"]
    assert ours[-1] == "gguf"
    theirs = {(Path(job["model"]).name, job["precision"], job["weights"]) for name, job in loads if "config" not in job}
    assert theirs == {("q8_0.gguf", "int8", "F32")}, "named like that; what is in it is looked up"


@SCRIPTED
def test_a_peer_that_fails_leaves_and_the_others_go_on(scene: Scene) -> None:
    measured = scene.suite.result["classes"]["int8"]
    assert list(measured["faults"]) == ["llama.cpp, prefix"]
    assert "out of luck" in measured["faults"]["llama.cpp, prefix"]
    peers = {name: set(report["peers"]) for name, report in measured["workloads"].items()}
    both = {"llama.cpp", "openvino-genai"}
    assert peers == {"latency": both, "prefix": {"openvino-genai"}, "startup": both}
    ratios = measured["workloads"]["latency"]["ratios"]
    assert ratios["openvino-genai"]["wall_s"]["median"] == 2.0
    assert "python" not in measured["workloads"]["latency"]["peers"]["llama.cpp"]


@SCRIPTED
def test_a_class_that_we_cannot_run_says_why(scene: Scene) -> None:
    measured = scene.suite.result["classes"]["4bit"]
    assert measured["workloads"] == {}
    assert measured["faults"] == {"hardpoint": "ConfigError: no such quantization"}
    rows = [row for row in scene.suite.result["targets"] if row["class"] == "4bit"]
    assert {row["why"] for row in rows} == {"ConfigError: no such quantization"}


@SCRIPTED
def test_the_result_has_limits_targets_and_whoever_is_missing(scene: Scene) -> None:
    result = json.loads(json.dumps(scene.suite.result))
    assert result["missing_peers"] == {"vllm": "install it"}
    assert result["roofline"] == PEAKS
    assert len(result["peaks"]) == 3
    assert result["machine"]["threads"] == 2
    latency = result["classes"]["int8"]["workloads"]["latency"]
    assert latency["fractions"]["decode_tokens_per_s"] == pytest.approx(
        latency["figures"]["decode_tokens_per_s"]["median"] / latency["limits"]["decode_tokens_per_s"]
    )
    assert 0 < latency["fractions"]["wall_s"] < 1
    assert result["classes"]["int8"]["workloads"]["startup"]["fractions"] == {}
    (decode,) = [row for row in result["targets"] if row["workload"] == "latency" and row["class"] == "int8"]
    assert (decode["met"], decode["rival"], decode["reached"]) == (True, "openvino-genai", 2.0)
    assert [len(kept["classes"]) for kept in scene.kept] == [1, 1, 1, 2], "kept after every workload"


@SCRIPTED
def test_a_run_of_some_workloads_leaves_the_others_as_they_were(tmp_path: Path) -> None:
    scene = Scene(tmp_path)
    scene.suite.run(chosen_classes("int8"))
    before = json.loads(json.dumps(scene.suite.result["classes"]["int8"]))
    scene.suite.workloads = [one for one in WORKLOADS if one.name == "latency"]
    scene.suite.repeats = 3
    after = scene.suite.run(chosen_classes("int8"))["classes"]["int8"]
    assert after["workloads"].keys() == before["workloads"].keys()
    assert after["workloads"]["prefix"] == before["workloads"]["prefix"]
    assert after["workloads"]["latency"]["settings"]["repeats"] == 3
    assert after["faults"] == before["faults"], "the peer that failed with another workload"
    assert (after["sizes"], after["weight_bytes"]) == (before["sizes"], before["weight_bytes"])


@SCRIPTED
def test_the_table_has_a_line_per_side_and_one_per_target(scene: Scene) -> None:
    text = suite_table(scene.suite.result)
    assert "1.5 [1.5–1.5]" in text
    assert "llama.cpp, prefix: " in text
    assert text.count(" met") == sum(row["met"] is True for row in scene.suite.result["targets"]) > 0
    assert "not measured: ConfigError: no such quantization" in text


def test_classes_are_chosen_by_name() -> None:
    assert [one.name for one in chosen_classes(None)] == ["fp32", "int8", "4bit"]
    assert [one.name for one in chosen_classes("4bit, fp32")] == ["4bit", "fp32"]
    with pytest.raises(ConfigError, match="--classes 'fp16': no such class; there are: fp32, int8, 4bit"):
        chosen_classes("fp16")
    with pytest.raises(ConfigError, match="--classes fp32: it is named twice"):
        chosen_classes("fp32,fp32")
    assert {peer for one in CLASSES.values() for peer in one.variants} <= set(PEERS)


def test_peers_load_the_best_variant_that_is_there(tmp_path: Path) -> None:
    fp32, four = CLASSES["fp32"], CLASSES["4bit"]
    assert variant_of(fp32, "openvino-genai", tmp_path) is None
    assert variant_of(fp32, "transformers", None) == ""
    assert variant_of(four, "transformers", tmp_path) is None
    int8 = CLASSES["int8"]
    (tmp_path / "q8_0.gguf").touch()
    assert variant_of(int8, "openvino-genai", tmp_path) == str(tmp_path / "q8_0.gguf")
    (tmp_path / "openvino-int8").mkdir()
    assert variant_of(int8, "openvino-genai", tmp_path) == str(tmp_path / "openvino-int8")


def test_models_are_converted_by_what_is_installed(tmp_path: Path) -> None:
    ours = commands(Path("model.gguf"), tmp_path)
    assert list(ours) == list(VARIANTS)
    assert ours["hf-w8a8"][-3:] == ("model.gguf", str(tmp_path / "models"), "hf-w8a8")
    exporter = tmp_path / "convert" / "bin" / "optimum-cli"
    exporter.parent.mkdir(parents=True)
    exporter.touch()
    found = commands(Path("model.gguf"), tmp_path)
    assert list(found) == [*VARIANTS, *EXPORTS]
    assert found["openvino-int4"][0] == str(exporter)
    assert {name for one in CLASSES.values() for names in one.variants.values() for name in names} <= {"", *found}


def test_peers_without_a_model_are_told(tmp_path: Path) -> None:
    inventory = Inventory({name: PEERS[name] for name in ("vllm", "transformers")}, {}, tmp_path)
    taking, absent = inventory.peers_for(CLASSES["fp32"])
    assert [peer.program.name for peer in taking] == ["transformers"]
    assert absent == {"vllm": f"no converted model hf-fp32 in {tmp_path / 'models'}"}
    taking, absent = inventory.peers_for(CLASSES["4bit"])
    assert (taking, set(absent.values())) == ([], {"has nothing in this class"})


def test_settings_of_a_class_leave_the_others_alone() -> None:
    chosen = in_class(APP, CLASSES["int8"])
    assert chosen.engines["tiny"].model.quantization == "int8"
    assert chosen.engines["tiny"].cache.kv_cache_dtype == "bfloat16"
    assert APP.engines["tiny"].model.quantization is None
    assert chosen.engines["tiny"].model.dtype == "float32"
    assert in_class(chosen, CLASSES["fp32"]).engines["tiny"].model.quantization is None


def test_workloads_shrink_but_stay_what_they_are() -> None:
    small = {name: shrunk(one, 64) for name, one in BY_COMMAND.items()}
    assert replace(small["prefix"], description="") == Workload("prefix", "", 2, 12, 2, 2)
    assert (small["prefill"].own, small["prefill"].output, small["latency"].num_requests) == (16, 1, 1)
    assert shrunk(BY_COMMAND["throughput"], 1) == BY_COMMAND["throughput"]


def test_results_go_on_only_where_they_began(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "result.json"
    assert read_result(path) == {"format": 1}
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_result(path, must_exist=True)
    machine = {"cpu": "x", "cores": 2, "threads": 2}
    write_text(path, json.dumps({"format": 1, "model": "tiny", "machine": machine}))
    assert [child.name for child in path.parent.iterdir()] == ["result.json"]
    check_same(path, {"format": 1}, "tiny", machine)
    check_same(path, read_result(path), "tiny", machine)
    with pytest.raises(ConfigError, match=r"has figures of \('tiny', 'x', 2, 2\) .* not of \('tiny', 'y', 2, 2\)"):
        check_same(path, read_result(path), "tiny", {**machine, "cpu": "y"})
    path.write_text("{", encoding="utf-8")
    with pytest.raises(ConfigError, match="is no result of a benchmark"):
        read_result(path)
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ConfigError, match="in format 1"):
        read_result(path)
    with pytest.raises(ConfigError, match="cannot be written"):
        write_text(path / "below", "")
    with pytest.raises(ConfigError, match="cannot be written"):
        check_writable(path / "below")
    check_writable(path)
    assert [child.name for child in path.parent.iterdir()] == ["result.json"]


@pytest.mark.parametrize(
    ("part", "said"),
    [
        ({"machine": None}, "'machine' is no dict"),
        ({"classes": "x"}, "'classes' is no dict"),
        ({"targets": {}}, "'targets' is no list"),
        ({"machine": {"cpu": "x"}}, "'machine' lacks one of cpu, cores, threads"),
    ],
)
def test_a_damaged_result_is_named(tmp_path: Path, part: dict[str, Any], said: str) -> None:
    path = tmp_path / "result.json"
    path.write_text(json.dumps({"format": 1, **part}), encoding="utf-8")
    with pytest.raises(ConfigError, match=f"{said}; remove the file"):
        read_result(path)


def test_peers_that_are_not_there_are_named_with_what_to_install(tmp_path: Path) -> None:
    (tmp_path / "llama.cpp" / "bin").mkdir(parents=True)
    (tmp_path / "llama.cpp" / "bin" / "python").write_text("#!/bin/sh\nexit 1\n", encoding="utf-8")
    (tmp_path / "llama.cpp" / "bin" / "python").chmod(0o755)
    with pytest.raises(ConfigError, match=r"--compare llama.cpp: .*llama.cpp/bin/python does not have it; python3 -m"):
        Inventory.take(["llama.cpp"], tmp_path, {})
    with pytest.raises(ConfigError, match="no such peer"):
        Inventory.take(["exllama"], tmp_path, {})
    with pytest.raises(ConfigError, match=r"--peers .*nowhere': there is no such folder"):
        Inventory.take(None, tmp_path / "nowhere", {})
    with pytest.raises(ConfigError, match="--peer-python '/nowhere/python' cannot be run"):
        Inventory.take(["vllm"], None, {"vllm": "/nowhere/python"})

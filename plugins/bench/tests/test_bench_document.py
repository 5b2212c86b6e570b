"""The page on performance: written from a small recorded result, section by section, and the same each time."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from hardpoint.cli import main
from hardpoint.errors import ConfigError
from hardpoint_bench.charts import draw_charts
from hardpoint_bench.document import chart_names, page
from hardpoint_bench.document_command import RESULT
from hardpoint_bench.suite_report import number
from hardpoint_bench.targets import TARGETS
from workspace import ROOT

RECORDED = Path(__file__).parent / "data" / "small_result.json"
PAGE = ROOT / "docs" / "performance.md"


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    """Of a run with two classes on sizes divided by 16, with one peer that took part, one that failed, two missing."""
    found: dict[str, Any] = json.loads(RECORDED.read_text(encoding="utf-8"))
    return found


def section(text: str, heading: str) -> str:
    found = re.search(rf"^## {heading}\n(.*?)(?=^## |\Z)", text, re.MULTILINE | re.DOTALL)
    assert found is not None, heading
    return found[1]


def rows(text: str) -> list[list[str]]:
    """Cells of the tables in ``text``, without the lines below heads."""
    lines = [line for line in text.splitlines() if line.startswith("|") and not line.startswith("|---")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def test_the_page_in_the_repository_is_that_of_the_result_beside_it() -> None:
    """`hardpoint bench document` writes both; a change of either alone would tell something nobody measured."""
    recorded = json.loads((PAGE.with_suffix("") / RESULT).read_text(encoding="utf-8"))
    assert PAGE.read_text(encoding="utf-8") == page(recorded, f"performance/{RESULT}")
    assert {path.name for path in PAGE.with_suffix("").glob("*.svg")} == set(chart_names(recorded))


def test_without_figures_there_are_workloads_and_targets() -> None:
    text = page({"format": 1}, "x.json")
    assert "No result was recorded yet" in text
    assert len(rows(section(text, "Targets"))) == 1 + len(TARGETS)
    assert re.findall("^## (.*)$", text, re.MULTILINE) == ["Targets"]


def test_the_machine_is_described(result: dict[str, Any]) -> None:
    text = section(page(result, "x.json"), "Machine")
    cells = dict(row[:2] for row in rows(text) if len(row) == 2)
    assert cells["processor"] == result["machine"]["cpu"]
    assert "avx2" in cells["instructions"]
    assert "divided by 16: this was a trial run" in text
    for name, advice in result["missing_peers"].items():
        assert f"{name} was not installed. To have it measured: `{advice}`." in text


def test_every_engine_has_its_precision_beside_its_figures(result: dict[str, Any]) -> None:
    text = section(page(result, "x.json"), "float32")
    ours, theirs, ratio, fraction = rows(text)[1:5]
    assert ours[:2] == ["**hardpoint**", "float32 weights, activations and KV cache"]
    assert theirs[0] == "transformers"
    assert theirs[1].startswith("float32 weights and activations (version ")
    assert re.fullmatch(r"\d.* \[\d.*–\d.*\]", ours[3])
    latency = result["classes"]["fp32"]["workloads"]["latency"]
    assert ratio[3] == f"{latency['ratios']['transformers']['decode_tokens_per_s']['median']:.2f} (transformers)"
    assert fraction[3] == f"{latency['fractions']['decode_tokens_per_s']:.0%}"
    assert fraction[-1] == "–", "a start has no limit"
    assert "![Engines in the class fp32](performance/peers-fp32.svg)" in text


def test_a_start_is_shown_by_phase(result: dict[str, Any]) -> None:
    phases = result["classes"]["fp32"]["workloads"]["startup"]["phases"]
    head, seconds = rows(section(page(result, "x.json"), "float32"))[-2:]
    assert head == list(phases)
    assert seconds == [number(one["median"]) for one in phases.values()]


@pytest.mark.parametrize(("value", "text"), [(1234.5, "1,234"), (99.96, "100"), (0.01234, "0.0123"), (None, "–")])
def test_numbers_are_short_and_without_exponents(value: float | None, text: str) -> None:
    assert number(value) == text


def test_who_failed_or_took_no_part_is_told(result: dict[str, Any]) -> None:
    text = page(result, "x.json")
    assert "- llama.cpp, prefix: failed (" in section(text, "float32")
    assert "- transformers: took no part (has nothing in this class)." in section(text, "8 bits")


def test_targets_say_what_was_reached(result: dict[str, Any]) -> None:
    found = {tuple(row[:3]): row[3:] for row in rows(section(page(result, "x.json"), "Targets"))}
    for row in result["targets"]:
        reached, rival, word = found[row["class"], row["workload"], row["target"]]
        assert rival == (row["rival"] or "–")
        if row["met"] is None:
            assert (reached, word) == ("–", f"not measured: {row['why']}")
        else:
            assert (reached, word) == (number(row["reached"]), "met" if row["met"] else "**missed**")
    assert found["4bit", "startup", "start_s ≤ 2.5"] == ["–", "–", "not measured"]


def test_limits_are_beside_what_was_reached(result: dict[str, Any]) -> None:
    text = section(page(result, "x.json"), "Limits of the machine")
    assert f"reading {result['roofline']['memory_read'] / 1e9:.1f} GB/s" in text
    latency = result["classes"]["fp32"]["workloads"]["latency"]
    limit = number(latency["limits"]["decode_tokens_per_s"])
    (found,) = [row for row in rows(text) if row[:3] == ["fp32", "latency", "decode_tokens_per_s"]]
    assert found[4] == limit


def test_scaling_and_profiles_have_a_line_each(result: dict[str, Any]) -> None:
    text, study = page(result, "x.json"), result["scaling"]
    lines = rows(section(text, "Scaling"))
    assert len(lines) == 3 + len(study["batch"]) + len(study["context"]) + len(study["threads"])
    head, *groups, outside = rows(section(text, "Where the time goes"))
    assert head[1:] == list(study["profiles"])
    for at, profile in enumerate(study["profiles"].values(), start=1):
        assert outside[at] == f"{1 - profile['kernels']:.1%}"
        assert sum(float(row[at].rstrip("%")) for row in groups) == pytest.approx(100, abs=0.5)


@pytest.mark.slow
def test_pictures_are_those_of_the_page_and_the_same_each_time(result: dict[str, Any], tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    draw_charts(result, first)
    draw_charts(result, second)
    names = sorted(path.name for path in first.iterdir())
    assert names == sorted(chart_names(result))
    for name in names:
        content = (first / name).read_bytes()
        assert content == (second / name).read_bytes()
        assert content.startswith(b"<?xml")
        assert len(content) < 100_000
        assert f"(performance/{name})" in page(result, "x.json")
    assert b"transformers" in (first / "peers-fp32.svg").read_bytes()
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        draw_charts(result, tmp_path / "file")


@pytest.mark.slow
def test_the_command_writes_page_pictures_and_result(result: dict[str, Any], tmp_path: Path) -> None:
    target = tmp_path / "fast.md"
    (tmp_path / "fast").mkdir()
    (tmp_path / "fast" / "peers-old.svg").touch()
    assert main(["bench", "document", str(RECORDED), "--output", str(target)]) == 0
    again = json.loads((tmp_path / "fast" / RESULT).read_text(encoding="utf-8"))
    assert target.read_text(encoding="utf-8") == page(again, f"fast/{RESULT}") == page(result, f"fast/{RESULT}")
    assert {path.name for path in (tmp_path / "fast").iterdir()} == {*chart_names(result), RESULT}


@pytest.mark.parametrize(
    ("arguments", "fault"),
    [
        ([], "no result is named"),
        (["/nowhere.json", "--output", "x.md"], "'/nowhere.json' cannot be read"),
        ([str(RECORDED)], "name the page to write"),
        ([str(RECORDED), "--output", "x.html"], "--output 'x.html': name the page to write"),
        ([str(RECORDED), "--output", "x.md", "--threads", "1"], "--threads: not for `hardpoint bench document`"),
    ],
)
def test_what_makes_no_page_is_refused(
    arguments: list[str],
    fault: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["bench", "document", *arguments]) == 1
    assert fault in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []

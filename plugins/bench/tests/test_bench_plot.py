"""Pictures of replays: their files, and what cannot be drawn."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from bench_support import make_rig
from hardpoint.errors import ConfigError
from hardpoint_bench.generator import Mix
from hardpoint_bench.outcome import Outcome
from hardpoint_bench.plot import check_plot, draw
from hardpoint_bench.rig import Sizes
from hardpoint_bench.simulation import Simulation, StepCost


def outcome(seed: int) -> Outcome:
    sizes = Sizes(max_num_seqs=4, max_num_batched_tokens=64, max_model_len=64, num_blocks=40)
    mix = Mix(60, rate=20.0, prompt_len=8, output_len=6, length_spread=0.5, seed=seed)
    return Simulation(make_rig(sizes), mix, StepCost(base_s=0.02)).run()


@pytest.mark.slow
@pytest.mark.parametrize(("name", "start"), [("p.png", b"\x89PNG"), ("p.SVG", b"<?xml")])
def test_a_picture_has_a_line_per_scheduler(tmp_path: Path, name: str, start: bytes) -> None:
    path = tmp_path / name
    check_plot(str(path))
    draw(str(path), {"one": outcome(1), "other": outcome(2)})
    content = path.read_bytes()
    assert content.startswith(start)
    assert 5_000 < len(content) < 250_000, "no more points than a picture can show"
    if name.endswith("SVG"):
        for text in (b"requests waiting", b"requests running", b"KV blocks in use", b"simulated time (s)"):
            assert b"<!-- " + text + b" -->" in content
        assert b"<!-- one -->" in content
        assert b"<!-- other -->" in content


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("p.pdf", "must end with .png or .svg"),
        ("p", "must end with"),
        ("nowhere/p.png", "the folder .* does not exist"),
    ],
)
def test_what_cannot_be_written_is_refused_before_the_run(tmp_path: Path, name: str, fault: str) -> None:
    with pytest.raises(ConfigError, match=f"--plot .*{fault}"):
        check_plot(str(tmp_path / name))


def test_a_folder_in_the_place_of_the_file_is_told(tmp_path: Path) -> None:
    (tmp_path / "p.svg").mkdir()
    with pytest.raises(ConfigError, match="--plot .* is a folder"):
        check_plot(str(tmp_path / "p.svg"))


@pytest.mark.slow
def test_nothing_draws_unless_asked() -> None:
    """Commands that draw nothing do not pay for the library that does."""
    program = "import sys, hardpoint_bench.cli; sys.exit('matplotlib' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False, timeout=60).returncode == 0

"""The benchmark of block operations runs and reports what its readers look for; what it measures is not judged here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "benchmarks/blocks.py"


@pytest.mark.slow
def test_it_prints_the_ratio_between_pools() -> None:
    arguments = ["--json", "--pools", "50", "5000", "--rows", "8", "--prompt", "500", "--repeats", "5"]
    command = [sys.executable, str(SCRIPT), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=120)
    figures = json.loads(done.stdout)
    assert set(figures) == {"pool 50", "pool 5000", "ratio", "step", "prompt"}
    assert set(figures["ratio"]) == {"evict", "remember", "find", "allocate", "free", "touch"}
    assert all(value > 0 for part in figures.values() for value in part.values())
    assert {"hash_sha256_us", "index_sha256_us", "hash_xxhash_us"} < set(figures["step"])

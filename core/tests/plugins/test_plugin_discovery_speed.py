"""With 300 distributions installed, discovery stays within its budget, and lists import no plugin.

Lesson: import-free discovery, one metadata scan (300 distributions: at most 60 ms over the bare interpreter).
"""

from __future__ import annotations

import resource
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from .conftest import Site

NUM_DISTRIBUTIONS = 300
BUDGET_S = 0.060
ROUNDS = 15
KINDS = ("hooks", "tokenizer", "scheduler", "attention_backend", "endpoint", "stat_logger")
DISCOVER = "from hardpoint.plugins.discovery import discover; print(len(discover([{path!r}]).plugins))"
LIST = """
import sys
sys.path.insert(0, {path!r})
sys.argv = ["hardpoint", "plugins", "list"]
from hardpoint.cli import main
status = main()
print("LOADED", [name for name in sys.modules if name.startswith("crowd_") or name == "torch"], status)
"""


@pytest.fixture
def crowd(site: Site) -> Site:
    """Every second distribution has plugins; all have descriptions of a usual length."""
    for number in range(NUM_DISTRIBUTIONS):
        kinds = KINDS[: number % 4 + 1] if number % 2 else ()
        plugins = {f"{kind}:crowd_{number}": f"crowd_{number}:create" for kind in kinds}
        requires = ["hardpoint-core>=0.0.1", *(f"dependency-{k}>=1.{k}; extra == 'x'" for k in range(8))]
        modules = {f"crowd_{number}": "raise SystemExit('imported')"}
        folder = site.install(f"crowd-{number}", plugins, requires=requires, modules=modules)
        with (folder / "METADATA").open("a") as file:
            file.write("A line of a description.\n" * 300)
    return site


def run(code: str) -> tuple[float, str]:
    """Processor seconds of an interpreter that runs ``code``, and what it printed.

    It waits for nothing, so on an idle machine that is the time it takes; on a busy one the clock would tell of others.
    """
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, done.stdout


def test_discovery_takes_its_budget_over_the_bare_interpreter(crowd: Site) -> None:
    """L12.8: both are measured in turns and the best of each counts."""
    code = DISCOVER.format(path=str(crowd.root))
    expected = sum(number % 4 + 1 for number in range(NUM_DISTRIBUTIONS) if number % 2)
    assert int(run(code)[1]) == expected
    bare, whole = [], []
    for _ in range(ROUNDS):
        bare.append(run("pass")[0])
        whole.append(run(code)[0])
    cost = min(whole) - min(bare)
    print(f"{1000 * cost:.1f} ms for {NUM_DISTRIBUTIONS} distributions")
    assert cost <= BUDGET_S, f"{1000 * cost:.1f} ms for {NUM_DISTRIBUTIONS} distributions"


def test_listing_a_crowd_imports_none_of_it(crowd: Site) -> None:
    """L12.8, L12.9."""
    _, out = run(LIST.format(path=str(crowd.root)))
    assert "crowd_299" in out
    assert out.splitlines()[-1] == "LOADED [] 0"

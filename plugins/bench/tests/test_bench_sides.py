"""Sides of a benchmark: what crosses to their interpreters and back, what is told when they fail, and that they end."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from hardpoint.errors import ConfigError, HardpointError
from hardpoint_bench.measure import Run
from hardpoint_bench.sides import Program, Result, Side, SideFault

JOB = {"model": "tiny", "dtype": "float32", "threads": 1}

ENGINE = """
import sys

class Engine:
    facts = {"vocab_size": 50, "max_model_len": 64}

    def run(self, prompts, output_len):
        print("engines print what they like")
        count = len(prompts)
        return {
            "seconds": 2.0,
            "ttft_s": 0.5,
            "decode_tokens_per_s": 4.0,
            "num_output_tokens": count * output_len,
            "num_prompt_tokens": sum(map(len, prompts)),
            "num_cached_tokens": 0,
        }

    def close(self):
        pass
"""

WriteAdapter = Callable[..., Program]


@pytest.fixture
def adapter(tmp_path: Path) -> WriteAdapter:
    """Writes one whose ``load`` has the given lines, and whose engine may be changed."""

    def write(load: str = "return Engine()", *, engine: str = ENGINE, **changes: Any) -> Program:
        path = tmp_path / "adapter.py"
        path.write_text(f"{engine}\ndef load(job, phases):\n{textwrap.indent(load, '    ')}\n", encoding="utf-8")
        return Program(**{"name": "scripted", "adapter": path, **changes})

    return write


def is_running(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_a_run_comes_back_and_nothing_printed_disturbs_it(adapter: WriteAdapter) -> None:
    with Side(adapter('print("loading", job["model"])\nreturn Engine()'), JOB) as side:
        assert side.facts == {"vocab_size": 50, "max_model_len": 64}
        result = side.run([[1, 2, 3], [4, 5, 6]], 7)
        again = side.run([[1]], 1)
    assert result.run == Run(2.0, 0.5, 4.0, 14, 6, 0)
    assert result.figures["output_tokens_per_s"] == 7.0
    assert result.figures["prompt_tokens_per_s"] == 3.0
    assert result.peak_memory_mib > 1
    assert again.run.num_output_tokens == 1
    assert not is_running(side.pid)


def test_phases_follow_one_another_and_add_up_to_the_start(adapter: WriteAdapter, tmp_path: Path) -> None:
    """The import of the framework is one of its own, wherever it happens, and the phase around it goes on after it."""
    (tmp_path / "torch.py").write_text("import time\ntime.sleep(0.05)\n", encoding="utf-8")
    load = f"""
phases.begin("weights")
import importlib.util
import sys
sys.path.insert(0, {str(tmp_path)!r})
assert importlib.util.find_spec("torch"), "whoever only looks for it leaves the import to be measured"
import torch
return Engine()
"""
    with Side(adapter(load), JOB) as side:
        result = side.run([[1]], 1)
        later = side.run([[1]], 1)
    assert list(result.phases) == ["interpreter", "imports", "weights", "torch_import", "first_token"]
    assert all(seconds >= 0 for seconds in result.phases.values())
    assert result.phases["torch_import"] >= 0.05
    assert result.start_s == pytest.approx(sum(result.phases.values()))
    assert later.start_s == pytest.approx(result.start_s), "what comes after the first run is no part of the start"


@pytest.mark.slow
def test_memory_of_processes_that_an_engine_started_counts(adapter: WriteAdapter) -> None:
    load = f"""
import subprocess
hold = "import sys; held = bytearray(64 * 2**20); print(1, flush=True); sys.stdin.read()"
Engine.child = subprocess.Popen(
    [{sys.executable!r}, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
)
Engine.child.stdout.readline()
Engine.close = lambda self: (self.child.stdin.close(), self.child.wait())
return Engine()
"""
    with Side(adapter(), JOB) as side:
        alone = side.run([[1]], 1).peak_memory_mib
    with Side(adapter(load), JOB) as side:
        assert side.run([[1]], 1).peak_memory_mib > alone + 64


@pytest.mark.parametrize("module", ["no_such_engine", "no_such_engine.part"])
def test_an_engine_that_is_not_there_says_what_to_install(adapter: WriteAdapter, module: str) -> None:
    program = adapter(f"import {module}", modules={"no_such_engine": "no-such-package"})
    with pytest.raises(ConfigError) as caught:
        Side(program, JOB)
    text = str(caught.value)
    assert "scripted cannot run" in text
    assert f"{sys.executable} -m pip install no-such-package" in text
    assert "--peer-python scripted=PATH" in text
    assert "\n" not in text


def test_an_interpreter_that_cannot_be_run_is_refused(adapter: WriteAdapter) -> None:
    with pytest.raises(ConfigError, match=r"--peer-python '/nowhere/python' cannot be run \(No such file"):
        Side(adapter(python="/nowhere/python"), JOB)


@pytest.mark.parametrize(
    ("load", "changes", "error", "fault"),
    [
        ("raise ValueError('two\\n  lines')", {"modules": {"a": "b"}}, SideFault, "scripted: ValueError: two lines"),
        ("raise type('ConfigError', (Exception,), {})('no')", {}, ConfigError, "^no$"),
        ("raise type('ConfigError', (Exception,), {})('no')", {"modules": {"a": "b"}}, SideFault, "ConfigError: no"),
        ("import os; sys.stderr.write('oh dear'); sys.stderr.flush(); os._exit(3)", {}, SideFault, "exit code 3.*oh d"),
        ("import os; os.kill(os.getpid(), 9)", {}, SideFault, r"its process ended \(signal SIGKILL\): without a word"),
    ],
)
def test_an_engine_that_does_not_start_is_one_line(
    adapter: WriteAdapter, load: str, changes: dict[str, Any], error: type[HardpointError], fault: str
) -> None:
    with pytest.raises(error, match=fault) as caught:
        Side(adapter(load, **changes), JOB)
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def test_fewer_tokens_than_asked_for_are_no_figures(adapter: WriteAdapter) -> None:
    lazy = ENGINE.replace("count * output_len", "count * output_len - 1")
    with (
        pytest.raises(SideFault, match="2 prompt and 10 output tokens were asked for, 2 and 9 were computed"),
        Side(adapter(engine=lazy), JOB) as side,
    ):
        side.run([[1], [2]], 5)
    assert not is_running(side.pid)


def test_a_side_that_would_go_on_is_ended_when_the_command_fails(adapter: WriteAdapter) -> None:
    stubborn = ENGINE.replace("        pass\n", "        import time; time.sleep(600)\n")
    with pytest.raises(KeyboardInterrupt), Side(adapter(engine=stubborn), JOB) as side:
        raise KeyboardInterrupt
    assert not is_running(side.pid)


@pytest.mark.slow
def test_a_side_ends_with_the_command_however_that_ends(adapter: WriteAdapter) -> None:
    command = f"""
import sys
from pathlib import Path
from hardpoint_bench.sides import Program, Side
side = Side(Program("scripted", Path({str(adapter().adapter)!r})), {JOB!r})
print(side.pid, flush=True)
sys.stdin.read()
"""
    parent = subprocess.Popen([sys.executable, "-c", command], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with parent:
        assert parent.stdout is not None
        side = os.pidfd_open(int(parent.stdout.readline()))
        try:
            parent.kill()
            assert select.select([side], [], [], 60)[0], "the side has not ended"
        finally:
            os.close(side)


def test_another_interpreter_gets_nothing_that_is_meant_for_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    ours, other = Program("a", Path("a.py")), Program("a", Path("a.py"), "/other/python")
    assert ours.environment(None)["PYTHONPATH"] == "/ours"
    assert "PYTHONPATH" not in other.environment(None)
    assert other.environment(3)["OMP_NUM_THREADS"] == "3"


def test_a_start_ends_with_the_first_run() -> None:
    result = Result(Run(1, 1, None, 1, 1, 0), 5.0, {"interpreter": 0.25, "first_token": 0.5, "further": 100.0})
    assert result.start_s == 0.75
    assert "decode_tokens_per_s" not in result.figures

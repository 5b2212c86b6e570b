"""The CPU's kernels from the command line: on, off, and where there is no compiler to make them with."""

from __future__ import annotations

from pathlib import Path

import pytest

from cli_support import Finished, run_process
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("models") / "tiny")


def generate(tiny: Path, *flags: str, **environ: str) -> Finished:
    fixed = ("--prompt", "Hello", "--max-tokens", "4", "--json", "--num-kv-blocks", "64", "--temperature", "0")
    return run_process("generate", tiny, *fixed, *flags, environ=environ, timeout=180)


def tokens(done: Finished) -> object:
    (line,) = done.json_lines()
    return line["outputs"] if "outputs" in line else {key: line[key] for key in line if "text" in key or "token" in key}


def test_without_a_compiler_it_generates_and_says_what_was_lost(tiny: Path, tmp_path: Path) -> None:
    usual = generate(tiny)
    done = generate(tiny, PATH="", XDG_CACHE_HOME=str(tmp_path))
    assert tokens(done) == tokens(usual)
    (lost,) = [line for line in done.err.splitlines() if "there are no CPU kernels" in line]
    assert "several times slower" in lost
    assert "install g++" in lost
    assert "not lowered by cpu_native" not in usual.err


def test_switching_kernels_or_the_compiler_off_changes_no_token(tiny: Path) -> None:
    usual = tokens(generate(tiny))
    for flags in (("--plugin", "platform.cpu.kernels=off"), ("--compiler", "none")):
        assert tokens(generate(tiny, *flags)) == usual

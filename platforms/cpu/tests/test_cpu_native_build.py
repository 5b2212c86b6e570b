"""The cache of compiled kernels: its keys, several who start at once, whom it trusts, and doing without a compiler."""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from hardpoint_cpu.native import build
from hardpoint_cpu.native.build import KernelBuild, KernelBuildError, cache_folder, find_build, find_compiler
from hardpoint_cpu.native.levels import LEVELS, Level

GENERIC = LEVELS[-1]
WORDS = """
import sys
from pathlib import Path
from hardpoint_cpu.native.build import KernelBuild, find_compiler
from hardpoint_cpu.native.levels import LEVELS
made = KernelBuild(LEVELS[-1], Path(sys.argv[1]), find_compiler(), sources=Path(sys.argv[2]))
print("ready", flush=True)
sys.stdin.readline()
print(made.compile())
"""


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    """A library of two files, where the kernels' own would take seconds."""
    folder = tmp_path / "sources"
    folder.mkdir()
    (folder / "shared.h").write_text("#pragma once\ninline constexpr int kAnswer = 41;\n", encoding="utf-8")
    (folder / "one.cpp").write_text(
        '#include "shared.h"\nextern "C" __attribute__((visibility("default"))) int answer() { return kAnswer; }\n',
        encoding="utf-8",
    )
    (folder / "two.cpp").write_text("int unused() { return 2; }\n", encoding="utf-8")
    return folder


def tiny(tmp_path: Path, sources: Path, level: Level = GENERIC, flags: tuple[str, ...] = ()) -> KernelBuild:
    return KernelBuild(level, tmp_path / "cache", find_compiler(), ("-O0", *flags), sources)


def test_what_is_compiled_is_found_again_and_one_file_costs_one_file(tmp_path: Path, sources: Path) -> None:
    made = tiny(tmp_path, sources)
    assert not made.is_ready()
    path = made.compile()
    assert made.is_ready()
    assert made.compile() == path
    assert ctypes.CDLL(str(path)).answer() == 41
    made.check_owner()
    assert sorted(entry.name for entry in path.parent.iterdir()) == [path.name]
    assert not [entry for entry in made.cache.iterdir() if entry.name.startswith(".building")]

    (sources / "shared.h").write_text("#pragma once\ninline constexpr int kAnswer = 42;\n", encoding="utf-8")
    assert made.compile() == path
    again = tiny(tmp_path, sources).compile()
    assert again != path
    assert ctypes.CDLL(str(again)).answer() == 42
    # The other one does not include what changed.
    objects = sorted(entry.name.partition("-")[0] for entry in (made.cache / "objects").iterdir())
    assert objects == ["one", "one", "two"]


def test_the_key_knows_sources_flags_and_level(tmp_path: Path, sources: Path) -> None:
    keys = {
        tiny(tmp_path, sources).path,
        tiny(tmp_path, sources, flags=("-g",)).path,
        tiny(tmp_path, sources, LEVELS[4]).path,
    }
    (sources / "shared.h").write_text("#pragma once\n", encoding="utf-8")
    keys.add(tiny(tmp_path, sources).path)
    (sources / "three.cpp").write_text("", encoding="utf-8")
    keys.add(tiny(tmp_path, sources).path)
    (sources / "notes.txt").write_text("not a source", encoding="utf-8")
    keys.add(tiny(tmp_path, sources).path)
    assert len(keys) == 5


LOGGED = """#!/bin/sh
case "$1" in --version) exec g++ --version;; esac
echo "begin" >> {log}
{before}
g++ "$@"
status=$?
echo "end" >> {log}
exit $status
"""


@pytest.fixture
def log(tmp_path: Path) -> Path:
    """What the compiler that :func:`start` is given has begun and ended."""
    path = tmp_path / "log"
    path.touch()
    return path


def start(tmp_path: Path, sources: Path, log: Path, before: str = "") -> subprocess.Popen[str]:
    """A process that compiles once it is told to."""
    compiler = tmp_path / "logged"
    compiler.write_text(LOGGED.format(log=log, before=before), encoding="utf-8")
    compiler.chmod(0o700)
    process = subprocess.Popen(
        [sys.executable, "-c", WORDS, str(tmp_path / "cache"), str(sources)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "CXX": str(compiler)},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    return process


def test_of_processes_that_start_at_once_one_compiles(tmp_path: Path, sources: Path, log: Path) -> None:
    several = [start(tmp_path, sources, log) for _ in range(3)]
    for one in several:
        assert one.stdin is not None
        one.stdin.write("go\n")
        one.stdin.flush()
    said = [one.communicate(timeout=100) for one in several]
    assert [one.returncode for one in several] == [0, 0, 0], said
    assert len({out for out, _ in said}) == 1
    assert ctypes.CDLL(said[0][0].strip()).answer() == 41
    # Two sources and the library.
    assert log.read_text().split().count("begin") == 3


def test_compilers_of_a_killed_process_are_waited_for(tmp_path: Path, sources: Path, log: Path) -> None:
    (sources / "two.cpp").unlink()
    go_on = tmp_path / "go on"
    killed = start(tmp_path, sources, log, before=f"while ! test -e '{go_on}'; do sleep 0.02; done")
    assert killed.stdin is not None
    killed.stdin.write("go\n")
    killed.stdin.flush()
    while not log.read_text():
        time.sleep(0.01)
    killed.kill()
    for pipe in (killed.stdin, killed.stdout, killed.stderr):
        assert pipe is not None
        pipe.close()
    killed.wait()
    second = start(tmp_path, sources, log)
    threading.Timer(0.5, go_on.touch).start()
    said = second.communicate("go\n", timeout=100)
    assert second.returncode == 0, said
    # Source and library, one after the other, and only after what the killed one left.
    assert log.read_text().split() == ["begin", "end"] * 3


def test_what_killed_builds_left_is_swept_up_after_a_day(tmp_path: Path, sources: Path) -> None:
    made = tiny(tmp_path, sources)
    old, young = made.cache / ".building-old", made.cache / ".building-young"
    for folder in (old, young):
        (folder / "whole").mkdir(parents=True)
    made.cache.chmod(0o700)
    os.utime(old, (1, 1))
    made.compile()
    assert not old.exists()
    assert young.exists()


def test_a_cache_that_others_can_write_is_refused(tmp_path: Path, sources: Path) -> None:
    made = tiny(tmp_path, sources)
    path = made.compile()
    for place in (path, path.parent, made.cache):
        mode = place.stat().st_mode
        place.chmod(mode | 0o022)
        with pytest.raises(
            KernelBuildError, match=f"{place} can be written by other users.*chmod go-w.*XDG_CACHE_HOME"
        ):
            made.check_owner()
        place.chmod(mode)
    made.check_owner()
    shutil.rmtree(path.parent)
    (made.cache / "objects").chmod(0o777)
    with pytest.raises(KernelBuildError, match="objects can be written by other users"):
        made.compile()


def test_a_cache_of_another_user_is_refused_with_its_owner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    facts = list(tmp_path.stat())
    facts[4] = os.getuid() + 1
    monkeypatch.setattr(Path, "stat", lambda self: os.stat_result(facts))
    with pytest.raises(KernelBuildError, match=f"it belongs to user {os.getuid() + 1}.*XDG_CACHE_HOME"):
        build._check_owner(tmp_path)


def test_the_compilers_own_words_are_shown(tmp_path: Path, sources: Path) -> None:
    (sources / "two.cpp").write_text("int broken( { return 2; }\n", encoding="utf-8")
    made = tiny(tmp_path, sources)
    with pytest.raises(KernelBuildError, match=r"failed with status 1:\n.*two\.cpp:1:\d+: error"):
        made.compile()
    assert not made.is_ready()
    assert not [entry for entry in made.cache.iterdir() if entry.name.startswith((".building", "generic"))]


def test_sources_that_change_meanwhile_are_not_kept_under_their_old_key(tmp_path: Path, sources: Path) -> None:
    compiler = tmp_path / "cxx"
    # Edits what it is given, as somebody else might.
    script = f'[ "$1" = --version ] && exit 0\nfor last; do :; done\necho "// more" >> {sources}/one.cpp\n: > "$last"\n'
    compiler.write_text(f"#!/bin/sh\n{script}", encoding="utf-8")
    compiler.chmod(0o755)
    made = KernelBuild(GENERIC, tmp_path / "cache", str(compiler), sources=sources)
    with pytest.raises(KernelBuildError, match="one.cpp changed while it was compiled; start again"):
        made.compile()
    assert not made.is_ready()


def test_a_compiler_that_cannot_be_run_says_what_to_set(tmp_path: Path, sources: Path) -> None:
    made = KernelBuild(GENERIC, tmp_path, str(tmp_path / "nothing"), sources=sources)
    with pytest.raises(KernelBuildError, match="nothing cannot be run: .*set CXX to a C"):
        made.compile()


def test_the_compiler_is_cxx_or_the_first_on_the_path(tmp_path: Path) -> None:
    for name in ("c++", "clang++"):
        (tmp_path / name).write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    path = {"PATH": str(tmp_path)}
    assert find_compiler(path) == str(tmp_path / "c++")
    assert find_compiler({**path, "CXX": "clang++"}) == str(tmp_path / "clang++")
    assert find_compiler({"PATH": "", "CXX": str(tmp_path / "c++")}) == str(tmp_path / "c++")
    with pytest.raises(KernelBuildError, match=r"CXX='g\+\+-99' is not on the path; install g\+\+"):
        find_compiler({**path, "CXX": "g++-99"})


def test_without_a_compiler_the_message_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(KernelBuildError, match=r"no C\+\+ compiler.*apt-get install g\+\+.*or set CXX"):
        find_compiler({"PATH": str(tmp_path)})
    with pytest.raises(KernelBuildError, match="no C"):
        find_compiler({})


def test_without_a_compiler_what_was_compiled_before_is_found(tmp_path: Path, sources: Path) -> None:
    nothing = {"PATH": "", "XDG_CACHE_HOME": str(tmp_path)}
    with pytest.raises(KernelBuildError, match="no C"):
        find_build(GENERIC, nothing, sources)
    with pytest.raises(KernelBuildError, match="holds no library, and there is no compiler"):
        KernelBuild(GENERIC, tmp_path, None, sources=sources).compile()
    made = find_build(GENERIC, {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}, sources)
    path = made.compile()
    found = find_build(GENERIC, nothing, sources)
    assert (found.compiler, found.path, found.compile()) == (None, path, path)
    found.check_owner()
    (sources / "one.cpp").write_text("", encoding="utf-8")
    with pytest.raises(KernelBuildError, match="no C"):
        find_build(GENERIC, nothing, sources)


def test_building_ahead_never_fails_the_setup(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path
) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert build.main() == 0
    assert "not compiled, plain torch will be used instead" in capsys.readouterr().out


def test_the_cache_is_the_users() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/cached"}) == Path("/cached/hardpoint/cpu-kernels")
    assert cache_folder({}) == Path(os.path.expanduser("~/.cache/hardpoint/cpu-kernels"))


def test_building_ahead_says_where_and_nothing_on_request_when_it_is_done(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture, tmp_path: Path, sources: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert build.main(["--quiet"], sources) == 0
    assert capsys.readouterr().out.startswith("CPU kernels for ")
    assert build.main(["--quiet"], sources) == 0
    assert capsys.readouterr().out == ""
    assert build.main([], sources) == 0
    assert str(tmp_path) in capsys.readouterr().out
    cached = cache_folder()
    cached.chmod(0o777)
    (sources / "two.cpp").write_text("int changed() { return 3; }\n", encoding="utf-8")
    assert build.main([], sources) == 0
    assert "can be written by other users" in capsys.readouterr().out

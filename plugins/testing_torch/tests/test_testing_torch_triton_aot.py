"""Kernels are compiled for every target without a GPU, and the table notices what changed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from hardpoint_testing_torch.triton_aot import TARGETS, KernelCase, Resources, load_cases, main
from hardpoint_testing_torch.triton_aot_check import cache_folder, compile_all, excess
from hardpoint_testing_torch.triton_aot_suite import KernelResourceSuite, stale_cases
from hardpoint_testing_torch.triton_aot_table import ResourceTable

pytest.importorskip("triton")

KERNELS = '''
import triton
import triton.language as tl
from hardpoint_testing_torch.triton_aot import KernelCase

SCALE: tl.constexpr = tl.constexpr(2.0)


@triton.jit
def scaled(x):
    """Says something."""
    return x * SCALE


@triton.autotune([triton.Config({"BLOCK": size}, num_warps=size // 128) for size in (128, 256)], key=["size"])
@triton.jit
def double(source, target, size, bias, BLOCK: tl.constexpr):
    place = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = scaled(tl.load(source + place, mask=place < size))
    if bias is not None:
        value += tl.load(bias)
    tl.store(target + place, value, mask=place < size)


def cases():
    types = {"source": "*fp16", "target": "*fp16", "size": "i32"}
    return KernelCase.tuned("double", double, types, {"bias": None}, divisible_by_16=("source", "target"))
'''
Write = Callable[[str], str]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes a module of kernels and gives its provider; results are cached below the test's folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.syspath_prepend(str(tmp_path))
    written = 0

    def write(source: str) -> str:
        nonlocal written
        written += 1
        name = f"aot_{tmp_path.name}_{written}".replace("[", "_").replace("]", "_")
        (tmp_path / f"{name}.py").write_text(source, encoding="utf-8")
        return f"{name}:cases"

    return write


def hashes(provider: str) -> list[str]:
    """Without the module's own name, which every edit changes here."""
    from hardpoint_testing_torch import triton_aot_hash

    found = []
    for case in load_cases(provider):
        for part in (case.function.fn, case.function.fn.fn.__globals__["scaled"]):
            part.fn.__module__ = "kernels"
        found += [triton_aot_hash.case_hash(case, target) for target in case.all_targets]
    return found


def test_every_configuration_is_a_case_with_a_hash_for_each_target(write: Write) -> None:
    provider = write(KERNELS)
    cases = load_cases(provider)
    assert [case.name for case in cases] == ["double[BLOCK=128,warps=1,stages=3]", "double[BLOCK=256,warps=2,stages=3]"]
    found = hashes(provider)
    assert len(set(found)) == len(found) == 2 * len(TARGETS)


def test_hashes_change_with_what_is_compiled_and_with_nothing_else(write: Write) -> None:
    before = hashes(write(KERNELS))
    assert (
        hashes(
            write(
                "\n\n"
                + KERNELS.replace("Says something", "Says more").replace("    value =", "    # Why.\n    value =")
            )
        )
        == before
    )
    for old, new in (
        ("x * SCALE", "x + SCALE"),
        ("constexpr(2.0)", "constexpr(3.0)"),
        ("place < size)\n", "place <= size)\n"),
        ("*fp16", "*fp32"),
        ('divisible_by_16=("source", "target")', 'divisible_by_16=("source",)'),
    ):
        assert old in KERNELS
        assert not set(hashes(write(KERNELS.replace(old, new)))) & set(before), f"{old} to {new}"


def test_a_stale_table_says_what_to_write_again(write: Write, tmp_path: Path) -> None:
    import triton

    from hardpoint_testing_torch.triton_aot_hash import case_hashes

    provider, path = write(KERNELS), tmp_path / "table.json"
    rows = {
        name: {target: Resources(digest, 16, 0, 0) for target, digest in targets.items()}
        for name, targets in case_hashes(load_cases(provider)).items()
    }
    table = ResourceTable(triton.__version__, rows)
    table.write(path)
    assert ResourceTable.read(path) == table
    assert stale_cases(provider, path) == []
    changed = dict(rows)
    first, second = changed
    del changed[second]
    changed[first] = {**rows[first], "sm_90": replace(rows[first]["sm_90"], hash="other")}
    changed["gone"] = rows[first]
    ResourceTable(triton.__version__, changed).write(path)
    assert stale_cases(provider, path) == [
        "gone is in the table, but no case has that name",
        f"{first} on sm_90 has changed since the table was written",
        *(f"{second} on {target} is not in the table" for target in sorted(TARGETS)),
    ]
    suite = type("Suite", (KernelResourceSuite,), {"provider": provider, "table": path})()
    with pytest.raises(AssertionError, match=rf"gone is in the table.*\n(.*\n)+.*triton_aot .* --write {path}"):
        suite.test_the_table_is_of_these_kernels()
    ResourceTable("1.0", rows).write(path)
    assert stale_cases(provider, path) == [
        f"the table is of triton 1.0, installed is {triton.__version__}; write it again"
    ]
    path.write_text("{}", encoding="utf-8")
    with pytest.raises(ValueError, match="no table of kernel resources"):
        stale_cases(provider, path)


def test_impossible_cases_are_refused() -> None:
    with pytest.raises(ValueError, match="no target sm_1; there are: sm_80"):
        KernelCase("one", None, {}, targets=("sm_1",))
    with pytest.raises(ValueError, match="size in both signature and constexprs"):
        KernelCase("one", None, {"size": "i32"}, {"size": 1})
    with pytest.raises(ValueError, match="divisible_by_16 names size"):
        KernelCase("one", None, {}, divisible_by_16=("size",))
    with pytest.raises(ValueError, match="no PACKAGE:FUNCTION"):
        load_cases("nothing")


def test_equal_names_are_refused(write: Write) -> None:
    with pytest.raises(ValueError, match="two cases named 'double"):
        load_cases(write(KERNELS.replace("return KernelCase", "return 2 * KernelCase")))


def test_cases_may_be_in_a_file_of_no_package(write: Write, tmp_path: Path) -> None:
    module = write(KERNELS).partition(":")[0]
    by_file = f"{tmp_path / module}.py:cases"
    assert [case.name for case in load_cases(by_file)] == [case.name for case in load_cases(f"{module}:cases")]
    with pytest.raises(ValueError, match="absent.py is no file with Python source"):
        load_cases(f"{tmp_path}/absent.py:cases")


def test_the_cache_is_the_users() -> None:
    assert cache_folder({"XDG_CACHE_HOME": "/cached"}) == Path("/cached/hardpoint/triton-aot")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["nothing.py:cases", "--write", "t.json"], "nothing.py is no file with Python source"),
        (["cases", "--write", "t.json"], "'cases' is no PACKAGE:FUNCTION"),
        (["no_such_module:cases", "--write", "t.json"], "No module named 'no_such_module'"),
        (["{provider}s", "--write", "t.json"], "has no function 'casess'; it has: "),
        (["{provider}", "--check", "nowhere.json"], "No such file or directory: 'nowhere.json'"),
        (["{provider}", "--write", "nowhere/t.json"], "nowhere is no folder; create it"),
        (["{provider}", "--check", "t.json", "--jobs", "0"], "--jobs: '0' is not a number from 1 on"),
    ],
)
def test_what_the_command_cannot_find_is_said_without_a_traceback(
    write: Write, capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    provider = write(KERNELS)
    with pytest.raises(SystemExit, match="2"):
        main([argument.replace("{provider}", provider) for argument in arguments])
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("def cases(:\n    return []\n", r"cannot be imported: SyntaxError in .*\.py, line 1: .*; correct that first"),
        ("import json\njson.loads('{')\n", r"cannot be imported: JSONDecodeError in .*, line \d+: .*; correct"),
        ("def cases(kind):\n    return []\n", r"fails: TypeError in .*, line \d+: .*'kind'; it takes nothing and"),
        ("def cases():\n    return [1 // 0]\n", r"fails: ZeroDivisionError in .*\.py, line 2: .*; it takes nothing"),
        ("def cases():\n    return 7\n", r"fails: TypeError in .*'int' object is not iterable; it takes nothing and"),
    ],
    ids=["syntax", "import", "argument", "failure", "number"],
)
@pytest.mark.parametrize("is_file", [True, False], ids=["file", "module"])
def test_a_broken_provider_is_said_without_a_traceback(
    write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str], source: str, said: str, is_file: bool
) -> None:
    provider = write(source)
    if is_file:
        provider = f"{tmp_path}/{provider.replace(':', '.py:')}"
    with pytest.raises(SystemExit, match="2"):
        main([provider, "--write", str(tmp_path / "table.json")])
    assert re.search(said, capsys.readouterr().err)


@pytest.mark.parametrize("function", ["plain", "print", "None", "3"])
def test_a_function_that_is_not_tritons_is_said_without_a_traceback(
    write: Write, capsys: pytest.CaptureFixture[str], function: str
) -> None:
    source = "from hardpoint_testing_torch.triton_aot import KernelCase\n\n\ndef plain(x):\n    return x\n\n\n"
    provider = write(source + f"def cases():\n    return [KernelCase('one', {function}, {{'x': '*fp32'}})]\n")
    with pytest.raises(SystemExit, match="2"):
        main([provider, "--write", "table.json"])
    assert re.search(
        r"the function of case 'one' is .*, which Triton cannot compile; put @triton.jit above", capsys.readouterr().err
    )


@pytest.mark.slow
def test_interpreted_kernels_are_tritons_too(write: Write) -> None:
    provider = write(KERNELS)
    script = f"from hardpoint_testing_torch.triton_aot import load_cases; print(len(load_cases({provider!r})))"
    paths = os.pathsep.join(path for path in sys.path if path)
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": paths}
    done = subprocess.run(
        [sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.stdout.strip() == "2", done.stderr[-2000:]


@pytest.mark.slow
def test_compiling_writing_and_checking(
    write: Write, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the command to the suite, in a process that would interpret kernels."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    provider, path = write(KERNELS), tmp_path / "table.json"
    assert main([provider, "--jobs", "1", "--write", str(path)]) == 0
    assert "8 compilations, 0 of them cached, 0 faults" in capsys.readouterr().out
    rows = ResourceTable.read(path).rows
    assert all(0 < row.registers < 64 and row.spill_bytes == 0 for targets in rows.values() for row in targets.values())
    suite = type("Suite", (KernelResourceSuite,), {"provider": provider, "table": path})()
    suite.test_the_table_is_of_these_kernels()
    suite.test_every_kernel_compiles_within_its_budget_and_as_the_table_says()
    text = json.loads(path.read_text(encoding="utf-8"))
    text["kernels"]["double[BLOCK=128,warps=1,stages=3]"]["sm_90"]["registers"] += 1
    path.write_text(json.dumps(text), encoding="utf-8")
    assert main([provider, "--check", str(path)]) == 1
    said = capsys.readouterr()
    assert "8 of them cached" in said.out
    assert "on sm_90 uses Resources" in said.err


def test_results_are_kept_whole_or_not_at_all(tmp_path: Path) -> None:
    from hardpoint_testing_torch.triton_aot_worker import cached, keep

    row = Resources("abc", 16, 32, 0)
    assert cached(tmp_path / "new", "abc") is None
    keep(tmp_path / "new", row)
    assert cached(tmp_path / "new", "abc") == row
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["abc.json"]
    for text in ("", "{", "[]", '{"hash": "abc"}'):
        (tmp_path / "new" / "abc.json").write_text(text, encoding="utf-8")
        assert cached(tmp_path / "new", "abc") is None, text
    keep(None, row)
    assert cached(None, "abc") is None
    (tmp_path / "file").touch()
    keep(tmp_path / "file" / "cache", row)
    assert cached(tmp_path / "file" / "cache", "abc") is None, "what cannot be kept is no fault of the kernel"


@pytest.mark.parametrize(
    ("returned", "said"), [("None", "yields no case"), ("[]", "yields no case"), ("['x']", "yields 'x', which is")]
)
def test_what_a_provider_must_return(tmp_path: Path, returned: str, said: str) -> None:
    path = tmp_path / "cases.py"
    path.write_text(f"def cases():\n    return {returned}\n", encoding="utf-8")
    with pytest.raises(ValueError, match=said):
        load_cases(f"{path}:cases")


def test_metadata_of_another_form_is_no_zero() -> None:
    from hardpoint_testing_torch.triton_aot_worker import amd_usage

    assert amd_usage("    .vgpr_count:     48\n    .vgpr_spill_count: 3\n") == (48, 12)
    with pytest.raises(RuntimeError, match="tells no vgpr_spill_count"):
        amd_usage("    .vgpr_count:     48\n")


def test_what_exceeds_a_budget_or_a_device_is_told() -> None:
    assert excess("one", Resources("", 255, 64 * 1024, 8), 8, "gfx942") == []
    assert excess("one", Resources("", 255, 64 * 1024 + 1, 9), 8, "gfx942") == [
        "one spills 9 bytes a thread; its budget is 8",
        "one needs 65537 bytes shared memory; 65536 are there",
    ]


WASTEFUL = """
import triton
import triton.language as tl
from hardpoint_testing_torch.triton_aot import KernelCase


@triton.jit
def wasteful(a, b, c, SIZE: tl.constexpr):
    rows = tl.arange(0, SIZE)
    places = rows[:, None] * SIZE + rows[None, :]
    tl.store(c + places, tl.dot(tl.load(a + places), tl.load(b + places)))


@triton.jit
def wrong(a):
    tl.store(a, nothing)


def cases():
    types = {"a": "*fp16", "b": "*fp16", "c": "*fp32"}
    return (
        KernelCase("wasteful", wasteful, types, {"SIZE": 128}, num_warps=1, targets=("sm_80",)),
        KernelCase("wrong", wrong, {"a": "*fp16"}, targets=("gfx942",)),
        KernelCase("misfit", wrong, {"b": "*fp16"}, targets=("gfx942",)),
    )
"""


@pytest.mark.slow
def test_what_does_not_compile_or_spills_is_a_fault(write: Write) -> None:
    outcome = compile_all(write(WASTEFUL), jobs=1, cold=True)
    assert not cache_folder().exists(), "a cold run neither reads nor writes results"
    assert len(outcome.faults) >= 3
    text = "\n".join(outcome.faults)
    assert "wasteful on sm_80 spills" in text
    assert "wrong does not compile for gfx942" in text
    assert "'nothing' is not defined" in text or "nothing is not defined" in text
    assert "the case gives no type or value for ['a'], and unknown ['b']" in text

"""When kernels are there: from the cache, after a compilation, or not at all, and what is said about it."""

from __future__ import annotations

import _ctypes
import logging
import os
import pickle
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import LogicalDevice, ThreadPlan
from hardpoint_cpu.host import Host
from hardpoint_cpu.kernels import BuildMode, KernelProvider, KernelState, find_report
from hardpoint_cpu.native import build as native_build
from hardpoint_cpu.native.levels import named_level
from hardpoint_cpu.platform import CpuOptions, CpuPlatform, probe

NOWHERE = {"PATH": "", "XDG_CACHE_HOME": "/nowhere"}


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.INFO, logger="hardpoint"):
        yield caplog


def fake_compiler(folder: Path, script: str) -> dict[str, str]:
    """An environment whose only compiler answers ``--version`` and is otherwise ``script``."""
    compiler = folder / "cxx"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo fake 1 && exit 0\n{script}\n', encoding="utf-8")
    compiler.chmod(0o755)
    return {"CXX": str(compiler), "PATH": os.environ["PATH"], "XDG_CACHE_HOME": str(folder / "cache")}


class TestUnavailable:
    def test_without_a_compiler_it_says_once_what_is_lost_and_what_to_install(
        self, log: pytest.LogCaptureFixture
    ) -> None:
        kernels = KernelProvider(Host(), environment=NOWHERE)
        assert kernels.report().state is KernelState.UNAVAILABLE
        assert [kernels.library() for _ in range(3)] == [None] * 3
        (record,) = log.records
        assert record.levelno == logging.WARNING
        assert "several times slower" in record.message
        assert "install g++" in record.message
        assert str(kernels.report().reason) in record.message

    def test_a_failed_build_is_final_and_carries_the_compilers_words(
        self, tmp_path: Path, log: pytest.LogCaptureFixture
    ) -> None:
        environment = fake_compiler(tmp_path, "echo no such register >&2; exit 3")
        kernels = KernelProvider(Host(), environment=environment)
        assert kernels.wait() is None
        assert kernels.library() is None
        report = kernels.report()
        assert report.state is KernelState.UNAVAILABLE
        assert report.reason is not None
        assert "no such register" in report.reason
        assert [record.levelno for record in log.records] == [logging.INFO, logging.WARNING]

    @pytest.mark.parametrize("build", ["background", "wait"])
    def test_a_cache_that_cannot_be_written_names_the_variable_to_set(self, tmp_path: Path, build: BuildMode) -> None:
        (tmp_path / "cache").write_text("a file", encoding="utf-8")
        kernels = KernelProvider(Host(), build=build, environment=fake_compiler(tmp_path, "exit 0"))
        assert kernels.wait() is None
        assert "XDG_CACHE_HOME" in str(kernels.report().reason)

    @pytest.mark.parametrize("build", ["background", "wait"])
    @pytest.mark.parametrize(
        ("script", "reason"),
        [
            ("printf '\\377 broken\\n' >&2; exit 1", "broken"),
            ("exit 0", "made no"),
            ('while [ "$1" != -o ]; do shift; done; echo garbage > "$2"', "cannot be loaded"),
        ],
    )
    def test_whatever_a_compiler_does_is_no_crash_but_the_reason(
        self, tmp_path: Path, build: BuildMode, script: str, reason: str
    ) -> None:
        kernels = KernelProvider(Host(), build=build, environment=fake_compiler(tmp_path, script))
        assert kernels.wait() is None
        assert reason in str(kernels.report().reason)

    @pytest.mark.parametrize(
        ("script", "timeout", "reason"),
        [
            ("exit 5", 60.0, "failed with status 5"),
            ("printf '\\377' >&2; exit 5", 60.0, "failed with status 5"),
            ("exec sleep 5", 0.05, "no answer within 0.05 s; set CXX"),
        ],
    )
    def test_a_compiler_that_does_not_say_its_version_is_none(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, timeout: float, reason: str
    ) -> None:
        monkeypatch.setattr(native_build, "VERSION_TIMEOUT_S", timeout)
        environment = fake_compiler(tmp_path, "")
        Path(environment["CXX"]).write_text(f"#!/bin/sh\n{script}\n", encoding="utf-8")
        kernels = KernelProvider(Host(), environment=environment)
        assert reason in str(kernels.report().reason)
        assert kernels.library() is None
        assert kernels.report().state is KernelState.UNAVAILABLE
        assert reason in str(kernels.report().reason)

    def test_a_cache_that_cannot_be_looked_at_is_reported(self, tmp_path: Path) -> None:
        environment = {**fake_compiler(tmp_path, "exit 0"), "XDG_CACHE_HOME": str(tmp_path / ("x" * 300))}
        report = KernelProvider(Host(), environment=environment).report()
        assert report.state is KernelState.UNAVAILABLE
        assert "set XDG_CACHE_HOME" in str(report.reason)

    @pytest.mark.parametrize(("content", "reason"), [("cut", "cut short"), ("other", "undefined symbol")])
    def test_a_library_that_is_not_whole_or_another_one_is_not_used(
        self, tmp_path: Path, content: str, reason: str
    ) -> None:
        environment = fake_compiler(tmp_path, "exit 0")
        path = KernelProvider(Host(), environment=environment).report().path
        assert path is not None
        path.parent.mkdir(parents=True)
        other = Path(_ctypes.__file__).read_bytes()
        path.write_bytes(other[: len(other) // 2] if content == "cut" else other)
        kernels = KernelProvider(Host(), environment=environment)
        assert kernels.library() is None
        assert reason in str(kernels.report().reason)
        assert "delete its folder" in str(kernels.report().reason)

    def test_what_is_not_compiled_stays_so_where_building_is_off(self, tmp_path: Path) -> None:
        kernels = KernelProvider(Host(), build="off", environment=fake_compiler(tmp_path, "exit 0"))
        assert kernels.report().state is KernelState.UNASKED
        assert kernels.library() is None
        assert "kernel_build is off" in str(kernels.report().reason)

    def test_switched_off_is_no_warning(self, log: pytest.LogCaptureFixture) -> None:
        kernels = KernelProvider(Host(), is_enabled=False)
        assert kernels.library() is None
        assert [record.levelno for record in log.records] == [logging.INFO]
        assert kernels.report().path is None

    def test_a_level_of_other_processors_is_refused_when_it_is_set(self) -> None:
        with pytest.raises(ConfigError, match="there is no level 'sse9'; allowed: auto, .*kernel_level"):
            CpuPlatform(CpuOptions(kernel_level="sse9"))


class TestReady:
    def test_it_is_loaded_from_the_cache_with_the_threads_of_the_plan(self) -> None:
        kernels = KernelProvider(Host(), build="wait")
        kernels.bind(ThreadPlan(compute_threads=2))
        library = kernels.library()
        assert library is not None
        assert library.isa == kernels.level.name
        assert kernels.library() is library
        assert kernels.report().state is KernelState.READY

    def test_a_process_has_one_pool(self) -> None:
        one, other = KernelProvider(Host(), build="wait"), KernelProvider(Host(), build="wait")
        assert one.library() is other.library()

    def test_a_copy_in_another_process_starts_anew(self) -> None:
        kernels = KernelProvider(Host(), level="generic", build="off")
        again: KernelProvider = pickle.loads(pickle.dumps(kernels))  # noqa: S301 (own bytes)
        assert again.level == kernels.level


class TestReport:
    def test_the_platform_tells_level_state_and_place(self) -> None:
        facts = CpuPlatform(CpuOptions(kernel_level="generic")).capabilities()
        assert facts["kernel_level"] == "generic"
        assert facts["kernels"] in ("ready", "unasked")
        assert "generic-" in facts["kernel_path"]

    def test_the_probe_tells_the_same(self) -> None:
        answer = probe()
        assert answer.details["kernels"] in answer.reason
        assert answer.details.get("kernel_reason", answer.details.get("kernel_path", "")[:20]) in answer.reason

    def test_without_a_compiler_there_is_no_place(self) -> None:
        report = find_report(named_level("generic", "x86_64", ()), NOWHERE)
        assert report.path is None
        assert "kernel_path" not in report.facts()


def test_switching_off_reaches_the_provider() -> None:
    platform = CpuPlatform(CpuOptions(kernels="off"))
    assert platform.kernels.library() is None
    assert platform.describe(LogicalDevice(0)).device_type == "cpu"
